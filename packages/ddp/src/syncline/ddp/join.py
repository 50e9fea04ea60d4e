"""Join lets training continue when some ranks have no inputs left.

::

    with model.join():               a rank with inputs             a rank without (it has left the loop)
        for inputs in loader:
            model(inputs) ...        all_reduce: I have inputs ◄──► all_reduce: I have none
                                     its collectives           ◄──► main_hook: takes part in them, adding nothing
    at the end                       all_reduce: I have none   ◄──► all_reduce: I have none
                                     post_hook                 ◄──► post_hook: the state of a rank with the most inputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Literal

import torch

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup, ReduceOp
from syncline.collectives.internal import message_device


class JoinHook:
    """Communicates for one `Joinable` in a `Join` context: on ranks without inputs, and on all ranks at the end.

    `Join` calls the methods. Override the methods that your joinable needs; in this base class they do nothing.
    """

    def main_hook(self, present: Sequence[int]) -> None:
        """Take part in the collectives that the ranks with inputs issue in one iteration.

        `Join` calls this method on every rank without inputs, once for each iteration of the ranks with inputs.

        Args:
            present: the ranks that have inputs, at least one rank.
        """

    def post_hook(self, last_rank: int) -> None:
        """Give all ranks the state of rank `last_rank`, because a rank that ran out of inputs early has an older state.

        `Join` calls this method on all ranks when no rank has inputs left, so the method may communicate.

        Args:
            last_rank: the highest of the ranks that had inputs in the last iteration. This number is the same on every rank.
        """

    def leave(self) -> None:
        """Undo the hook's changes of its joinable. `Join` calls this method at the end of the context, also after an error."""


class Joinable(ABC):
    """The base class of objects that communicate in each iteration and can be passed to `Join`, such as a wrapped model.

    In each iteration, the object calls `Join.notify_join_context(self)` before it communicates.
    """

    _join: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a new hook that communicates for this object on a rank without inputs.

        `Join` calls this method on every rank at the start of the context. During the call, `self._join` is already set.

        Args:
            kwargs: the `kwargs` of `Join`. Every joinable gets all of them, and must ignore arguments that it does not know.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the tensors that the joinable communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup:
        """The group over which the joinable communicates."""


class Join:
    """A context around a training loop in which ranks may have different numbers of inputs.

    A rank that leaves the loop early takes part in the collectives of the other ranks, until all ranks have left the loop. If
    the loop raises an error on a rank, this rank does not wait for other ranks.

    Args:
        joinables: all objects that communicate in the loop, such as a `DistributedDataParallel` or an optimizer, in the order
            in which they communicate. All objects use the same group. A rank without inputs runs the part of one object after
            the other. So in the loop, the backward of each forward comes before the next forward, also of another model.
        enable: False makes the context do nothing.
        throw_on_early_termination: True: raise an error on all ranks when one rank has no inputs left. False: the other ranks
            go on.
        kwargs: arguments that the context passes to the `join_hook` of each joinable.

    Cost: in each iteration, one all_reduce of a tensor with one byte for each rank.

    Raises:
        InvalidArgumentError: there is no joinable, or the joinables have different groups.
        MisuseError: at the start of the context, if a joinable is already in a join context, or does not support this context.
        DisagreementError: on every rank, if a rank has no inputs left and `throw_on_early_termination` is True. The text names
            the ranks without inputs.
    """

    def __init__(
        self, joinables: Sequence[Joinable], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
    ) -> None:
        if not joinables:
            raise InvalidArgumentError("expected at least one joinable, found none")
        self._joinables = list(joinables)
        self._enabled = enable
        self._throws = throw_on_early_termination
        self._kwargs = kwargs
        self._hooks: list[JoinHook] = []
        self._begin()

    def _begin(self) -> None:
        first, groups = self._joinables[0], [joinable.join_process_group for joinable in self._joinables]
        if any(not _is_same(group, groups[0]) for group in groups):
            raise InvalidArgumentError(f"expected joinables of one process group, found {', '.join(map(repr, groups))}")
        self._group = groups[0]
        # Use the CPU if the group supports the CPU: the host reads the tensor at once, and would have to wait for a GPU.
        self._device = message_device(self._group, first.join_device)
        self._present: tuple[int, ...] = tuple(range(self._group.size))

    @property
    def throws(self) -> bool:
        """The argument `throw_on_early_termination`: whether all ranks raise an error when one rank has no inputs left."""
        return self._throws

    def is_first(self, joinable: object) -> bool:
        """Whether `joinable` is the first joinable of the context: the one that communicates in `notify_join_context`."""
        return joinable is self._joinables[0]

    @staticmethod
    def notify_join_context(joinable: Joinable) -> tuple[int, ...] | None:
        """Tell the other ranks that this rank has inputs. A joinable calls this method before it communicates in an iteration.

        For the first joinable of the context, this method is a collective. For the other joinables, the method does not
        communicate, and returns the latest result for the first joinable.

        Returns:
            The ranks that have inputs in this iteration. None if `joinable` is not in a `Join` context.

        Raises:
            DisagreementError: a rank has no inputs left, and `throw_on_early_termination` of the context is True.
        """
        context = joinable._join
        if context is None:
            return None
        if joinable is context._joinables[0]:
            context._sync_active_ranks(present=True)
        return context._present

    def __enter__(self) -> Join:
        if self._enabled:
            for joinable in self._joinables:
                if joinable._join is not None:
                    raise MisuseError(
                        f"this {type(joinable).__name__} is within a join context already: end that context first"
                    )
            # A script may enter the same object again, perhaps after a change of the group. So begin again with all ranks
            # present.
            self._begin()
            for joinable in self._joinables:
                joinable._join = self
            try:
                # Hooks are made last, when all joinables know their context.
                self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
            # If a hook cannot be made, take all joinables out of the context.
            except BaseException:
                for joinable in self._joinables:
                    joinable._join = None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if self._enabled:
            has_failed = True
            try:
                # After an error this rank must not wait for the others: the error is raised at once.
                if error is None:
                    self._go_on_without_inputs()
                    has_failed = False
            finally:
                self._leave(has_failed)
        return False

    def _go_on_without_inputs(self) -> None:
        last_rank = self._present[-1]
        while self._sync_active_ranks(present=False):
            for hook in self._hooks:
                hook.main_hook(self._present)
            last_rank = self._present[-1]
        for hook in self._hooks:
            hook.post_hook(last_rank)

    def _leave(self, has_failed: bool) -> None:
        for joinable in self._joinables:
            joinable._join = None
        for hook in self._hooks:
            # After an error in the loop, a backward may be unfinished. Then `leave` raises an error, which must not hide the
            # first error.
            with suppress(MisuseError) if has_failed else nullcontext():
                hook.leave()

    def _sync_active_ranks(self, *, present: bool) -> tuple[int, ...]:
        """Return the ranks that have inputs. A collective of all ranks, with or without inputs."""
        roll = torch.zeros(self._group.size, dtype=torch.uint8, device=self._device)
        roll[self._group.rank] = int(present)
        with self._group.marked("which ranks have inputs"):  # the mark tells a user who reads an error that `Join` calls this
            self._group.all_reduce(roll, ReduceOp.MAX)
        self._present = tuple(rank for rank, is_present in enumerate(roll.tolist()) if is_present)
        absent = [str(rank) for rank in range(self._group.size) if rank not in self._present]
        if self._throws and self._present and absent:
            # Scripts for torch look for the text before the first dot.
            what = (
                "Detected at least one rank that exhausted inputs"
                if present
                else f"Rank {self._group.rank} exhausted all inputs"
            )
            raise DisagreementError(
                f"{what}. Out of inputs is rank {', '.join(absent)} ({self._group.place()}), and "
                "throw_on_early_termination=True. Give every rank equally many inputs, or leave that argument out"
            )
        return self._present


def _is_same(group: ProcessGroup, other: ProcessGroup) -> bool:
    return group is other or (group.torch_group is not None and group.torch_group is other.torch_group)
