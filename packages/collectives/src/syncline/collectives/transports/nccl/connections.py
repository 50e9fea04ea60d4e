"""The communicators of a group: made when they are first needed, given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from ...engine.cancel_scope import CancelScope, DetachedCall
from ...errors import InvalidArgumentError, MisuseError, TransportError
from .communicator import Communicator
from .connector import Connector, StreamCommunicator
from .failure import FatalError
from .pair import Direction, Pair
from .watchdog import Watchdog

# How long `close` waits for CUDA graphs that nobody may ever delete.
_GRAPHS_S = 30.0


class Connections:
    """One communicator of all ranks, and two with each rank that there were transfers with, on one GPU.

    What fails here leaves the ranks apart, one inside NCCL and the other not, so it ends the group.

    Args:
        connector: how ranks are connected.
        place: says where an error happened.
        timeout_s: says how long connecting may take.
        watchdog: looks after each communicator, and is told when a pair cannot connect.
        stream_comm: the communicator of all ranks, if there is one already.
    """

    def __init__(
        self,
        connector: Connector,
        place: Callable[[], str],
        timeout_s: Callable[[], float],
        watchdog: Watchdog,
        stream_comm: StreamCommunicator | None,
    ) -> None:
        self._connector = connector
        self._place = place
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._communicators: list[Communicator] = []
        self._pairs: dict[int, Pair] = {}
        self._device = None if stream_comm is None else stream_comm.device
        self._stream_comm = None if stream_comm is None else self._adopt(stream_comm)
        self._was_captured = False

    @property
    def device(self) -> torch.device:
        """The GPU that the group serves, or will serve if a collective without a tensor comes first."""
        return self._connector.accelerator.current_device() if self._device is None else self._device

    def background(self) -> AbstractContextManager[object]:
        """For threads that work for the group."""
        return self._connector.accelerator.background(self.device)

    def of_all(self, call: Collective, device: torch.device) -> StreamCommunicator:
        """The communicator of all ranks.

        Raises:
            FatalError: they could not be connected.
        """
        if self._stream_comm is None:
            self._refuse_capture(call)
            self._serve(call, device)
            try:
                self._stream_comm = self._adopt(self._connector.of_all(device, self._deadline()))
            except BaseException as error:
                raise FatalError(error) from error
        self._serve(call, device)
        return self._stream_comm

    def with_peer(self, peer: int, call: Collective, device: torch.device) -> Pair:
        """Those with another rank, or what will be them."""
        pair = self._pairs.get(peer)
        if pair is None or not pair.is_connected:
            self._refuse_capture(call)
        self._serve(call, device)
        if pair is None:
            pair = self._pairs[peer] = Pair(
                partial(self._of_two, peer, device), self._watchdog.report_and_fail, self.background
            )
        return pair

    def split(
        self, call: Collective, members: Sequence[int] | None, color: int | None, scope: CancelScope
    ) -> StreamCommunicator | None:
        """A part's communicator, by ncclCommSplit where this group is connected; else the part connects when it is used.

        Raises:
            FatalError: it could not be made.
        """
        self._refuse_capture(call)
        if self._stream_comm is None:
            return None
        if not self._watchdog.drain(scope.remaining_s()):
            waited = TransportError(f"split on {self._place()}: what was in flight did not finish in {scope.timeout_s:g} s")
            raise FatalError(waited)
        try:
            return self._connector.split(self._stream_comm, members, color, scope)
        except BaseException as error:
            raise FatalError(error) from error

    def note_capture(self) -> None:
        """A CUDA graph now refers to a communicator."""
        self._was_captured = True

    def give_back(self) -> None:
        """Destroy the communicators, when nothing is in flight any more.

        Each on a thread of its own: NCCL waits there for the other ranks, which may have made them in another order, and for
        CUDA graphs.

        Raises:
            TransportError: it takes too long.
        """
        scope = CancelScope(min(_GRAPHS_S, self._timeout_s()) if self._was_captured else self._timeout_s())
        calls = [
            DetachedCall(communicator.destroy, self.background, "syncline-nccl-destroy") for communicator in self._communicators
        ]
        for detached in calls:
            if not detached.done.wait(scope.remaining_s()):
                raise TransportError(self._kept_by_nccl(scope))
            detached.result()

    def _of_two(self, peer: int, device: torch.device) -> Mapping[Direction, StreamCommunicator]:
        stream_comms = self._connector.of_two(peer, device, self._deadline())
        return {direction: self._adopt(stream_comm) for direction, stream_comm in stream_comms.items()}

    def _adopt(self, stream_comm: StreamCommunicator) -> StreamCommunicator:
        self._communicators.append(stream_comm.communicator)
        self._watchdog.attach(stream_comm.communicator)
        return stream_comm

    def _deadline(self) -> CancelScope:
        return CancelScope(self._timeout_s())

    # ---- errors ----

    def _serve(self, call: Collective, device: torch.device) -> None:
        """Only one GPU, that of the first call."""
        if self._device is None:
            self._device = device
        if self._device != device:
            raise InvalidArgumentError(
                f"{call.signature()} on {self._place()}: the group serves {self._device}, the GPU of its first "
                f"call, found tensors on {device}; make a group for each GPU (new_group), and choose this rank's GPU by "
                "torch.cuda.set_device"
            )

    def _refuse_capture(self, call: Collective) -> None:
        if self._connector.accelerator.is_capturing():
            raise MisuseError(
                f"{call.signature()} on {self._place()}: NCCL cannot be connected while a CUDA graph is captured; issue the "
                "same call once before the capture (a warm-up step does)"
            )

    def _kept_by_nccl(self, scope: CancelScope) -> str:
        what = f"close on {self._place()}: NCCL did not give its communicators back within {scope.timeout_s:g} s. "
        if not self._was_captured:
            return f"{what}It waits for the other ranks, which must close the group, too; look for one that died"
        return (
            f"{what}A CUDA graph that captured one of the group's collectives is still alive: delete every such graph, and "
            "what holds it (a graphed callable, a captured training step), before you close the group"
        )
