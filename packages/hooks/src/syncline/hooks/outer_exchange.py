"""Average parameters over all replicas while training continues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from syncline.collectives import ProcessGroup, ReduceOp, Work, broadcast_coalesced

from .compressor import Compressor, start_exchange
from .error_feedback import ErrorFeedback
from .low_precision import math_dtype
from .saved_state import Origin
from .seeds import SharedSeeds
from .sites import Sites
from .statistics import HookStatistics


class PendingAverage(ABC):
    """An average that may still be in progress. All ranks call `wait` in the order in which the averages were started."""

    _averages: list[torch.Tensor] | None = None

    def wait(self) -> list[torch.Tensor]:
        """Wait for the average, and return one tensor for each parameter. Every rank gets the same bits.

        Each tensor has the shape of its parameter, and the `math_dtype` of the parameter's dtype.
        """
        if self._averages is None:
            self._averages = self._receive()
        return self._averages

    @abstractmethod
    def _receive(self) -> list[torch.Tensor]: ...


class KnownAverage(PendingAverage):
    """An average that is already complete."""

    def __init__(self, averages: Sequence[torch.Tensor]) -> None:
        self._averages = list(averages)

    def _receive(self) -> list[torch.Tensor]:
        raise AssertionError("it is known")


class OuterExchange:
    """Averages parameters over replicas. The ranks send whole parameters, or compressed differences from the anchors.

    The anchors are the parameters after the latest synchronisation.

    Args:
        group: the group over which parameters are averaged. With `Sites`, the first ranks of all sites; None on all other
            ranks.
        inside: the group of this rank's site, in which the first rank broadcasts the average. None without sites.
        compressor: the compressor of the differences, which uses error feedback. None: whole parameters are averaged.
        seed: the compressor's seed, the same on every rank.
    """

    def __init__(
        self, group: ProcessGroup | None, inside: ProcessGroup | None, compressor: Compressor | None, seed: int
    ) -> None:
        self.inside = inside
        self.compressor = compressor
        self.seeds = SharedSeeds(seed)
        self.error_feedback = ErrorFeedback()
        self.origin = Origin()
        self.statistics = HookStatistics()
        self._group = group

    @classmethod
    def between(cls, sites: Sites, compressor: Compressor | None, seed: int) -> OuterExchange:
        """Make an exchange between sites."""
        return cls(sites.between, sites.inside, compressor, seed)

    def start(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]
    ) -> PendingAverage:
        """Start to average the present values of parameters. All ranks call `start` for the same parameters in the same order.

        `parameters` have floating-point dtypes. `start` does not change the parameters. The average uses the values at this
        call, so you may change the parameters afterwards. `anchors` have the same values on every rank, in the `math_dtype` of
        the parameters' dtypes.
        """
        # Every rank draws a seed, even a rank that does not communicate: so saved states hold the same seeds on all ranks.
        seed = self.seeds.next()
        shaped = [torch.empty_like(anchor) for anchor in anchors]
        own: PendingAverage
        if self._group is None:
            own = KnownAverage(shaped)  # the broadcast from the site's first rank fills it
            # This rank compresses nothing. If it has loaded errors, they belong to the first rank of a site.
            self.error_feedback.clear()
            self.origin = Origin()
        elif self.compressor is None:
            own = _WholeAverage(self._group, parameters, shaped, self.statistics)
        else:
            # Do this before the error feedback is used, because `settle` drops errors that another rank saved.
            self.origin.settle(self._group.rank, self._group.size, self.error_feedback)
            own = self._start_compressed(self._group, self.compressor, names, parameters, anchors, seed)
        return own if self.inside is None else _SharedAverage(own, self.inside)

    def _start_compressed(
        self,
        group: ProcessGroup,
        compressor: Compressor,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        anchors: Sequence[torch.Tensor],
        seed: int,
    ) -> PendingAverage:
        parts: list[tuple[list[int], Work, torch.Tensor]] = []
        for indices in _by_dtype(anchors).values():  # a compressor gets tensors of one dtype
            with torch.no_grad():
                of_part = [names[index] for index in indices]
                differences = [anchors[index] - parameters[index] for index in indices]
                self.error_feedback.add_to(of_part, differences)
                message = compressor.compress(differences, seed)
                sent = compressor.decompress(message, differences, seed)
                # NaN and infinity must not stay in the error feedback, where they would spoil all later steps.
                errors = [torch.nan_to_num_(whole - part, 0.0, 0.0, 0.0) for whole, part in zip(differences, sent, strict=True)]
                self.error_feedback.remember(of_part, errors)
            self.statistics.sends(sum(parameters[index].nbytes for index in indices), message.nbytes)
            parts.append((indices, *start_exchange(compressor, group, message, seed)))
        return _CompressedAverage(parts, compressor, [anchor.clone() for anchor in anchors], seed)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Return the indices of the tensors of each `math_dtype`. Tensors without elements are left out: nothing is sent."""
    found: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            found.setdefault(math_dtype(tensor.dtype), []).append(index)
    return found


class _WholeAverage(PendingAverage):
    def __init__(
        self,
        group: ProcessGroup,
        parameters: Sequence[torch.Tensor],
        shaped: Sequence[torch.Tensor],
        statistics: HookStatistics,
    ) -> None:
        self._shaped = list(shaped)
        self._parts: list[tuple[list[int], torch.Tensor, Work]] = []
        for dtype, indices in _by_dtype(parameters).items():
            with torch.no_grad():
                # A copy: the inner optimizer changes the parameters while the average is in progress.
                flat = torch.cat([parameters[index].to(dtype).reshape(-1) for index in indices])
            statistics.sends(sum(parameters[index].nbytes for index in indices), flat.nbytes)
            self._parts.append((indices, flat, group.all_reduce(flat, ReduceOp.AVG, async_op=True)))

    def _receive(self) -> list[torch.Tensor]:
        for indices, flat, work in self._parts:
            work.wait()
            pieces = torch.split(flat, [self._shaped[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                self._shaped[index].copy_(piece.view(self._shaped[index].shape))
        return self._shaped


class _CompressedAverage(PendingAverage):
    """An average of compressed differences: the result is the anchors minus the mean difference. See `OuterExchange`."""

    def __init__(
        self,
        parts: Sequence[tuple[list[int], Work, torch.Tensor]],
        compressor: Compressor,
        anchors: list[torch.Tensor],
        seed: int,
    ) -> None:
        self._parts = parts
        self._compressor = compressor
        self._anchors = anchors
        self._seed = seed

    def _receive(self) -> list[torch.Tensor]:
        averages = list(self._anchors)
        for indices, work, messages in self._parts:
            work.wait()
            with torch.no_grad():
                means = self._compressor.mean(messages, [self._anchors[index] for index in indices], self._seed)
                for index, mean in zip(indices, means, strict=True):
                    averages[index] = self._anchors[index] - mean
        return averages


class _SharedAverage(PendingAverage):
    def __init__(self, own: PendingAverage, inside: ProcessGroup) -> None:
        self._own = own
        self._inside = inside

    def _receive(self) -> list[torch.Tensor]:
        averages = self._own.wait()
        broadcast_coalesced(averages, group=self._inside)
        return averages
