"""Make a group's NCCL communicators at their first use, and destroy the communicators when the group closes."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import torch

from ...engine.call import Signature
from ...engine.cancel_scope import CancelScope, DetachedCall
from ...engine.device import DeviceRuntime, Stream
from ...errors import CollectiveTimeout, DisagreementError, InvalidArgumentError, MisuseError, TransportError
from ...startup.nodes import host_identity
from .communicator import Communicator, nccl_errors, version_in_words
from .in_flight import FatalError, InFlight
from .rendezvous import Payload, Rendezvous

T = TypeVar("T")
Direction: TypeAlias = tuple[int, int]

# How long `close` waits for CUDA graphs, which the program may never delete.
_GRAPHS_S = 30.0

#: For tests: if this environment variable has a different text on each rank, several ranks can share one GPU. NCCL then
#: treats these ranks as ranks of different hosts, which communicate over sockets. Sockets are too slow for training.
HOST_ID_VARIABLE = "NCCL_HOSTID"
#: If this environment variable is 1 on each rank, and NCCL has at least this version, ranks of one host can share a GPU.
MULTI_RANK_VARIABLE, MULTI_RANK_VERSION = "NCCL_MULTI_RANK_GPU_ENABLE", (2, 30)


@dataclass(frozen=True)
class StreamCommunicator:
    """A communicator and its CUDA stream. The communicator connects all ranks of a group, or two ranks in one direction.

    A thread holds `lock` while it issues a call, because NCCL allows only one thread at a time.
    """

    communicator: Communicator
    stream: Stream
    lock: Lock = field(default_factory=Lock)


class Connector:
    """Connects the ranks of one group over NCCL. The group need not have all ranks of the job.

    Args:
        rendezvous: lets the ranks of the job exchange messages without NCCL. All groups of the job use one rendezvous.
        ranks: for each rank of the group, its rank in the job.
    """

    def __init__(
        self, nccl: Any, runtime: DeviceRuntime, rendezvous: Rendezvous, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        self.nccl = nccl
        self.runtime = runtime
        self.rendezvous = rendezvous
        self.ranks = list(ranks)
        self.rank = rank
        self.name = name

    def part(self, members: Sequence[int], name: str) -> Connector:
        """Make the connector of a new group. `members` are the ranks of the new group, as ranks in this connector's group."""
        ranks = [self.ranks[member] for member in members]
        return Connector(self.nccl, self.runtime, self.rendezvous, ranks, list(members).index(self.rank), name)

    def agree(self, topic: str, payload: Payload, decide: Callable[[list[Payload]], Payload], scope: CancelScope) -> Payload:
        """Agree with all ranks of the group on a decision, without the GPU; see `Rendezvous.agree`."""
        return self._agree(topic, self.ranks, payload, decide, scope)

    def _agree(
        self, topic: str, ranks: Sequence[int], payload: Payload, decide: Callable[[list[Payload]], Payload], scope: CancelScope
    ) -> Payload:
        return self.rendezvous.agree(f"{self.name}/{topic}", ranks, self.ranks[self.rank], payload, decide, scope)

    def connect(self, topic: str, members: Sequence[int], device: torch.device, scope: CancelScope) -> StreamCommunicator:
        """Connect some ranks of the group. Each of these ranks must call this method.

        Args:
            topic: a name for this connection. Each connection needs a new name.
            members: the ranks to connect, as ranks in this connector's group, in their order in the new communicator.
            device: this rank's GPU.
            scope: the time limit for the whole call.

        Raises:
            DisagreementError: NCCL cannot connect these ranks; for example, two ranks have chosen the same GPU.
            TransportError: a rank did not call this method in time, or NCCL failed.
        """
        with nccl_errors(self.nccl, "ncclGetVersion"):
            version = version_in_words(self.nccl)
        mine = peer_info(self.ranks[self.rank], self.runtime.pci_id(device), version)
        decision = self._agree(topic, [self.ranks[member] for member in members], mine, self._decide, scope)
        # All ranks get the conflict as the decision. So every rank raises an error, and no rank waits inside NCCL.
        if "conflict" in decision:
            raise DisagreementError(f"group '{self.name}' cannot be connected: {decision['conflict']}")
        stream = self.runtime.stream(device, is_own=True)
        unique_id, rank = bytes.fromhex(decision["unique_id"]), list(members).index(self.rank)
        made = self.within(scope, device, lambda: Communicator.connect(self.nccl, unique_id, rank, len(members), stream.handle))
        return StreamCommunicator(made, stream)

    def split(self, whole: StreamCommunicator, members: Sequence[int] | None, scope: CancelScope) -> StreamCommunicator | None:
        """Call `Communicator.split` on `whole`. All its ranks must do so. Return None if this rank is in no new group."""
        stream = self.runtime.stream(whole.stream.device, is_own=True)
        made = self.within(scope, stream.device, lambda: whole.communicator.split(members, stream.handle))
        return None if made is None else StreamCommunicator(made, stream)

    def _decide(self, peers: list[Payload]) -> Payload:
        found = find_conflict(peers)
        if found is not None:
            return {"conflict": found}
        with nccl_errors(self.nccl, "ncclGetUniqueId"):
            return {"unique_id": bytes(self.nccl.get_unique_id()).hex()}

    def within(self, scope: CancelScope, device: torch.device, connect: Callable[[], T]) -> T:
        """Call `connect`, which calls NCCL, on a new thread. If the call does not end in time, raise a `CollectiveTimeout`."""
        call = DetachedCall(connect, "syncline-nccl-connect", partial(self.runtime.background, device))
        try:
            return call.wait(scope)
        except TimeoutError as error:
            raise CollectiveTimeout(
                f"NCCL did not connect the ranks of group '{self.name}' within {scope.timeout_s:g} s, although all came; "
                "NCCL_DEBUG=INFO shows what it tries (NCCL_SOCKET_IFNAME chooses the network)"
            ) from error


class Connections:
    """A group's communicators on one GPU: one for all ranks, and two for each peer of a send or receive."""

    def __init__(
        self,
        connector: Connector,
        place: Callable[[], str],
        timeout_s: Callable[[], float],
        in_flight: InFlight,
        of_all_ranks: StreamCommunicator | None,
    ) -> None:
        self._connector = connector
        self._place = place
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._made: list[StreamCommunicator] = []
        self._pairs: dict[int, Pair] = {}
        self._device = None if of_all_ranks is None else of_all_ranks.stream.device
        self._of_all_ranks = None if of_all_ranks is None else self._adopt(of_all_ranks)
        self._was_captured = False

    @property
    def device(self) -> torch.device:
        """The GPU of the group's first call. Before the first call, this is the current GPU."""
        return self._connector.runtime.current_device() if self._device is None else self._device

    def background(self) -> AbstractContextManager[object]:
        """Return a context manager for threads that work for the group; see `DeviceRuntime.background`."""
        return self._connector.runtime.background(self.device)

    def link_of_all_ranks(self, signature: Signature, device: torch.device) -> StreamCommunicator:
        """Return the communicator of all ranks, for a call with this signature. The first call connects the ranks.

        Raises:
            FatalError: NCCL could not connect the ranks.
        """
        if self._of_all_ranks is None:
            # Check before `_fatal`: a misuse on this rank leaves the group usable.
            self._refuse_capture(signature)
            self._serve(signature, device)
            with _fatal():
                self._of_all_ranks = self._adopt(
                    self._connector.connect("all", range(len(self._connector.ranks)), device, self._scope())
                )
        self._serve(signature, device)
        return self._of_all_ranks

    def with_peer(self, peer: int, signature: Signature, device: torch.device) -> Pair:
        """Return the `Pair` of this rank and another rank. The two ranks may not be connected yet."""
        pair = self._pairs.get(peer)
        # While the pair connects, another thread issues the transfers, so a capture on this thread would lack the transfers.
        if pair is None or not pair.is_connected:
            self._refuse_capture(signature)
        self._serve(signature, device)
        if pair is None:
            pair = self._pairs[peer] = Pair(
                partial(self._of_two, peer, device), self._in_flight.report_and_fail, self.background
            )
        return pair

    def split(self, members: Sequence[int] | None, scope: CancelScope) -> StreamCommunicator | None:
        """Call ncclCommSplit to make a communicator for a new group of some of this group's ranks.

        Return None if this rank is in no new group, or if this group is not connected yet. Then the new group connects at its
        first use.

        Raises:
            FatalError: NCCL could not make the communicator.
        """
        self._refuse_capture(Signature("split"))
        if self._of_all_ranks is None:
            return None
        with _fatal():
            # No operation of this communicator may be in flight; see `Communicator.split`. Do not wait for transfers: they have
            # other communicators, and a peer may send only after the split.
            if not self._in_flight.drain(scope.remaining_s(), also_transfers=False):
                raise TransportError(f"split on {self._place()}: what was in flight did not finish in {scope.timeout_s:g} s")
            return self._connector.split(self._of_all_ranks, members, scope)

    def note_capture(self) -> None:
        """Remember that a CUDA graph uses a communicator, so that `give_back` waits for a shorter time."""
        self._was_captured = True

    def give_back(self) -> None:
        """Destroy the communicators. Call this method when no operation is in flight.

        NCCL waits until the other ranks have destroyed their communicators, too, and until the program has deleted the CUDA
        graphs that use a communicator.

        Raises:
            TransportError: NCCL did not return within the group's time limit, or within 30 seconds after a capture in a CUDA
                graph.
        """
        scope = CancelScope(min(_GRAPHS_S, self._timeout_s()) if self._was_captured else self._timeout_s())
        # Use a thread for each communicator, because the other ranks may destroy their communicators in another order.
        calls = [DetachedCall(made.communicator.destroy, "syncline-nccl-destroy", self.background) for made in self._made]
        for call in calls:
            try:
                call.wait(scope)
            except TimeoutError:
                raise TransportError(self._kept_by_nccl(scope)) from None

    def _of_two(self, peer: int, device: torch.device) -> Mapping[Direction, StreamCommunicator]:
        """Connect with one other rank. Make a communicator for each direction, because a receive must not wait behind a send.

        NCCL connects two ranks only at their first send and receive, and blocks the CPU until the other rank has made the
        matching call. If two ranks both send before they receive, they would wait for each other. So send one byte in each
        direction, in the same order on both ranks.
        """
        low, high = sorted((self._connector.rank, peer))
        scope, made = self._scope(), {}
        for direction in ((low, high), (high, low)):
            link = self._connector.connect("{} to {}".format(*direction), direction, device, scope)
            made[direction] = self._adopt(link)
            self._connector.within(scope, device, partial(_send_a_byte, link))
        return made

    def _adopt(self, made: StreamCommunicator) -> StreamCommunicator:
        self._made.append(made)
        self._in_flight.attach(made.communicator)
        return made

    def _scope(self) -> CancelScope:
        return CancelScope(self._timeout_s(), self._in_flight.reason_to_give_up)

    # ---- errors ----

    def _serve(self, signature: Signature, device: torch.device) -> None:
        if self._device is None:
            self._device = device
        if self._device != device:
            raise InvalidArgumentError(
                f"{signature} on {self._place()}: the group serves {self._device}, the GPU of its first "
                f"call, found tensors on {device}; make a group for each GPU (new_group), and choose this rank's GPU by "
                "torch.cuda.set_device"
            )

    def _refuse_capture(self, signature: Signature) -> None:
        if self._connector.runtime.is_capturing():
            raise MisuseError(
                f"{signature} on {self._place()}: NCCL cannot be connected while a CUDA graph is captured; issue the "
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


@contextmanager
def _fatal() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise FatalError(error) from error


def _send_a_byte(link: StreamCommunicator) -> None:
    device, communicator = link.stream.device, link.communicator

    def body() -> None:
        byte = torch.empty(1, dtype=torch.uint8, device=device)  # not filled: the kernel that fills it might wait for the GPU
        if communicator.rank == 0:
            communicator.send(byte, 1)
        else:
            communicator.recv(byte, 0)

    # Do not wait for the program's stream: the stream may already contain a wait for a later collective. The other rank may
    # begin that collective only after the transfer for which this rank connects.
    link.stream.run(body, None)


Task: TypeAlias = Callable[[StreamCommunicator], None]


class Pair:
    """Issues the transfers between two ranks, in order. The first transfer connects the ranks, without blocking the caller.

    A separate thread connects the ranks, and then issues the transfers that callers have submitted so far. Afterwards, each
    caller of `submit` issues its transfer itself.

    Args:
        connect: makes a communicator for each direction. The separate thread calls this function.
        fail: called with the error if the separate thread fails.
        context: makes the context in which the separate thread runs.
    """

    def __init__(
        self,
        connect: Callable[[], Mapping[Direction, StreamCommunicator]],
        fail: Callable[[BaseException], object],
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._connect = connect
        self._fail = fail
        self._context = context
        self._lock = Lock()
        self._waiting: deque[tuple[Direction, Task]] = deque()
        self._made: Mapping[Direction, StreamCommunicator] | None = None
        self._is_started = False

    @property
    def is_connected(self) -> bool:
        """Whether the ranks are connected. If True, the thread that calls `submit` issues the transfer itself."""
        return self._made is not None

    def submit(self, direction: Direction, task: Task) -> None:
        """Issue a transfer: call `task` with the communicator of this direction, now or as soon as the ranks are connected."""
        with self._lock:
            if self._made is None:
                self._waiting.append((direction, task))
                # The caller must not block: in a ring where all ranks begin with a send, each rank would wait for the next.
                if not self._is_started:
                    self._is_started = True
                    DetachedCall(self._run, "syncline-nccl-pair", self._context)
                return
        # Run the task without the lock: the task may run callbacks, which may call `submit` again.
        task(self._made[direction])

    def _run(self) -> None:
        try:
            made = self._connect()
            while (entry := self._next(made)) is not None:
                direction, task = entry
                task(made[direction])
        except BaseException as error:  # noqa: BLE001 - the group's waiters raise it
            self._fail(error)
            self._waiting.clear()  # only after `fail`: the tasks keep the works alive that `fail` must reach

    def _next(self, made: Mapping[Direction, StreamCommunicator]) -> tuple[Direction, Task] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            # No transfer is left, and no caller can add one while this thread holds the lock. Now callers issue transfers.
            self._made = made
            return None


# ---- what each rank tells the others, and why ranks cannot be connected ----


def peer_info(rank: int, pci_id: str, version: str) -> Payload:
    """Return facts about this process, from which `find_conflict` decides whether NCCL can connect the ranks.

    `rank` is this process's rank in the job. `pci_id` is the PCI address of its GPU.
    """
    identity = host_identity()
    return {
        "rank": rank,
        "host": f"{identity.hostname} {identity.boot_id}",
        "host_id": os.environ.get(HOST_ID_VARIABLE, ""),
        "hostname": socket.gethostname(),
        "pci_id": pci_id,
        "shares": os.environ.get(MULTI_RANK_VARIABLE) == "1" and _numbers(version) >= MULTI_RANK_VERSION,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "unset"),
        "version": version,
    }


def find_conflict(peers: Sequence[Payload]) -> str | None:
    """Return an error text if NCCL cannot connect these ranks; else None."""
    return _one_gpu_twice(peers) or _two_versions(peers)


def _one_gpu_twice(peers: Sequence[Payload]) -> str | None:
    taken: dict[tuple[str, str, str], Payload] = {}
    for mine in peers:
        other = taken.setdefault((mine["host"], mine["host_id"], mine["pci_id"]), mine)
        # NCCL lets two ranks share a GPU only if both ranks have asked to share.
        if other is not mine and not (other["shares"] and mine["shares"]):
            return (
                f"ranks {other['rank']} and {mine['rank']} have both chosen the GPU {mine['pci_id']} of {mine['hostname']}, "
                "but NCCL needs one for each rank. Before the first collective, call "
                "torch.cuda.set_device(syncline.collectives.default_device()), or let the launcher show each rank its own by "
                "CUDA_VISIBLE_DEVICES (srun --gpus-per-task=1; it is "
                f"{other['visible']} on rank {other['rank']} and {mine['visible']} on rank {mine['rank']})"
            )
    return None


def _two_versions(peers: Sequence[Payload]) -> str | None:
    first = peers[0]
    for mine in peers:
        if mine["version"] != first["version"]:
            return (
                f"rank {first['rank']} on {first['hostname']} has NCCL {first['version']}, rank {mine['rank']} on "
                f"{mine['hostname']} has NCCL {mine['version']}; install one version on all nodes"
            )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
