"""StagedTransport: tensors of a device are copied to the host, communicated there, and copied back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from typing_extensions import override

from ..contract.deadline import Deadline
from ..contract.reduce_op import Reduction
from ..contract.running_call import RunningCall
from ..failures.stall_watch import StatusPost
from ..host.device_runtime import DeviceRuntime
from ..host.transport import Request, Transport


class StagedTransport(Transport):
    """Serves only tensors of the device. Cost: each input crosses to the host once, each output back once.

    Args:
        host: does the work; it is its maker's to close.
        rank: this rank in it.
        device: copies.
    """

    def __init__(self, host: Transport, rank: int, device: DeviceRuntime) -> None:
        self.backend_name = host.backend_name
        self._host = host
        self._rank = rank
        self._device = device
        self._abandoned: list[torch.Tensor] = []

    @property
    def verifies_every_call(self) -> bool:
        """As the host transport does."""
        return self._host.verifies_every_call

    @override
    def status_post(self) -> StatusPost | None:
        return self._host.status_post()

    def describe(self) -> str:
        """What the host transport says, and how tensors come to it."""
        return f"{self._host.describe()}, {self._device.device_type} staged through the host"

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        """In on every rank, out on every rank."""
        with self._kept(self._device.to_host(tensor)) as (there,):
            self._host.all_reduce(there, op, call)
        self._device.to_device(there, tensor)

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: RunningCall) -> None:
        """In on every rank, out on the root."""
        with self._kept(self._device.to_host(tensor)) as (there,):
            self._host.reduce(there, root, op, call)
        if self._rank == root:
            self._device.to_device(there, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, call: RunningCall) -> None:
        """In on the root, out on the others."""
        copy = self._device.to_host if self._rank == root else self._device.empty_on_host
        with self._kept(copy(tensor)) as (there,):
            self._host.broadcast(there, root, call)
        if self._rank != root:
            self._device.to_device(there, tensor)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: RunningCall) -> None:
        """The tensor in, the block out."""
        with self._kept(self._device.empty_on_host(block), self._device.to_host(tensor)) as (all_there, there):
            self._host.all_gather(all_there, there, call)
        self._device.to_device(all_there, block)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        """The tensor in, the block out on the root."""
        if block is None:
            with self._kept(self._device.to_host(tensor)) as (there,):
                self._host.gather(there, None, root, call)
            return
        with self._kept(self._device.to_host(tensor), self._device.empty_on_host(block)) as (there, all_there):
            self._host.gather(there, all_there, root, call)
        self._device.to_device(all_there, block)

    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: RunningCall) -> None:
        """The block in on the root, the tensor out."""
        blocks = [] if block is None else [self._device.to_host(block)]
        with self._kept(self._device.empty_on_host(tensor), *blocks) as (there, *all_there):
            self._host.scatter(there, all_there[0] if all_there else None, root, call)
        self._device.to_device(there, tensor)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        """The block in, the tensor out."""
        with self._kept(self._device.empty_on_host(tensor), self._device.to_host(block)) as (there, all_there):
            self._host.reduce_scatter(there, all_there, op, call)
        self._device.to_device(there, tensor)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: RunningCall,
    ) -> None:
        """The input in, the output out."""
        with self._kept(self._device.empty_on_host(output), self._device.to_host(tensor)) as (received, sent):
            self._host.all_to_all(received, sent, output_counts, input_counts, call)
        self._device.to_device(received, output)

    def barrier(self, call: RunningCall) -> None:
        """The host's: it does not wait for the device."""
        self._host.barrier(call)

    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        """In at once."""
        return self._host.start_send(self._device.to_host(tensor), dst, tag)

    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        """Out when it has arrived and somebody waits or asks."""
        there = self._device.empty_on_host(tensor)
        return StagedArrival(self._host.start_recv(there, src, tag), there, tensor, self._device)

    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """The same on a subset."""
        host = self._host.subset(members, name, number, deadline)
        return StagedTransport(host, list(members).index(self._rank), self._device)

    def close(self) -> None:
        """Nothing: the host transport is its maker's."""

    def abort(self) -> None:
        """Nothing: the host transport is its maker's."""

    @contextmanager
    def _kept(self, *buffers: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """What the library may still write to after a time-out is never given back."""
        try:
            yield buffers
        except BaseException:
            self._abandoned += buffers
            raise


class StagedArrival(Request):
    """A receive into host memory, and the copy to the device after it."""

    def __init__(self, request: Request, there: torch.Tensor, tensor: torch.Tensor, device: DeviceRuntime) -> None:
        self._request = request
        self._there = there
        self._tensor = tensor
        self._device = device
        self._order = device.order([tensor])
        self._over = False

    def wait(self, deadline: Deadline) -> None:
        """Wait, then copy."""
        if not self._over:
            self._request.wait(deadline)
            self._deliver(deadline)

    def test(self) -> bool:
        """Ask, and copy if it has arrived."""
        if not self._over and self._request.test():
            self._deliver(Deadline(1.0))
        return self._over

    def source(self) -> int | None:
        """The sender, once it is over."""
        return self._request.source()

    def _deliver(self, deadline: Deadline) -> None:
        """The copy is over on return, for nobody knows on which thread the tensor will be used."""

        def copy(_: Deadline) -> None:
            self._device.to_device(self._there, self._tensor)
            self._device.finish(self._tensor)

        self._order.around(copy)(deadline)
        self._over = True
