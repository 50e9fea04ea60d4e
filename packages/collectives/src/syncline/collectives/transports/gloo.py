"""The backend "gloo": connects processes over TCP with the Gloo library, which is part of torch."""

from __future__ import annotations

import atexit
import ctypes
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from typing_extensions import override

from ..engine.call import Call
from ..engine.cancel_scope import CancelScope, DetachedCall
from ..engine.host_group import HostGroup
from ..engine.living_set import LivingSet
from ..engine.queue import all_idle, finish_all
from ..engine.tags import sized_wire_tag
from ..engine.transport import LibraryTransport, Request, Transport
from ..errors import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    LaunchError,
    MisuseError,
    SynclineError,
    TransportError,
)
from ..forks import in_forks
from ..health.liveness import Liveness
from ..health.stalls import StatusPost
from ..membership.reconnector import Generation
from ..membership.shrinkable_group import ShrinkableGroup
from ..reduce_op import HALVES, Reduction
from ..startup.addresses import (
    INTERFACE_VARIABLE,
    LOOPBACK,
    address_towards,
    addresses_for_others,
    loopback_domain,
    own_addresses,
)
from ..startup.backend import Backend, ConnectRequest
from ..startup.meeting import Met, address_by_store, meet
from ..startup.rendezvous import as_torch_store, keys_of_connection, meeting_place, store_of_running_job
from ..startup.user_secret import is_loopback
from ..stores import FromTorchStore, Store
from ..stores.torch_store import waits_end_with
from ..torch_bridge.torch_calls import TorchCalls
from ..torch_bridge.torch_work import TorchWork, torch_limit
from ..torch_internals import gloo_options
from .gloo_reconnector import Connect, GlooReconnector, Job, admit_lack, store_lack

# Below this size, two collectives take longer than one collective with twice the bytes.
_SCATTER_HALVES_FROM_BYTES = 64 * 1024
# A waiting collective checks whether waiting is useless: first after _FIRST_LOOK_S, then less often, up to _LOOK_S apart.
_FIRST_LOOK_S, _LOOK_S = 0.1, 0.5
_LARGEST_TAG = 2**31 - 1
# Under this key, a process that starts later finds on which host rank 0 is, and at which address rank 0 listens.
_HOST_0 = "host of rank 0"
Devices = tuple[Mapping[str, str], ...]
"""The places where Gloo listens: {"hostname": address} or {"interface": name}."""
_open: LivingSet[GlooTransport] = LivingSet()
in_forks(_open.clear)


class GlooTransport(LibraryTransport):
    """Runs collectives on a Gloo process group of torch. Each call blocks until its collective is over.

    Args:
        gloo: the process group, which has connected the ranks.
        store: the store in which subsets of the ranks meet.
        devices: the addresses or network interfaces where Gloo listens.
        name: the group's name, which is the same on all ranks.
        timeout_s: Gloo's own time limit for a collective, in seconds.
        liveness: finds out which ranks are lost; None if the processes of the ranks are not known.
    """

    backend_name = "gloo"

    def __init__(
        self,
        gloo: dist.ProcessGroupGloo,
        store: dist.Store,
        devices: Devices = (),
        *,
        name: str,
        timeout_s: float,
        liveness: Liveness | None = None,
    ) -> None:
        self._connected: TorchCalls | None = TorchCalls(gloo)
        self._name = name
        self.liveness = liveness
        self._store = store
        self.devices = devices
        self._gloo_timeout_s = timeout_s
        self._in_flight: TorchWork | None = None  # the collective that Gloo runs, maybe still after this rank has given it up
        self._subsets: Counter[str] = Counter()  # by name and members: how many subsets were made
        _open.add(self)

    def describe(self) -> str:
        """Return "gloo" and the version of torch, because torch contains Gloo."""
        return f"gloo of torch {torch.__version__}"

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        """Call Gloo's all-reduce. For large float16 and bfloat16 tensors, call a reduce-scatter and an all-gather.

        For these dtypes, Gloo's all-reduce would send 4 bytes for each element. The reduce-scatter and the all-gather send 2
        bytes.
        """
        if tensor.dtype not in HALVES or self._gloo.size == 1 or tensor.nbytes < _SCATTER_HALVES_FROM_BYTES:
            self._wait(self._within(call).all_reduce(tensor, op), call.scope)
            return
        padded = torch.nn.functional.pad(tensor, (0, -tensor.numel() % self._gloo.size))
        part = torch.empty_like(padded.view(self._gloo.size, -1)[0])
        self._wait(self._within(call).reduce_scatter(part, padded, op), call.scope)
        self._wait(self._within(call).all_gather_into_tensor(padded, part), call.scope)
        tensor.copy_(padded[: tensor.numel()])

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        """All-reduce a copy of the tensor. Only the root keeps the result."""
        self._wait(self._within(call).reduce(tensor, root, op), call.scope)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> None:
        """Call Gloo's broadcast, with the tensor as bytes."""
        self._wait(self._within(call).broadcast(tensor, root), call.scope)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        """Call Gloo's all-gather, with the tensors as bytes."""
        self._wait(self._within(call).all_gather_into_tensor(block, tensor), call.scope)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Call Gloo's gather, with the tensors as bytes."""
        self._wait(self._within(call).gather(tensor, self._parts(block, tensor), root), call.scope)

    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Call Gloo's scatter, with the tensors as bytes."""
        self._wait(self._within(call).scatter(tensor, self._parts(block, tensor), root), call.scope)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Call) -> None:
        """Exchange the parts in an all-to-all, with the tensors as bytes. Then each rank reduces its part in rank order."""
        self._wait(self._within(call).reduce_scatter(tensor, block, op), call.scope)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Call,
    ) -> None:
        """Call Gloo's all-to-all, with the tensors as bytes."""
        self._wait(self._within(call).all_to_all(output, tensor, output_counts, input_counts), call.scope)

    @override
    def barrier(self, call: Call) -> None:
        self._wait(self._within(call).barrier(), call.scope)

    @override
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        return self._gloo.start_send(tensor, dst, _tag(tag, tensor))

    @override
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        return self._gloo.start_recv(tensor, src, _tag(tag, tensor))

    @override
    def meeting_store(self) -> dist.Store:
        return self._store

    @override
    def status_post(self) -> StatusPost:
        return _StorePost(dist.PrefixStore(f"status/{self._name}", self._store), self._gloo.rank, self._gloo.size)

    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        """Make a Gloo group of some ranks of this group. These ranks meet in this group's store."""
        rank = list(members).index(self._gloo.rank)
        group = f"{name}/{crc32(repr(list(members)).encode()):x}"
        self._subsets[group] += 1
        store = dist.PrefixStore(f"{group}/{self._subsets[group]}", self._store)
        return connect(store, rank, len(members), name, scope, self.devices)

    def outlive(self, store: dist.Store) -> None:
        """Use `store` instead of the store in which the ranks have connected. Later, subsets of the ranks meet in `store`."""
        self._store = store

    def _within(self, call: Call) -> TorchCalls:
        """Return the calls of Gloo. If Gloo's own time limit is shorter than the call's, first set it to the call's limit."""
        # The call's time limit may be longer than the limit of the connection, for example after `set_timeout`. Set no endless
        # limit: after a failure, Gloo's thread would never drop the tensors. Never make the limit shorter: at its own limit,
        # Gloo breaks its connections. Then the other ranks get an error that says less than their own time-out.
        if call.scope.timeout_s > self._gloo_timeout_s:
            self._gloo.torch_group._set_default_timeout(torch_limit(call.scope.timeout_s))
            self._gloo_timeout_s = call.scope.timeout_s
        return self._gloo

    def _wait(self, work: TorchWork, scope: CancelScope) -> None:
        self._in_flight = work
        slice_s = _FIRST_LOOK_S
        try:
            while not work.wait_for(min(max(scope.remaining_s(), 1e-3), slice_s)):
                scope.check("Gloo does not say which ranks do not take part")
                slice_s = min(1.2 * slice_s, _LOOK_S)
        except CollectiveTimeout as error:
            # A transport raises Python's `TimeoutError`. From this error, `FailureWords` (`engine.failure`) makes the group's
            # error, with the call, the rank and the group's time limit.
            raise TimeoutError(str(error)) from error
        self._in_flight = None

    @property
    def _gloo(self) -> TorchCalls:
        # After `_hang_up`, a program may still issue calls, for example in `__del__`.
        if self._connected is None:
            raise TransportError("the process ends, and has closed its connections over Gloo")
        return self._connected

    def close(self) -> None:
        """Drop the torch group. Gloo closes its sockets when the last reference to the group is gone."""
        _open.discard(self)
        self._connected = None

    def abort(self) -> None:
        """Keep the torch group for ever, because its destructor would wait for collectives in flight."""
        # Keep the group even when the interpreter ends: two ranks that gave up a collective would wait for each other at exit.
        _open.discard(self)
        # After `close` there is no torch group, but this method may still be called.
        if self._connected is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connected))

    def hang_up(self) -> None:
        """At exit, close the connections, but do not wait for a collective that this rank has given up."""
        work = self._in_flight
        if work is None or work.is_completed():
            self.close()
            return
        # After Ctrl-C, for example, Gloo runs the collective until Gloo's own time limit, and closing would wait for it.
        self.abort()
        # If the collective ends just now, Gloo's thread must not drop its tensors; see Note [Leaving while Gloo's thread drops
        # a work].
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))

    @override
    def leave_to_parent(self) -> None:
        """Keep the torch group for ever: its destructor would wait for threads that a forked child does not have."""
        self.abort()

    def _parts(self, block: torch.Tensor | None, part: torch.Tensor) -> list[torch.Tensor] | None:
        return None if block is None else list(block.view(self._gloo.size, part.numel()))


class _StorePost(StatusPost):
    """Keeps the latest status line of each rank in the store. A counter in the store shows whether any line is new."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0

    @override
    def post(self, line: str) -> None:
        self._store.set(str(self._rank), line)
        self._store.add("count", 1)

    @override
    def posted(self) -> Mapping[int, str]:
        count = self._store.add("count", 0)
        if count == self._count:
            return {}
        self._count = count
        # A rank that has not posted yet has no key, and `get` would wait for the key.
        present = (rank for rank in range(self._size) if self._store.check([str(rank)]))
        return {rank: self._store.get(str(rank)).decode() for rank in present}


def connect(
    store: dist.Store,
    rank: int,
    size: int,
    name: str,
    scope: CancelScope,
    devices: Devices = (),
    liveness: Liveness | None = None,
    interfaces: Sequence[str] = (),
) -> GlooTransport:
    """Connect with the other ranks. All ranks call this function with the same store, size and name.

    `scope` is the time limit of the whole call. `devices` says where Gloo listens on this rank. If `devices` is empty, Gloo
    listens on the network interfaces `interfaces`. If `interfaces` is empty, too, Gloo listens at an address that all ranks can
    reach. If `liveness` is None, the ranks first meet in the store, to learn each other's processes.

    Raises:
        CollectiveTimeout: not all ranks came in time, or Gloo did not connect the ranks in time.
        DisagreementError: the ranks were given different sizes, or run different versions of Syncline.
        LaunchError: the hosts cannot reach each other.
        RankLostError: a rank ended while the ranks connected.
        TransportError: Gloo failed.
        BaseException: `scope` was cancelled with this error.
    """
    place = f"Gloo could not connect rank {rank} of {size} in group '{name}'"
    ours = dist.PrefixStore(name, store)
    try:
        known = liveness
        # Ranks without `liveness` first meet in the store, so that an error can name the missing ranks.
        if known is None:
            met = meet(FromTorchStore(ours), rank, size, scope)
            known = Liveness(met.processes, rank)
            patience = _until_a_loss(scope, known)
            devices = devices or _devices(FromTorchStore(ours), met, rank, size, interfaces, patience)
        gloo = _connect_patiently(partial(_connected, ours, rank, size, scope.timeout_s, devices), known, scope, devices)
    except (MisuseError, DisagreementError):
        raise
    except SynclineError as error:
        # The error is the reason with which a thread has cancelled the call, for example by `abort`. Raise it unchanged.
        if error is scope.reason:
            raise
        raise error.reworded(f"{place}: {error}") from error.__cause__
    except TimeoutError as error:
        # If another rank has given up, this rank fails before its own time limit.
        limit = f" within {scope.timeout_s:g} s (timeout)" if scope.is_over() else ""
        raise CollectiveTimeout(f"{place}{limit}: {error}") from error
    return GlooTransport(gloo, store, devices, name=name, timeout_s=scope.timeout_s, liveness=known)


def _devices(store: Store, met: Met, rank: int, size: int, interfaces: Sequence[str], scope: CancelScope) -> Devices:
    if interfaces:
        (own_addresses if met.share_loopback else addresses_for_others)(interfaces)  # raises if an interface does not fit
        return tuple({"interface": name} for name in interfaces)
    # Ranks that share a loopback address need no network.
    if size == 1 or met.share_loopback:
        return _at(LOOPBACK)
    return _at(address_by_store(store, rank, size, interfaces, scope))


def _at(address: str) -> Devices:
    return ({"hostname": address},)


def _address_of(devices: Devices) -> str:
    interfaces = [device["interface"] for device in devices if "interface" in device]
    if not interfaces:
        return devices[0]["hostname"]
    found = own_addresses(interfaces)
    return next((entry.address for entry in found if not entry.is_loopback), found[0].address)


def _until_a_loss(scope: CancelScope, liveness: Liveness) -> CancelScope:
    """Return a scope that ends with `scope`, and also if a rank of this group is lost."""

    def ask() -> BaseException | None:
        # A lost rank of this group comes first, because the error then has the rank's number in this group.
        return liveness.reason_to_give_up() or (None if scope.ask is None else scope.ask())

    return scope.within(math.inf, ask)


def _connect_patiently(connect: Callable[[], Any], liveness: Liveness, scope: CancelScope, devices: Devices) -> Any:
    # Connect on a new thread: Gloo's own time limit would hold for each of its steps, and not for the whole connection.
    patience = _until_a_loss(scope, liveness)
    mine = ", ".join(value for device in devices for value in device.values())
    try:
        return DetachedCall(connect, "syncline-gloo-connect", lambda: waits_end_with(patience)).wait(
            patience,
            _FIRST_LOOK_S,
            f"it takes too long, though all ranks have come; this rank is to be reached at {mine}. Choose the interface "
            f"with {INTERFACE_VARIABLE}, or `interface` in the site file, or let the firewall pass connections",
        )
    except (SynclineError, TimeoutError):
        # Our own errors are RuntimeErrors, too. Raise them unchanged.
        raise
    except RuntimeError as error:
        # Gloo only reports a broken connection. If a lost process is the cause, raise an error that names its rank.
        raise (liveness.loss_behind(error) or TransportError(str(error))) from error
    finally:
        # After a failure, the thread must not wait in a store for a rank that never comes.
        patience.cancel(TransportError("the connection was made or given up"))


def _connected(store: dist.Store, rank: int, size: int, timeout_s: float, devices: Devices) -> Any:
    made = [dist.ProcessGroupGloo.create_device(**device) for device in devices]
    return dist.ProcessGroupGloo(store, rank, size, gloo_options(timedelta(seconds=timeout_s), made))


def _tag(tag: int, tensor: torch.Tensor) -> int:
    # Gloo compares neither dtype nor size, so the tag encodes both.
    return sized_wire_tag(tag, tensor.dtype, tensor.numel(), _LARGEST_TAG)


class GlooBackend(Backend):
    """The backend "gloo". The ranks are processes that meet in a store."""

    @property
    @override
    def meets_in_store(self) -> bool:
        return True

    @property
    @override
    def serves_newcomers(self) -> bool:
        return True

    def missing(self) -> str | None:
        """Return an error text if this build of torch has no Gloo. Otherwise return None."""
        if dist.is_available() and dist.is_gloo_available():
            return None
        return "this build of torch has no Gloo; install one of torch's standard wheels"

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Wait in a store until all ranks have come, then connect this rank with all other ranks over TCP."""
        lack = self.missing()
        if lack is not None:
            raise BackendUnavailableError(f"backend 'gloo': {lack}")
        if request.joins:
            return _newcomer(request)
        own_addresses(request.interfaces)  # raises for an unknown interface before any rank waits
        store, rank, size, address = meeting_place(request)
        if request.launch is not None and request.launch.is_mpi:
            # `atexit` runs functions last in, first out. MPI has registered its function by now, and this function may keep the
            # process from ending. Register `_hang_up` again, so that `_hang_up` closes the sockets before MPI's function runs.
            atexit.register(_hang_up)
        devices = () if address is None or request.interfaces else _at(address)
        store = keys_of_connection(store, "gloo", rank)
        scope = CancelScope(request.timeout_s)
        transport = connect(store, rank, size, request.group_name, scope, devices, interfaces=request.interfaces)
        generation, lack = Generation(0, tuple(range(size)), rank), store_lack(request, size)
        if rank == 0 and admit_lack(request) is None:
            store.set(_HOST_0, json.dumps([loopback_domain(), _address_of(transport.devices)]))
        again = _connect_again(request, store, transport.devices)
        reconnector = GlooReconnector(store, generation, Job(size, _options(request)), again, lack, admit_lack(request))
        return _started(transport, reconnector, request)


def _newcomer(request: ConnectRequest) -> ShrinkableGroup:
    lack = admit_lack(request)
    if lack is not None:
        raise LaunchError(f"backend 'gloo': SYNCLINE_JOIN=1 says that this process joins a job that runs, but {lack}")
    if request.store is not None:
        met_in = as_torch_store(request.store)
    else:
        met_in = store_of_running_job(request.init_method or "", request.timeout_s)
    store = keys_of_connection(met_in, "gloo", None)
    again = _connect_again(request, store, _devices_of_newcomer(request, FromTorchStore(store)))
    reconnector = GlooReconnector.of_newcomer(store, _options(request), again, request.timeout_s)
    alone = connect(dist.HashStore(), 0, 1, request.group_name, CancelScope(request.timeout_s))
    return _started(alone, reconnector, request)


def _devices_of_newcomer(request: ConnectRequest, store: Store) -> Devices:
    if request.interfaces:
        own_addresses(request.interfaces)
        return tuple({"interface": name} for name in request.interfaces)
    domain, address = json.loads(store.get(_HOST_0, request.timeout_s))
    # On rank 0's host: listen at rank 0's own address, which the other ranks already reach.
    if domain == loopback_domain():
        return _at(LOOPBACK if is_loopback(address) else address)
    if is_loopback(address):
        raise LaunchError(
            f"this process joins a job on another host, whose ranks are at {address}, where only that host reaches them: start "
            f"the job with {INTERFACE_VARIABLE}, or `interface` in the site file"
        )
    return _at(address_towards(address))


def _started(transport: GlooTransport, reconnector: GlooReconnector, request: ConnectRequest) -> ShrinkableGroup:
    options = {"name": request.group_name, "timeout_s": request.timeout_s, "check_calls": request.check_calls}
    group = ShrinkableGroup(transport, reconnector, **options)
    group.start(_options(request), request.stall_warning_s)
    return group


def _options(request: ConnectRequest) -> dict[str, bool]:
    return {"check_calls": request.check_calls, "reproducible": request.reproducible}


def _connect_again(request: ConnectRequest, store: dist.Store, devices: Devices) -> Connect:
    def connect_again(generation: Generation, known: Liveness, met_in: dist.Store, timeout_s: float) -> GlooTransport:
        size, scope = len(generation.members), CancelScope(timeout_s)
        again = connect(met_in, generation.rank, size, request.group_name, scope, devices, known)
        again.outlive(dist.PrefixStore(f"{generation.prefix}/subsets", store))
        return again

    return connect_again


@atexit.register
def _hang_up() -> None:
    """Close the connections of all groups at exit. Other ranks that wait for this rank then fail at once.

    Note [Leaving while Gloo's thread drops a work]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    When a collective is over, Gloo's own thread may still hold its tensors. If the program ends first, the thread cannot drop
    the tensors without an interpreter, and aborts the process ("terminate called without an active exception"). Closing a group
    waits for Gloo's threads. So we close the groups at exit, but not while a call is in flight: closing would wait for the
    call.
    """
    finish_all()
    for transport in _open if all_idle() else ():
        transport.hang_up()


backend = GlooBackend()
