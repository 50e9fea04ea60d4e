"""Groups made of other groups: one member group for each type of device ("cpu:mpi,cuda:nccl"), or groups that take turns."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from ..errors import InvalidArgumentError, MisuseError
from ..group import ProcessGroup
from ..reduce_op import Reduction
from ..work import FutureWork, Work, join_futures
from .call import Signature
from .engine_group import abort_if_interrupted
from .observers import shown

if TYPE_CHECKING:
    import torch.distributed as dist


class DelegatingGroup(ProcessGroup):
    """Passes every call on to one of its member groups. All member groups have the same ranks in the same order."""

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        first = groups[0]
        super().__init__(first.rank, first.size, name=first.name, timeout_s=first.timeout_s, ranks=first.ranks)
        self._all = tuple(groups)

    @abstractmethod
    def _choose(self, device_type: str) -> ProcessGroup:
        """Return the group that carries out a call on tensors of this type of device."""

    def _choose_for_transfers(self, device_type: str) -> ProcessGroup:
        """Return the group that carries out a `send` or `recv` of a tensor on this type of device."""
        return self._choose(device_type)

    @property
    def profiled_as(self) -> None:
        """None, because the member groups show the calls in the profile."""

    @override
    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        for group in self._all:
            group.set_timeout(timeout_s)

    @override
    def close(self) -> None:
        """Close all member groups, the last group first. If a member group raises an error, still close the others."""
        # An `ExitStack` goes on closing after an error, and raises the error at the end.
        with ExitStack() as closing:
            for group in self._all:
                closing.push(abort_if_interrupted(self))
                closing.callback(group.close)

    @override
    def abort(self) -> None:
        for group in self._all:
            group.abort()

    @override
    def end_together(self, companion: ProcessGroup) -> None:
        # The last member group is the first that `close` closes. So `companion` is closed before the members that it uses.
        self._all[-1].end_together(companion)

    @override
    def exchange_texts(self, text: str) -> list[str] | None:
        return self._all[0].exchange_texts(text)

    @override
    def expect_losses(self, are_expected: bool) -> None:
        for group in self._all:
            group.expect_losses(are_expected)

    @contextmanager
    @override
    def marked(self, mark: str) -> Iterator[None]:
        with ExitStack() as marks:
            for group in self._all:
                marks.enter_context(group.marked(mark))
            yield

    @property
    @override
    def can_split(self) -> bool:
        return all(group.can_split for group in self._all)

    @override
    def is_in_callback(self) -> bool:
        return any(group.is_in_callback() for group in self._all)

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        group = self._choose(signature.device_type)
        issue = partial(group._issue, signature, reads, writes, async_op)
        return shown(group, signature.name, [*writes, *reads], issue, is_async=async_op)

    @override
    def agree_on_calls(self, *, async_op: bool = False) -> Work | None:
        """Compare the calls of each member group separately. See `ProcessGroup.agree_on_calls`."""
        works = [work for group in self._all if (work := group.agree_on_calls(async_op=async_op)) is not None]
        # If no group returns a work, there is nothing to wait for. Groups over NCCL may compare on another thread.
        return self._together(works, "agree_on_calls", async_op) if works else None

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        # One group carries out the whole reduction, including the calls that the reduction issues from callbacks.
        return self._choose(tensor.device.type).all_reduce(tensor, op, async_op=async_op)

    @override
    def check_transfer(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        super().check_transfer(name, tensor, peer, tag)
        # `_send` and `_recv` of a member group check nothing. But the library of the group may have further rules, as NCCL has.
        self._choose_for_transfers(tensor.device.type).check_transfer(name, tensor, peer, tag)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        group = self._choose_for_transfers(tensor.device.type)
        return shown(group, "send", [tensor], partial(group._send, tensor, dst, tag, async_op), is_async=async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        group = self._choose_for_transfers(tensor.device.type)
        return shown(group, "recv", [tensor], partial(group._recv, tensor, src, tag, async_op), is_async=async_op)

    def _together(self, works: Iterable[Work], name: str, async_op: bool) -> Work:
        future = join_futures([work.get_future() for work in works], [])
        together = FutureWork(future, [], lambda: f"{name} on {self.place()}")
        if not async_op:
            together.wait()
        return together


class PerDeviceGroup(DelegatingGroup):
    """A group that has one member group for each type of device ("cpu", "cuda"). All member groups have the same ranks.

    Calls of different member groups may run in any order. A barrier runs on the first member group in the backend's name, for
    example on "mpi" if the name is "cpu:mpi,cuda:nccl".
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        # The group for host memory comes first, so it is closed last: groups for GPUs send messages through it until then.
        super().__init__([groups[device_type] for device_type in sorted(groups, key=lambda device_type: device_type != "cpu")])
        for device_type, group in groups.items():
            if device_type not in group.device_types:
                served = ", ".join(sorted(group.device_types))
                raise InvalidArgumentError(f"backend '{group.backend_name}' moves tensors on {served}, not on {device_type}")
        self.groups = dict(groups)

    @property
    def backend_name(self) -> str:
        """The backend as the program spells it, such as "cpu:mpi,cuda:nccl"."""
        return ",".join(f"{device_type}:{group.backend_name}" for device_type, group in self.groups.items())

    @property
    def device_types(self) -> frozenset[str]:
        """The types of devices that have a member group."""
        return frozenset(self.groups)

    @property
    @override
    def has_total_order(self) -> bool:
        return all(group.has_total_order for group in self._all)

    @override
    def meeting_store(self) -> dist.Store | None:
        return self.groups["cpu"].meeting_store() if "cpu" in self.groups else None

    def describe(self) -> str:
        r"""Return the library and its version for each type of device."""
        return "; ".join(f"{device_type} by {group.describe()}" for device_type, group in self.groups.items())

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Allocate memory with the member group that serves the device, or with torch if no member group serves it."""
        group = self.groups.get(torch.device(device).type)
        return super().allocate(numel, dtype, device) if group is None else group.allocate(numel, dtype, device)

    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:
        """See `ProcessGroup.algorithm_of`. The member group for the tensor's device answers; None if there is no such group."""
        group = self.groups.get(tensor.device.type)
        return None if group is None else group.algorithm_of(name, tensor)

    def _choose(self, device_type: str) -> ProcessGroup:
        return self.groups[device_type]

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        if signature.name == "barrier":  # it has no tensor whose device could choose the group
            return next(iter(self.groups.values())).barrier(async_op=async_op)
        return super()._issue(signature, reads, writes, async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        parts = {name: group.split(color, key, timeout_s=timeout_s) for name, group in self.groups.items()}
        # A rank that passed no color is in none of the new groups.
        made = {name: part for name, part in parts.items() if part is not None}
        return PerDeviceGroup(made) if made else None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        parts = (
            (device, group.subset(members, f"{name}/{device}", timeout_s=timeout_s)) for device, group in self.groups.items()
        )
        return PerDeviceGroup(dict(parts))

    # ---- after a loss: the group for host memory finds out which ranks are left; the other groups meet through it ----

    @override
    def missing_for_shrink(self) -> str | None:
        strangers = [group for group in self._others() if not group.meets_in(self._host)]
        # A group that does not meet in the host's group could not be built again after the loss.
        if strangers:
            return f"the ranks of backend '{strangers[0].backend_name}' do not meet in the group of '{self._host.backend_name}'"
        return self._host.missing_for_shrink()

    @property
    @override
    def members(self) -> tuple[int, ...]:
        return self._host.members

    @override
    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        # Collectives on devices may hang after a loss. End them before the host's group looks for the lost ranks.
        for group in self._others():
            group.abort()
        host = self._host.shrink(silence_timeout_s=silence_timeout_s)
        return PerDeviceGroup(
            {device: host if group is self._host else group.beside(host) for device, group in self.groups.items()}
        )

    @property
    def _host(self) -> ProcessGroup:
        return self._all[0]

    def _others(self) -> list[ProcessGroup]:
        return [group for group in self._all if group is not self._host]


class RoundRobinGroup(DelegatingGroup):
    """Passes its collectives on to its member groups in turn, so that several collectives can run at the same time.

    The first member group carries out all sends and receives. Calls of different member groups may run in any order. To
    communicate in a callback of a work's future, call a method of one of the `groups`. A collective of this group raises a
    `MisuseError` in a callback, because each rank could choose another member group.
    (Member groups that are groups of torch do not detect this mistake.)

    Args:
        groups: one or more member groups with the same ranks in the same order.

    Raises:
        InvalidArgumentError: there is no member group, or the member groups have different ranks.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        if not groups or len({(group.ranks, group.rank) for group in groups}) != 1:
            raise InvalidArgumentError("expected at least one group, all with the same ranks in the same order")
        super().__init__(groups)
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
    def device_types(self) -> frozenset[str]:
        """The types of devices that all member groups serve."""
        return frozenset.intersection(*(group.device_types for group in self.groups))

    def describe(self) -> str:
        r"""Return the number of member groups, and a description of the first member group."""
        return f"{len(self.groups)} groups in turn: {self.groups[0].describe()}"

    def _choose(self, device_type: str) -> ProcessGroup:  # noqa: ARG002 - turns do not depend on it
        if self.is_in_callback():
            raise MisuseError(
                f"a collective on {self.place()}, a RoundRobinGroup, was called in a future's callback, where each rank could "
                "choose another member group. Wait for the work first, or call a method of one of `groups`"
            )
        with self._lock:
            return next(self._turns)

    @override
    def _choose_for_transfers(self, device_type: str) -> ProcessGroup:
        # Only two ranks take part in a transfer. If a transfer took a turn, these two ranks and the other ranks would choose
        # different groups for later collectives. One group for all transfers also keeps their order and their tags, and lets a
        # rank receive from any rank.
        return self.groups[0]

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        # A barrier is over when all ranks have entered it in every group. In the barrier, each group compares its calls.
        if signature.name == "barrier":
            return self._together([group.barrier(async_op=True) for group in self.groups], "barrier", async_op)
        return super()._issue(signature, reads, writes, async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        parts = [group.split(color, key, timeout_s=timeout_s) for group in self.groups]
        made = [part for part in parts if part is not None]
        return RoundRobinGroup(made) if made else None
