"""Elastic: training that goes on with the ranks that are left."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, TypeVar

import torch

from syncline.collectives import (
    BackendUnavailableError,
    InvalidArgumentError,
    MisuseError,
    RankGivenUpError,
    RankLostError,
    StoreError,
    TransportError,
    exchange_objects,
)
from syncline.collectives.internal import DEFAULT_PATIENCE_S, expect_losses, replace_default_group

from .distributed_data_parallel import DistributedDataParallel
from .elastic_sampler import ElasticSampler
from .step_snapshot import StepSnapshot

logger = logging.getLogger("syncline.ddp")

Batch = TypeVar("Batch")


class _Phase(Enum):
    """Where a rank is in a step."""

    BETWEEN_STEPS = auto()
    COMPUTING = auto()
    AGREEING = auto()
    APPLYING = auto()


class _NotAppliedError(Exception):
    """The step must be done again; leaves the body of `Elastic.step`."""


class Elastic:
    """Lets a training loop go on when ranks die: each step is applied on all ranks that are left, or on none and done again.

    ::

        sampler = ElasticSampler(len(data), batch_size=96)
        loader = DataLoader(data, batch_sampler=sampler)
        elastic = Elastic(model, optimizer, sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in elastic.batches(loader):
                with elastic.step():
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(images), labels) * sampler.weight
                    loss.backward()
                    optimizer.step()

    Note [Applied on all or on none]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Before the first `optimizer.step()` of a step the ranks meet in a barrier: they *agree*. It needs no change of the loop,
    since optimizers can be hooked.

    1. Who enters the barrier has the averaged gradients of the step, which are the same on all ranks.
    2. If a rank leaves the barrier without an error, all had entered it, so all that live can apply the step.
    3. If a rank dies, the barrier may end well on some ranks and fail on others. So after `shrink` the survivors tell each
       other how many steps they have agreed on. Who is one behind the others was in that barrier, has the gradients, and
       applies the step. If nobody is ahead, nobody has applied it, and all do it again.

    What a step changes before it is applied, buffers and random state, is put back before it is done again (`StepSnapshot`).
    All backwards of a step come before its first `optimizer.step()`; there may be several, and several optimizers.

    A `TransportError` inside `with elastic.step():` ends the body there, and the loop goes on with what `batches` gives next:
    the same batch, divided anew, if the step was not applied. Outside of it, in an evaluation for instance, a loss is an error
    as ever, and writes a report; a loss that the training goes on from writes none. The model's group is another object after
    a loss: ask `model.join_process_group`. If the group was the default group, the new one takes its place.

    Args:
        model: on a group that can shrink.
        optimizer: steps the model's parameters; or several.
        sampler: divides the batches.
        min_ranks: with fewer ranks the training ends.
        max_failures: so many ranks may be lost in all; None for any number.
        patience_s: see `ProcessGroup.shrink`.
        give_up_s: how long one recovery may take, in seconds.

    Attributes:
        applied_steps: how many steps were applied.
        lost_ranks: the ranks that were lost, as they were numbered when this object was made.
        recovery_s: for each recovery the seconds from the error to the end of the recovery.

    Cost: for each step one barrier, a copy of the model's buffers, and one of the random state (5 KB).

    Raises:
        BackendUnavailableError: the model's group cannot shrink; the message says why.
        InvalidArgumentError: a limit makes no sense, or batches are too small for the ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        sampler: ElasticSampler,
        *,
        min_ranks: int = 1,
        max_failures: int | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
        give_up_s: float = 300.0,
    ) -> None:
        group = model.join_process_group
        lack = group.missing_for_shrink()
        if lack is not None:
            raise BackendUnavailableError(f"elastic training on {group.place()}: {lack}")
        if not 1 <= min_ranks <= group.size:
            raise InvalidArgumentError(f"expected min_ranks from 1 to the {group.size} ranks of the group, found {min_ranks}")
        self._model = model
        self._group = group
        self._sampler = sampler
        self._min_ranks = min_ranks
        self._max_failures = max_failures
        self._patience_s = patience_s
        self._give_up_s = give_up_s
        self._phase = _Phase.BETWEEN_STEPS
        self._snapshot: StepSnapshot | None = None
        self.applied_steps = 0
        self.lost_ranks: list[int] = []
        self._first_rank, self._first_size = group.rank, group.size
        self.recovery_s: list[float] = []
        sampler.divide(group.rank, group.size)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._handles = [each.register_step_pre_hook(self._before_optimizer) for each in optimizers]

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of the epoch that were not applied so far. Take each in one `with elastic.step():`.

        Args:
            loader: gives this rank's share of each, in order, from the sampler's first; iterated anew after a loss.

        Raises:
            MisuseError: a batch was taken without a step.
        """
        while not self._sampler.is_exhausted:
            group = self._group
            for batch in loader:
                applied = self._sampler.applied
                yield batch
                if self._group is not group:
                    break
                if self._sampler.applied == applied:
                    raise MisuseError("a batch was taken, and no step: put what is done with it into `with elastic.step():`")

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step: everything from the forward to `optimizer.step()`, and what shall happen only if it was applied.

        Raises:
            RankLostError: fewer than `min_ranks` are left, or more than `max_failures` were lost; on all survivors.
            RankGivenUpError: the others have gone on without this rank.
            TransportError: a recovery took longer than `give_up_s`.
        """
        if self._phase is not _Phase.BETWEEN_STEPS:
            raise MisuseError("a step was begun within a step")
        self._snapshot = StepSnapshot(self._model.module)
        self._phase = _Phase.COMPUTING
        expect_losses(self._group, True)
        try:
            yield
            self._agree()  # a loop may decide not to step the optimizer
        except _NotAppliedError:
            pass
        except TransportError as error:
            self._recover(error)
        finally:
            self._phase = _Phase.BETWEEN_STEPS
            expect_losses(self._group, False)

    def close(self) -> None:
        """Let the optimizers step without agreement from now on."""
        for handle in self._handles:
            handle.remove()

    # ---- the agreement ----

    def _before_optimizer(self, *_: Any) -> None:
        if self._phase is _Phase.BETWEEN_STEPS:
            raise MisuseError("optimizer.step() was called outside of `with elastic.step():`")
        self._agree()

    def _agree(self) -> None:
        """See Note [Applied on all or on none]."""
        if self._phase is _Phase.APPLYING:
            return
        self._phase = _Phase.AGREEING
        try:
            self._group.barrier()
        except TransportError as error:
            if not self._recover(error):
                raise _NotAppliedError from None
        else:
            self._count_step()
        self._phase = _Phase.APPLYING

    def _count_step(self) -> None:
        self.applied_steps += 1
        self._sampler.advance()
        logger.debug("applied step %d", self.applied_steps)

    # ---- the recovery ----

    def _recover(self, error: TransportError) -> bool:
        """Go on with the ranks that are left; whether this rank shall apply the step that it was about to agree on."""
        began_s = time.perf_counter()
        logger.info("rank lost or out of reach: %s", error)
        present: dict[int, int] = {}
        while not present:
            self._check_hope(began_s, error)
            try:
                present = self._go_on_without_the_lost()
            except TransportError as again:
                error = again
        self._check_limits(present)
        applies = self._settle_step(max(present.values()))
        self.recovery_s.append(time.perf_counter() - began_s)
        logger.info("went on with %d rank(s) at step %d", len(present), self.applied_steps)
        return applies

    def _go_on_without_the_lost(self) -> dict[int, int]:
        """Shrink, and let the model use the new group. May be repeated.

        Returns:
            For each rank that is left, as it was numbered at first, how many steps it has applied.
        """
        old, self._group = self._group, self._group.shrink(patience_s=self._patience_s)
        is_default = replace_default_group(old, self._group)
        present = dict(exchange_objects((self._first_rank, self.applied_steps), group=self._group))
        self._model.update_process_group(None if is_default else self._group)
        return present

    def _settle_step(self, most_applied: int) -> bool:
        """See Note [Applied on all or on none]; whether this rank shall apply the present step."""
        if most_applied > self.applied_steps:
            if self._phase is not _Phase.AGREEING:
                raise MisuseError(
                    f"{self._group.place()} has applied {self.applied_steps} steps, and another rank "
                    f"{most_applied}: all ranks must take the same steps"
                )
            self._count_step()
            return True
        if self._phase is not _Phase.APPLYING and self._snapshot is not None:
            self._snapshot.restore()
        return False

    def _check_limits(self, present: Collection[int]) -> None:
        """The same verdict on all ranks that are left."""
        group = self._group
        self.lost_ranks = sorted(set(range(self._first_size)) - set(present))
        if group.size < self._min_ranks:
            problem = f"{group.size} rank(s) are left, and min_ranks is {self._min_ranks}"
        elif self._max_failures is not None and len(self.lost_ranks) > self._max_failures:
            problem = f"{len(self.lost_ranks)} rank(s) were lost in all, and max_failures is {self._max_failures}"
        else:
            self._sampler.divide(group.rank, group.size)
            return
        raise RankLostError(
            f"the training ends on {group.place()} after {self.applied_steps} applied steps: {problem} (lost: "
            f"{self.lost_ranks}, as they were numbered at first). Start it again from a checkpoint, or allow more",
            self.lost_ranks,
        )

    def _check_hope(self, began_s: float, error: TransportError) -> None:
        if isinstance(error, (RankGivenUpError, StoreError)):
            raise error
        if time.perf_counter() - began_s > self._give_up_s:
            raise TransportError(
                f"the training ends on {self._group.place()} after {self.applied_steps} applied steps: the ranks "
                f"did not come together again within {self._give_up_s:g} s (give_up_s). The last problem: {error}"
            ) from error
