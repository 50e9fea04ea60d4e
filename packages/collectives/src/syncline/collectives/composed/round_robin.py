"""Several groups of the same ranks used in turn, so that their collectives overlap."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from typing_extensions import override

from ..contract.process_group import ProcessGroup
from ..contract.work import FutureWork, Work, join_futures
from ..errors import InvalidArgumentError, MisuseError
from ..host.serial_group import SerialGroup
from .delegating_group import DelegatingGroup, close_all


class RoundRobinGroup(DelegatingGroup):
    """Hands the n-th collective to group n modulo their number.

    Each group keeps its own total order; between the groups there is none, which is the point: k collectives run at once.
    Therefore a collective must not be issued from a future's callback here, for whose turn it is would depend on the schedule
    of threads: a `MisuseError`. Issue it on one of `groups`.

    Args:
        groups: at least one; of the same ranks, in the same order.

    Raises:
        InvalidArgumentError: no group, or groups of different ranks.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        if not groups or len({(group.ranks, group.rank) for group in groups}) != 1:
            raise InvalidArgumentError("expected at least one group, all with the same ranks in the same order")
        first = groups[0]
        super().__init__(first.rank, first.size, name=first.name, timeout_s=first.timeout_s, ranks=first.ranks)
        self.groups = list(groups)
        self._turns = itertools.cycle(self.groups)
        self._lock = threading.Lock()

    @property
    @override
    def backend_name(self) -> str:
        return f"round_robin({', '.join(group.backend_name for group in self.groups)})"

    @property
    @override
    def has_total_order(self) -> bool:
        return False

    @property
    @override
    def can_split(self) -> bool:
        return all(group.can_split for group in self.groups)

    @property
    def device_types(self) -> frozenset[str]:
        """What all of them serve."""
        return frozenset.intersection(*(group.device_types for group in self.groups))

    def describe(self) -> str:
        """How many, and of what kind."""
        return f"{len(self.groups)} groups in turn: {self.groups[0].describe()}"

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Plain memory: whose turn it will be is not known."""
        return super().allocate(numel, dtype, device)

    @override
    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        for group in self.groups:
            group.set_timeout(timeout_s)

    @override
    def verify_calls(self, *, async_op: bool = False) -> Work | None:
        """In each of the groups: each has an order of its own."""
        works = [work for group in self.groups if (work := group.verify_calls(async_op=True)) is not None]
        return self._together(works, "verify_calls", async_op) if works else None

    @contextmanager
    @override
    def marked(self, mark: str) -> Iterator[None]:
        with ExitStack() as marks:
            for group in self.groups:
                marks.enter_context(group.marked(mark))
            yield

    @override
    def _barrier(self, async_op: bool) -> Work:
        """In each of the groups: it is over when all are here, and compares the calls of all."""
        return self._together([group.barrier(async_op=True) for group in self.groups], "barrier", async_op)

    def _together(self, works: Sequence[Work], name: str, async_op: bool) -> Work:
        future = join_futures([work.get_future() for work in works], [])
        together = FutureWork(future, [], lambda: f"{name} on {self.place()}")
        if not async_op:
            together.wait()
        return together

    @override
    def close(self) -> None:
        close_all(self.groups)

    @override
    def abort(self) -> None:
        for group in self.groups:
            group.abort()

    def _choose(self, tensor: torch.Tensor | None) -> ProcessGroup:  # noqa: ARG002 - turns do not depend on it
        if any(isinstance(group, SerialGroup) and group.is_in_callback() for group in self.groups):
            raise MisuseError(
                f"a collective on {self.place()}, of {len(self.groups)} groups in turn, was called in a future's callback; "
                "whose turn it is would differ between ranks. Wait for the work first, or issue it on one of `groups`"
            )
        with self._lock:
            return next(self._turns)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        parts = [group.split(color, key, timeout_s=timeout_s) for group in self.groups]
        made = [part for part in parts if part is not None]
        return RoundRobinGroup(made) if made else None
