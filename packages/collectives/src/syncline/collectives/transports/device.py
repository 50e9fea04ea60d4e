"""`DeviceTransport` extends a transport for host memory, so that it also moves tensors in GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from typing_extensions import override

from ..engine.call import Call, Signature
from ..engine.cancel_scope import CancelScope
from ..engine.device import DeviceRuntime
from ..engine.transport import Plan, Request, Transport
from ..health.stalls import StatusPost
from ..tensors.layout import PART_IS_READ, untracked

Keep = Callable[..., AbstractContextManager[None]]


class DeviceTransport(Transport):
    """Moves tensors in host memory, and tensors of a device.

    Args:
        host: the transport for tensors in host memory, and for calls without a tensor.
        direct: the transport for tensors of the device. If None, this object copies these tensors to host memory, and `host`
            moves the copies.
    """

    def __init__(self, host: Transport, rank: int, device: DeviceRuntime, direct: Transport | None = None) -> None:
        self.backend_name = host.backend_name
        self._host = host
        self.closes_together = host.closes_together
        self._rank = rank
        self._device = device
        self._direct = direct
        self._given_up: list[torch.Tensor] = []

    @property
    @override
    def compares_every_call(self) -> bool:
        """Whether the ranks compare each call on host memory before the call runs.

        With `direct`, the ranks always compare calls on the device first: see Note [Presync] in `mpi.transport`.
        """
        return self._host.compares_every_call

    def describe(self) -> str:
        """Return the host transport's description, and in words whether device tensors are copied through the host."""
        way = "staged through the host" if self._direct is None else "directly"
        return f"{self._host.describe()}, {self._device.device_type} {way}"

    @override
    def plan(self, signature: Signature) -> Plan:
        # The host transport takes host tensors, and calls without a tensor.
        if signature.device_type != self._device.device_type:
            return self._host.plan(signature)
        if self._direct is not None:
            return self._direct.plan(signature)
        return StagedPlan(
            self._host.plan(signature._replace(device_type="cpu")), signature, self._rank, self._device, self._kept
        )

    @override
    def barrier(self, call: Call) -> None:
        """Call the host transport's barrier, which does not wait for operations on the device."""
        self._host.barrier(call)

    @override
    def allocate(self, numel: int, dtype: torch.dtype, call: Call) -> torch.Tensor:
        return self._host.allocate(numel, dtype, call)

    @override
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        if not self._device.owns(tensor):
            return self._host.start_send(tensor, dst, tag)
        if self._direct is not None:
            return self._direct.start_send(tensor, dst, tag)
        return self._host.start_send(self._device.to_host(tensor), dst, tag)

    @override
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        if not self._device.owns(tensor):
            return self._host.start_recv(tensor, src, tag)
        if self._direct is not None:
            return self._direct.start_recv(tensor, src, tag)
        there = self._device.empty_on_host(tensor)
        return StagedArrival(self._host.start_recv(there, src, tag), there, tensor, self._device)

    @override
    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        return DeviceTransport(
            self._host.subset(members, name, number, scope),
            list(members).index(self._rank),
            self._device,
            None if self._direct is None else self._direct.subset(members, name, number, scope),
        )

    @override
    def status_post(self) -> StatusPost | None:
        return self._host.status_post()

    @override
    def give_up(self) -> None:
        for transport in self._both():
            transport.give_up()

    @override
    def lost_ranks(self) -> Sequence[int]:
        return self._host.lost_ranks()

    @override
    def interrupt(self) -> None:
        for transport in self._both():
            transport.interrupt()

    @override
    def close(self) -> None:
        for transport in reversed(self._both()):
            transport.close()

    @override
    def abort(self) -> None:
        for transport in reversed(self._both()):
            transport.abort()

    def _both(self) -> list[Transport]:
        return [self._host] if self._direct is None else [self._host, self._direct]

    @contextmanager
    def _kept(self, *buffers: torch.Tensor | None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # A library may still write to these buffers, so keep them for ever.
            self._given_up += [buffer for buffer in buffers if buffer is not None]
            raise


class StagedPlan(Plan):
    """Copies the inputs of a call to host memory, runs a plan of the host transport, and copies the results to the device.

    Cost: one copy to the host for each tensor that the call reads, and one copy to the device for each tensor that the call
    writes.

    `kept` makes a context for the plan's run. If the run fails, this context keeps the host buffers alive for ever, because a
    library may still write to them.
    """

    def __init__(self, plan: Plan, signature: Signature, rank: int, device: DeviceRuntime, kept: Keep) -> None:
        self._plan = plan
        self._device = device
        self._kept = kept
        name, is_root = signature.name, signature.root == rank
        # A broadcast's root only reads its tensor, and in a reduce only the root gets a result.
        self._part_goes_in = name in PART_IS_READ or name in ("all_reduce", "reduce") or (name == "broadcast" and is_root)
        self._part_comes_out = name not in PART_IS_READ and name != ("broadcast" if is_root else "reduce")
        self._whole_goes_in = name not in PART_IS_READ

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that the host transport's plan used."""
        return self._plan.algorithm

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`."""
        device = self._device
        part_there = device.to_host(part) if self._part_goes_in else device.empty_on_host(part)
        if whole is part or whole is None:  # if both are one tensor, use one tensor on the host, too
            whole_there = None if whole is None else part_there
        else:
            whole_there = device.to_host(whole) if self._whole_goes_in else device.empty_on_host(whole)
        with self._kept(part_there, whole_there):
            self._plan.run(part_there, whole_there, call)
        if self._part_comes_out:
            device.to_device(part_there, part)
        if whole is not None and whole_there is not None and not self._whole_goes_in:
            device.to_device(whole_there, whole)


class StagedArrival(Request):
    """A receive of a device tensor. The message arrives in host memory first."""

    def __init__(self, request: Request, there: torch.Tensor, tensor: torch.Tensor, device: DeviceRuntime) -> None:
        self._request = request
        self._there = there
        self._tensor = tensor
        self._device = device
        self._order = device.order([tensor])
        self._is_over = False

    def wait(self, scope: CancelScope) -> None:
        """Wait for the message, then copy it to the device."""
        if not self._is_over:
            self._request.wait(scope)
            self._deliver()

    def test(self) -> bool:
        """Return whether the message has arrived. If it has, also copy the message to the device."""
        if not self._is_over and self._request.test():
            self._deliver()
        return self._is_over

    def source(self) -> int | None:
        """Return the sender's rank. The receive must be over."""
        return self._request.source()

    def _deliver(self) -> None:
        with untracked(), self._order.entered():
            self._device.to_device(self._there, self._tensor)
            # Wait for the copy, because any thread and any stream may use the tensor next.
            self._device.finish(self._tensor)
        self._is_over = True
