"""UnevenCalls lets a rank finish a loop of collectives earlier than other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch

from ..errors import DisagreementError, MisuseError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, from_torch
from ..work import Work
from .object_exchange import broadcast_object, message_device
from .returned import PendingResult, all_reduce_copy_coalesced


class _Entry(IntEnum):
    """The message of one rank in a roll call; see `UnevenCalls`."""

    JOINED = 0
    CALL = 1
    STEP = 2


class UnevenCalls:
    """Lets ranks call collectives in loops of different lengths. A rank whose loop has ended calls `join`.

    After `join`, a rank has *joined*. Until all ranks have joined, a joined rank takes part with zeros in the collectives of
    the ranks that still have work. So these ranks do not hang.

        calls = UnevenCalls(group)           rank with work left            rank without work
        for batch in batches:
            ...                              roll call: a call         ◄──► roll call: joined
            calls.announce_all_reduce(...)   broadcast: which           ──► broadcast: which
            all_reduce(...)                  all_reduce                ◄──► all_reduce of zeros
        last = calls.join()                  roll call: joined         ◄──► roll call: joined

    Right before each collective, a rank with work calls an `announce` method. The method starts a *roll call*: an all-gather of
    16 bytes from each rank, in which each rank says what it does next. If no rank has joined, an announcement costs only this
    roll call.

    Args:
        group: the group of the collectives. All its ranks make their `UnevenCalls` at the same point of their programs.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._last_rank = group.size - 1
        self._steps: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add_step(self, shadow: Callable[[], None]) -> int:
        """Define a *step*: several collectives that `announce_step` announces together, such as those of an optimizer step.

        All ranks define the same steps in the same order.

        Args:
            shadow: a method that calls the collectives of the step with zeros. When other ranks announce the step, a rank
                that has called `join` calls this method. `UnevenCalls` keeps only a weak reference to the method's object, so
                keep the object.

        Returns:
            The step's number, which `announce_step` takes.
        """
        self._steps.append(weakref.WeakMethod(shadow))
        return len(self._steps) - 1

    def announce_all_reduce(self, tensors: Sequence[torch.Tensor], op: Reduction) -> None:
        """Announce that this rank's next collective is an `all_reduce_copy_coalesced` of these tensors.

        All ranks that have not called `join` call this method. The other ranks take part in the all-reduce with zeros.

        Raises:
            MisuseError: another rank has called `join`, and `op` is neither SUM nor AVG.
            DisagreementError: another rank called `announce_step` instead.
        """
        op = from_torch(op) or op
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            self.announce_complete(f"all_reduce with {op.name}")
            return
        if self._call_roll():
            self._tell(([(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in tensors], op))

    def announce_complete(self, what: str) -> None:
        """Announce a collective that needs all ranks, because zeros from some ranks would make the result wrong.

        All ranks that have not called `join` call this method. If no rank has called `join`, the method returns, and the ranks
        may call the collective. `what` names the collective in the error message.

        Raises:
            MisuseError: a rank has called `join`. All ranks that call this method raise this error.
            DisagreementError: another rank called `announce_step` instead.
        """
        if self._call_roll():
            self._tell(None)
            raise MisuseError(
                f"{what} on {self._group.place()}: a rank has joined, and it can take part in sums and averages only; call it "
                "before the first rank joins, or after all have"
            )

    def announce_step(self, number: int) -> PendingResult[None]:
        """Announce that this rank begins a step of several collectives. `number` is the step's number, from `add_step`.

        The ranks compare what each of them does next. This method begins the comparison and does not wait for its end, so call
        the collectives of the step at once.

        Returns:
            The handle of the comparison. Call its `wait` at the end of the step. If another rank announced something else,
                `wait` raises a `DisagreementError`.
        """
        work, heard = self._issue(_Entry.STEP, number)
        return PendingResult([work], lambda: self._note(*self._hear(work, heard)))

    def join(self) -> int:
        """Take part with zeros in the collectives of other ranks, until all ranks have called this method.

        A rank calls this method when its own loop has ended.

        Returns:
            The rank that called this method last. If several ranks called it last at the same time, the highest of these
                ranks. All ranks return the same number.
        """
        while True:
            present, entries = self._hear(*self._issue(_Entry.JOINED, 0))
            # All have joined. The next loop begins with all ranks again.
            if not present:
                last, self._last_rank = self._last_rank, self._group.size - 1
                return last
            self._note(present, entries)
            entry, number = entries[present[0]]
            if entry == _Entry.STEP:
                self._shadow_step(number)
            else:
                described = broadcast_object(None, present[0], group=self._group)
                # None means that the collective needs all ranks. Then the ranks with work raise, and make no call.
                if described is not None:
                    self._shadow_all_reduce(*described)

    # ---- the roll call ----

    def _issue(self, entry: _Entry, number: int) -> tuple[Work, torch.Tensor]:
        device = message_device(self._group)
        mine = torch.tensor([int(entry), number], dtype=torch.int64, device=device)
        all_entries = mine.new_empty(self._group.size, 2)
        # A step must not wait for its roll call: the caller waits for the roll call at the end of the step.
        is_blocking = entry != _Entry.STEP
        return self._group.all_gather_into_tensor(all_entries, mine, async_op=not is_blocking), all_entries

    def _hear(self, work: Work, heard: torch.Tensor) -> tuple[list[int], list[tuple[int, int]]]:
        work.wait()
        entries = [(entry, number) for entry, number in heard.tolist()]
        return [rank for rank, (entry, _) in enumerate(entries) if entry != _Entry.JOINED], entries

    def _call_roll(self) -> bool:
        present, entries = self._hear(*self._issue(_Entry.CALL, 0))
        self._note(present, entries)
        self._first = present[0]
        return len(present) < self._group.size

    def _tell(self, described: Any) -> None:
        broadcast_object(described, self._first, group=self._group)

    def _note(self, present: Sequence[int], entries: Sequence[tuple[int, int]]) -> None:
        self._last_rank = present[-1]
        announced = {entries[rank] for rank in present}
        if len(announced) > 1:
            said = ", ".join(
                f"step {number}" if entry == _Entry.STEP else "a single collective" for entry, number in sorted(announced)
            )
            raise DisagreementError(
                f"{self._group.place()}: expected the same calls in the same order on every rank, found {said}"
            )

    # ---- on a rank that has joined ----

    def _shadow_step(self, number: int) -> None:
        shadow = self._steps[number]() if number < len(self._steps) else None
        if shadow is None:
            raise MisuseError(
                f"{self._group.place()}: the other ranks take step {number}, which this rank does not have (any more); create "
                "the same optimizers on every rank, in the same order, and keep them until all have joined"
            )
        shadow()

    def _shadow_all_reduce(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype, str]], op: Reduction) -> None:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
        all_reduce_copy_coalesced(zeros, op, self._group)
