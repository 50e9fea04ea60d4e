"""Dispatch by the tensor's device: "cpu:mpi,cuda:nccl"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from ..contract.process_group import ProcessGroup
from ..contract.work import Work
from ..errors import InvalidArgumentError
from .delegating_group import DelegatingGroup, close_all

if TYPE_CHECKING:
    import torch.distributed as dist


class PerDeviceGroup(DelegatingGroup):
    """One group for each type of device; a barrier is that of the first.

    Each of the groups has its own total order; collectives on tensors of different devices are not ordered with one another.

    Args:
        groups: from device type ("cpu", "cuda") to a group with the same ranks.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        first = next(iter(groups.values()))
        super().__init__(first.rank, first.size, name=first.name, timeout_s=first.timeout_s, ranks=first.ranks)
        for device_type, group in groups.items():
            if device_type not in group.device_types:
                served = ", ".join(sorted(group.device_types))
                raise InvalidArgumentError(f"backend '{group.backend_name}' moves tensors on {served}, not on {device_type}")
        self.groups = dict(groups)

    @property
    def backend_name(self) -> str:
        """The spelling by which it was asked for."""
        return ",".join(f"{device_type}:{group.backend_name}" for device_type, group in self.groups.items())

    @property
    @override
    def has_total_order(self) -> bool:
        return all(group.has_total_order for group in self.groups.values())

    @property
    @override
    def can_split(self) -> bool:
        return all(group.can_split for group in self.groups.values())

    @property
    def device_types(self) -> frozenset[str]:
        """Those that have a group."""
        return frozenset(self.groups)

    def describe(self) -> str:
        """What each group says."""
        return "; ".join(f"{device_type} by {group.describe()}" for device_type, group in self.groups.items())

    @override
    def meeting_store(self) -> dist.Store | None:
        return self.groups["cpu"].meeting_store() if "cpu" in self.groups else None

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory of the group for that device."""
        return self.groups[torch.device(device).type].allocate(numel, dtype, device)

    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:
        """What the group for the tensor's device says."""
        return self._choose(tensor).algorithm_of(name, tensor)

    @override
    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        for group in self.groups.values():
            group.set_timeout(timeout_s)

    @override
    def verify_calls(self, *, async_op: bool = False) -> Work | None:
        works = [work for group in self.groups.values() if (work := group.verify_calls(async_op=async_op)) is not None]
        return works[0] if works else None  # only groups of the host compare later, and there is one

    @contextmanager
    @override
    def marked(self, mark: str) -> Iterator[None]:
        with ExitStack() as marks:
            for group in self.groups.values():
                marks.enter_context(group.marked(mark))
            yield

    # ---- after a loss: the group of the host finds out who is left, and the others meet in it ----

    @override
    def missing_for_shrink(self) -> str | None:
        strangers = [group for group in self._others() if not group.meets_in(self._host)]
        if strangers:
            return f"the ranks of backend '{strangers[0].backend_name}' do not meet in the group of '{self._host.backend_name}'"
        return self._host.missing_for_shrink()

    @property
    @override
    def members(self) -> tuple[int, ...]:
        return self._host.members

    @override
    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        for group in self._others():
            group.abort()
        host = self._host.shrink(silence_timeout_s=silence_timeout_s)
        return PerDeviceGroup(
            {device: host if group is self._host else group.beside(host) for device, group in self.groups.items()}
        )

    @property
    def _host(self) -> ProcessGroup:
        return self.groups["cpu"] if "cpu" in self.groups else next(iter(self.groups.values()))

    def _others(self) -> list[ProcessGroup]:
        return [group for group in self.groups.values() if group is not self._host]

    @override
    def close(self) -> None:
        close_all(self.groups.values())

    @override
    def abort(self) -> None:
        for group in self.groups.values():
            group.abort()

    def _choose(self, tensor: torch.Tensor | None) -> ProcessGroup:
        return next(iter(self.groups.values())) if tensor is None else self.groups[tensor.device.type]

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        parts = {name: group.split(color, key, timeout_s=timeout_s) for name, group in self.groups.items()}
        made = {name: part for name, part in parts.items() if part is not None}
        return PerDeviceGroup(made) if made else None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:
        parts = (
            (device, group.subset(members, f"{name}/{device}", timeout_s=timeout_s)) for device, group in self.groups.items()
        )
        return PerDeviceGroup(dict(parts))
