"""Divide each batch among the present ranks, and count the applied batches of the epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from syncline.collectives import InvalidArgumentError, MisuseError


def batch_bounds(number: int, batches: int, samples: int) -> tuple[int, int]:
    """Return the positions of the first sample of batch `number`, and of the first sample after this batch."""
    return number * samples // batches, (number + 1) * samples // batches


def share_bounds(rank: int, ranks: int, begin: int, end: int) -> tuple[int, int]:
    """Return the positions of the first sample of a rank's share, and of the first sample after this share.

    The batch contains the samples from position `begin` to position `end` - 1.
    """
    return begin + rank * (end - begin) // ranks, begin + (rank + 1) * (end - begin) // ranks


class ElasticSampler(Sampler[list[int]]):
    """Yields the indices of this rank's share of each batch. Pass the sampler to a `DataLoader` as `batch_sampler`.

    A batch contains the samples of all ranks, so the number of steps does not depend on the number of ranks. Each epoch uses
    every sample once, in batches whose sizes differ by at most one sample. (With `drop_last` all batches have the same size,
    and the remaining samples are left out.)

    A batch counts as applied when all ranks have called `optimizer.step()`. If a rank is lost before this moment, the batch is
    divided again among the remaining ranks. `Elastic` calls `divide` when the ranks change, and `advance` after each applied
    batch.

    Args:
        samples: the number of samples in the data set.
        batch_size: the largest number of samples that all ranks take together in one step.
        shuffle: use a new order in each epoch, the same on all ranks.
        seed: the seed of the random orders.
        drop_last: leave out samples that do not fill a batch of `batch_size`.

    Attributes:
        epoch: the number of the present epoch.
        applied: the number of applied batches of this epoch.
        settings: the constructor's arguments. Samplers with equal settings divide an epoch into the same batches.

    Raises:
        InvalidArgumentError: `batch_size` is below 1, or there are too few samples for one batch.
    """

    def __init__(self, samples: int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if batch_size < 1 or samples < (batch_size if drop_last else 1):
            raise InvalidArgumentError(
                f"expected at least one batch of at least one sample, found {samples=} and {batch_size=}"
            )
        # NumPy's integers become ints, so that `torch.load(..., weights_only=True)` can load a saved state.
        samples, batch_size, seed = operator.index(samples), operator.index(batch_size), operator.index(seed)
        self._all_samples = samples
        self._batches = samples // batch_size if drop_last else -(-samples // batch_size)
        self._samples = self._batches * batch_size if drop_last else samples
        self._shuffle = shuffle
        self._seed = seed
        self.settings = {
            "samples": samples,
            "batch_size": batch_size,
            "shuffle": bool(shuffle),
            "seed": seed,
            "drop_last": bool(drop_last),
        }
        self._rank, self._ranks = 0, 1
        self.epoch = 0
        self.applied = 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's share of each batch that is not yet applied in this epoch, as a list of indices."""
        order = self._order()
        for number in range(self.applied, self._batches):
            begin, end = self._share(number)
            yield order[begin:end].tolist()

    @property
    def is_exhausted(self) -> bool:
        """Whether the ranks have applied the optimizer's step for all batches of the epoch."""
        return self.applied >= self._batches

    @property
    def most_ranks(self) -> int:
        """The largest possible number of ranks: the size of the smallest batch, because each rank needs at least one sample."""
        return self._samples // self._batches

    @property
    def weight(self) -> float:
        """The factor for this rank's loss in the present batch. Multiply the mean loss of this rank's share by this factor.

        The sizes of the ranks' shares may differ by one sample, but DDP gives all ranks the same weight. With this factor, the
        averaged gradient is the mean over all samples of the batch.
        """
        begin, end = batch_bounds(self.applied, self._batches, self._samples)
        mine = self._share(self.applied)
        return (mine[1] - mine[0]) * self._ranks / (end - begin)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch` at its first batch. If the sampler is already in this epoch, do nothing."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.applied = 0

    def divide(self, rank: int, ranks: int) -> None:
        """From now on, divide each batch among `ranks` ranks, and yield the shares of rank `rank`.

        Raises:
            InvalidArgumentError: a batch has fewer samples than there are ranks.
        """
        if ranks > self.most_ranks:
            raise InvalidArgumentError(
                f"expected at least one sample for each of {ranks} ranks in every batch, found batches of {self.most_ranks}: "
                "pass a larger batch_size"
            )
        self._rank, self._ranks = rank, ranks

    def advance(self) -> None:
        """Count the present batch as applied (all ranks have used it in `optimizer.step()`). Go to the next batch."""
        self.applied += 1

    def batch_in_words(self) -> str:
        """Return a text that differs between samplers that are at different batches. The text has no comma."""
        # Without `shuffle` the seed changes nothing, so scripts may give each rank a seed of its own.
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items() if name != "seed" or self._shuffle)
        return f"batch {self.applied} of epoch {self.epoch} of ElasticSampler({settings})"

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of applied batches, and the constructor's arguments. All are the same on all ranks."""
        return {"epoch": self.epoch, "applied": self.applied, **self.settings}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the first batch that was not applied when `state` was saved.

        Raises:
            MisuseError: `state` was saved within an epoch by a sampler with other arguments, so the batches differ.
        """
        # A dict that the script has made itself may lack the arguments.
        saved: dict[str, Any] = {name: state.get(name, value) for name, value in self.settings.items()}
        applied = state["applied"]
        if saved != self.settings and applied > 0:
            if applied < len(ElasticSampler(**saved)):
                name = next(name for name, value in self.settings.items() if saved[name] != value)
                raise MisuseError(
                    f"the saved state is of a sampler with {name}={saved[name]}, this one has {name}={self.settings[name]}, "
                    f"and batches of epoch {state['epoch']} are applied already: construct it with the saved value, or begin "
                    'an epoch by load_state_dict({"epoch": ..., "applied": 0})'
                )
            applied = len(self)  # the saved epoch has ended, so no batch is left here, either
        self.epoch, self.applied = state["epoch"], applied

    def _share(self, number: int) -> tuple[int, int]:
        return share_bounds(self._rank, self._ranks, *batch_bounds(number, self._batches, self._samples))

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._all_samples, device="cpu")
        # Use a separate generator, so that the order does not depend on the random state of a rank.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._all_samples, generator=generator, device="cpu")
