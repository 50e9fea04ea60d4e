"""DeviceDispatchTransport: a host transport for the host's tensors, and another way for those of a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from ..contract.deadline import Deadline
from ..contract.reduce_op import Reduction
from ..contract.running_call import RunningCall
from ..failures.stall_watch import StatusPost
from ..host.device_runtime import DeviceRuntime
from ..host.transport import CallKind, Plan, Request, Transport
from .staged_transport import StagedTransport


class DeviceDispatchTransport(Transport):
    """Hands every call to one of two transports of the same ranks, by where its tensor is.

    Args:
        host: for tensors in host memory, and for calls without a tensor.
        rank: this rank in it.
        device: tells which tensors are its own.
        direct: for tensors of the device; without it they are staged through the host.
    """

    def __init__(self, host: Transport, rank: int, device: DeviceRuntime, direct: Transport | None = None) -> None:
        self.backend_name = host.backend_name
        self._host = host
        self._rank = rank
        self._device = device
        self._direct = direct
        self._on_device = direct or StagedTransport(host, rank, device)

    @property
    @override
    def verifies_every_call(self) -> bool:
        """As the host transport does; a direct one compares each call, for MPI takes CUDA memory in blocking calls only."""
        return self._host.verifies_every_call

    @override
    def status_post(self) -> StatusPost | None:
        return self._host.status_post()

    def describe(self) -> str:
        """What the host transport says, and how tensors of the device travel."""
        if self._direct is None:
            return self._on_device.describe()
        return f"{self._host.describe()}, {self._device.device_type} directly"

    @override
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        self._for(tensor).all_reduce(tensor, op, call)

    @override
    def plan(self, kind: CallKind) -> Plan | None:
        return self._host.plan(kind)

    @override
    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: RunningCall) -> None:
        self._for(tensor).reduce(tensor, root, op, call)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int, call: RunningCall) -> None:
        self._for(tensor).broadcast(tensor, root, call)

    @override
    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: RunningCall) -> None:
        self._for(tensor).all_gather(block, tensor, call)

    @override
    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        self._for(tensor).gather(tensor, block, root, call)

    @override
    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        self._for(tensor).scatter(tensor, block, root, call)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        self._for(tensor).reduce_scatter(tensor, block, op, call)

    @override
    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: RunningCall,
    ) -> None:
        self._for(tensor).all_to_all(output, tensor, output_counts, input_counts, call)

    @override
    def barrier(self, call: RunningCall) -> None:
        self._host.barrier(call)

    @override
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        return self._for(tensor).start_send(tensor, dst, tag)

    @override
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        return self._for(tensor).start_recv(tensor, src, tag)

    @override
    def allocate(self, numel: int, dtype: torch.dtype, call: RunningCall) -> torch.Tensor:
        return self._host.allocate(numel, dtype, call)

    @override
    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        return DeviceDispatchTransport(
            self._host.subset(members, name, number, deadline),
            list(members).index(self._rank),
            self._device,
            None if self._direct is None else self._direct.subset(members, name, number, deadline),
        )

    @override
    def give_up(self) -> None:
        self._host.give_up()
        if self._direct is not None:
            self._direct.give_up()

    @override
    def lost_ranks(self) -> Sequence[int]:
        return self._host.lost_ranks()

    @override
    def interrupt(self) -> None:
        self._host.interrupt()
        if self._direct is not None:
            self._direct.interrupt()

    @override
    def close(self) -> None:
        self._on_device.close()
        self._host.close()

    @override
    def abort(self) -> None:
        self._on_device.abort()
        self._host.abort()

    def _for(self, tensor: torch.Tensor) -> Transport:
        return self._on_device if self._device.owns(tensor) else self._host
