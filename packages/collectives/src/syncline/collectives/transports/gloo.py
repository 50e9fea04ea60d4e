"""Gloo, the default that is embedded in torch: torch's own group, put into one total order."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import weakref
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
from ..engine.group import HostGroup
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
from ..startup.rendezvous import as_torch_store, meeting_place, store_of_running_job
from ..startup.user_secret import is_loopback
from ..stores import FromTorchStore, Store
from ..torch_bridge.torch_group import TorchGroup
from ..torch_bridge.torch_work import TorchWork
from ..torch_internals import gloo_options
from ..work import Work
from .gloo_reconnector import Connect, GlooReconnector, Job, admit_lack, store_lack

# The store may outlive a group (torchrun's does), so every connection writes under a number of its own; all ranks connect
# equally often.
_generations = itertools.count()
# Below it two collectives take longer than one of twice the bytes.
_SCATTER_HALVES_FROM_BYTES = 64 * 1024
# A collective that takes long looks whether waiting is in vain; rarer the longer it takes.
_FIRST_LOOK_S, _LOOK_S = 0.1, 0.5
_LARGEST_TAG = 2**31 - 1
# The key under which a process that comes later finds the host of rank 0, and its address.
_HOST_0 = "host of rank 0"
Devices = tuple[Mapping[str, str], ...]
"""What Gloo listens on: {"hostname": an address} or {"interface": its name}."""
_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()
in_forks(_open.clear)


class GlooTransport(LibraryTransport):
    """Blocking collectives of a torch Gloo group.

    Args:
        group: the torch group.
        store: where subsets of its ranks find one another.
        devices: what Gloo listens on.
        liveness: says which of the ranks are lost; None where nobody can know.
    """

    backend_name = "gloo"

    def __init__(
        self, group: TorchGroup, store: dist.Store, devices: Devices = (), *, liveness: Liveness | None = None
    ) -> None:
        self._group = group
        self.liveness = liveness
        self._store = store
        self.devices = devices
        self._subsets: Counter[str] = Counter()  # how many of each name and members were made
        _open.add(self)

    def describe(self) -> str:
        """Gloo's version is torch's."""
        return f"gloo of torch {torch.__version__}"

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Call) -> None:
        """Gloo's ring; halves of some size as a reduce-scatter and an all-gather, which move two bytes for each."""
        if tensor.dtype not in HALVES or self._group.size == 1 or tensor.nbytes < _SCATTER_HALVES_FROM_BYTES:
            _wait(self._group.all_reduce(tensor, op, async_op=True), call.scope)
            return
        padded = torch.nn.functional.pad(tensor, (0, -tensor.numel() % self._group.size))
        part = torch.empty_like(padded.view(self._group.size, -1)[0])
        _wait(self._group.reduce_scatter_tensor(part, padded, op, async_op=True), call.scope)
        _wait(self._group.all_gather_into_tensor(padded, part, async_op=True), call.scope)
        tensor.copy_(padded[: tensor.numel()])

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Call) -> None:
        """An all_reduce of a copy."""
        _wait(self._group.reduce(tensor, root, op, async_op=True), call.scope)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Call) -> None:
        """Gloo's broadcast of bytes."""
        _wait(self._group.broadcast(tensor, root, async_op=True), call.scope)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Call) -> None:
        """Gloo's all-gather of bytes."""
        _wait(self._group.all_gather_into_tensor(block, tensor, async_op=True), call.scope)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Gloo's gather of bytes."""
        _wait(self._group.gather(tensor, self._parts(block, tensor), root, async_op=True), call.scope)

    def scatter(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Call) -> None:
        """Gloo's scatter of bytes."""
        _wait(self._group.scatter(tensor, self._parts(block, tensor), root, async_op=True), call.scope)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Call) -> None:
        """An all-to-all of bytes, then a reduction in rank order."""
        _wait(self._group.reduce_scatter_tensor(tensor, block, op, async_op=True), call.scope)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Call,
    ) -> None:
        """Gloo's all-to-all of bytes."""
        _wait(self._group.all_to_all_single(output, tensor, output_counts, input_counts, async_op=True), call.scope)

    @override
    def barrier(self, call: Call) -> None:
        _wait(self._group.barrier(async_op=True), call.scope)

    @override
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        return self._group.start_send(tensor, dst, _tag(tag, tensor))

    @override
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        return self._group.start_recv(tensor, src, _tag(tag, tensor))

    @override
    def meeting_store(self) -> dist.Store:
        return self._store

    @override
    def status_post(self) -> StatusPost:
        return _StorePost(dist.PrefixStore(f"status/{self._group.name}", self._store), self._group.rank, self._group.size)

    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        """Another Gloo group, which meets in the same store, where no other of its name and members has met."""
        rank = list(members).index(self._group.rank)
        group = f"{name}/{crc32(repr(list(members)).encode()):x}"
        self._subsets[group] += 1
        store = dist.PrefixStore(f"{group}/{self._subsets[group]}", self._store)
        return connect(store, rank, len(members), name, scope, self.devices)

    def outlive(self, store: dist.Store, timeout_s: float) -> None:
        """After connecting under a shorter limit: let subsets meet in this store, and collectives take so many seconds."""
        self._store = store
        self._group.torch_group._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Gloo closes its sockets when the last reference to the group goes."""
        _open.discard(self)
        del self._group

    def abort(self) -> None:
        """Keep the torch group until the process is gone: its destructor would wait for what is in flight.

        The reference is never given back, not even when the interpreter ends: two ranks that gave up one collective would then
        wait for one another.
        """
        _open.discard(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @override
    def leave_to_parent(self) -> None:
        """The destructor would wait for threads that a fork does not have."""
        self.abort()

    def _parts(self, block: torch.Tensor | None, part: torch.Tensor) -> list[torch.Tensor] | None:
        return None if block is None else list(block.view(self._group.size, part.numel()))


class _StorePost(StatusPost):
    """Lines in the store, and how many were written."""

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
    """Connect with the other ranks, who call it with the same store, size and name.

    Gloo's own limit holds for each of its steps, and not for connecting as a whole. So the ranks meet in the store first, which
    is where one that does not come is found, and Gloo connects on a thread that is left behind when the time is up. Ranks that
    know one another (`liveness`) do not meet before.

    Args:
        store: where they meet.
        rank: this one.
        size: how many there are.
        name: of the group.
        scope: for all of it.
        devices: what Gloo listens on, on this rank; by default on `interfaces`, or at an address that all ranks reach.
        liveness: of ranks that know one another.
        interfaces: see `ConnectRequest`.

    Raises:
        CollectiveTimeout: not all ranks came, or Gloo did not connect them in time.
        DisagreementError: the ranks were told different sizes.
        LaunchError: the hosts do not reach one another.
        RankLostError: a rank ended while they connected.
        TransportError: Gloo failed.
    """
    place = f"Gloo could not connect rank {rank} of {size} in group '{name}'"
    ours = dist.PrefixStore(name, store)
    try:
        known = liveness
        if known is None:
            met = meet(FromTorchStore(ours), rank, size, scope)
            known = Liveness(met.processes, rank)
            devices = devices or _devices(FromTorchStore(ours), met, rank, size, interfaces, scope)
        gloo = _connect_patiently(partial(_connected, ours, rank, size, scope.timeout_s, devices), known, scope, devices)
    except (MisuseError, DisagreementError):
        raise
    except SynclineError as error:
        raise error.reworded(f"{place}: {error}") from error.__cause__
    except TimeoutError as error:
        raise CollectiveTimeout(f"{place} within {scope.timeout_s:g} s (timeout): {error}") from error
    return GlooTransport(TorchGroup(gloo, name=name, timeout_s=scope.timeout_s), store, devices, liveness=known)


def _devices(store: Store, met: Met, rank: int, size: int, interfaces: Sequence[str], scope: CancelScope) -> Devices:
    """What this rank lets Gloo listen on, so that all others reach it."""
    if interfaces:
        (own_addresses if met.share_loopback else addresses_for_others)(interfaces)  # what is wrong with them is said here
        return tuple({"interface": name} for name in interfaces)
    if size == 1 or met.share_loopback:
        return _at(LOOPBACK)
    return _at(address_by_store(store, rank, size, interfaces, scope))


def _at(address: str) -> Devices:
    return ({"hostname": address},)


def _connect_patiently(connect: Callable[[], Any], liveness: Liveness, scope: CancelScope, devices: Devices) -> Any:
    patience = CancelScope(scope.remaining_s(), liveness.reason_to_give_up)
    mine = ", ".join(value for device in devices for value in device.values())
    try:
        return DetachedCall(connect, "syncline-gloo-connect").wait(
            patience,
            _FIRST_LOOK_S,
            f"it takes too long, though all ranks have come; this rank is to be reached at {mine}. Choose the interface "
            f"with {INTERFACE_VARIABLE}, or `interface` in the site file, or let the firewall pass connections",
        )
    except (SynclineError, TimeoutError):
        raise
    except RuntimeError as error:
        raise (liveness.loss_behind(error) or TransportError(str(error))) from error


def _connected(store: dist.Store, rank: int, size: int, timeout_s: float, devices: Devices) -> Any:
    made = [dist.ProcessGroupGloo.create_device(**device) for device in devices]
    return dist.ProcessGroupGloo(store, rank, size, gloo_options(timedelta(seconds=timeout_s), made))


def _tag(tag: int, tensor: torch.Tensor) -> int:
    """Gloo compares neither dtypes nor sizes, so only tensors of one dtype and size meet."""
    return sized_wire_tag(tag, tensor.dtype, tensor.numel(), _LARGEST_TAG)


def _wait(work: Work, scope: CancelScope) -> None:
    """Wait, and look now and then whether that is in vain."""
    assert isinstance(work, TorchWork)
    slice_s = _FIRST_LOOK_S
    try:
        while not work.wait_for(min(max(scope.remaining_s(), 1e-3), slice_s)):
            scope.check("Gloo does not say which ranks do not take part")
            slice_s = min(1.2 * slice_s, _LOOK_S)
    except CollectiveTimeout as error:
        raise TimeoutError(str(error)) from error


class GlooBackend(Backend):
    """Ranks are processes that find one another through a store."""

    @property
    @override
    def meets_in_store(self) -> bool:
        return True

    @property
    @override
    def serves_newcomers(self) -> bool:
        return True

    def missing(self) -> str | None:
        """Some builds of torch have no Gloo."""
        if dist.is_available() and dist.is_gloo_available():
            return None
        return "this build of torch has no Gloo; install one of torch's standard wheels"

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Rendezvous, then connect every rank with every other over TCP."""
        lack = self.missing()
        if lack is not None:
            raise BackendUnavailableError(f"backend 'gloo': {lack}")
        if request.joins:
            return _newcomer(request)
        own_addresses(request.interfaces)  # an interface that this host does not have is an error before anybody waits
        store, rank, size, address = meeting_place(request)
        if request.launch is not None and request.launch.is_mpi:
            # Once more, after MPI's own, hence before it: a process that MPI keeps at its end shall not keep its sockets.
            atexit.register(_hang_up)
        devices = () if address is None or request.interfaces else _at(address)
        store = _numbered(store)
        scope = CancelScope(request.timeout_s)
        transport = connect(store, rank, size, request.group_name, scope, devices, interfaces=request.interfaces)
        generation, lack = Generation(0, tuple(range(size)), rank), store_lack(request, size)
        if rank == 0 and admit_lack(request) is None:
            store.set(_HOST_0, json.dumps([loopback_domain(), *transport.devices[0].values()]))
        again = _connect_again(request, store, transport.devices)
        reconnector = GlooReconnector(store, generation, Job(size, _options(request)), again, lack, admit_lack(request))
        return _started(transport, reconnector, request)


def _newcomer(request: ConnectRequest) -> ShrinkableGroup:
    """A group of one, whose process waits until the members of a job let it in; they met in the store that it finds."""
    lack = admit_lack(request)
    if lack is not None:
        raise LaunchError(f"backend 'gloo': SYNCLINE_JOIN=1 says that this process joins a job that runs, but {lack}")
    if request.store is not None:
        met_in = as_torch_store(request.store)
    else:
        met_in = store_of_running_job(request.init_method or "", request.timeout_s)
    store = _numbered(met_in)
    again = _connect_again(request, store, _devices_of_newcomer(request, FromTorchStore(store)))
    reconnector = GlooReconnector.of_newcomer(store, _options(request), again, request.timeout_s)
    alone = connect(dist.HashStore(), 0, 1, request.group_name, CancelScope(request.timeout_s))
    return _started(alone, reconnector, request)


def _devices_of_newcomer(request: ConnectRequest, store: Store) -> Devices:
    """What a process that comes later lets Gloo listen on: the address from which it reaches that of rank 0."""
    if request.interfaces:
        own_addresses(request.interfaces)
        return tuple({"interface": name} for name in request.interfaces)
    domain, address = json.loads(store.get(_HOST_0, request.timeout_s))
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
        again.outlive(dist.PrefixStore(f"{generation.prefix}/subsets", store), request.timeout_s)
        return again

    return connect_again


def _numbered(store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"syncline/{next(_generations)}", store)


@atexit.register
def _hang_up() -> None:
    """Close the connections of all groups, so that ranks that wait for this one fail, as when the process is gone.

    Note [Leaving while Gloo's thread drops a work]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A collective is over before Gloo's own thread has dropped its work, and with it perhaps the last reference to a tensor. On a
    busy machine the program may end in between. That thread then finds no interpreter to drop the tensor with, and aborts the
    process ("terminate called without an active exception"). To close a group waits for its threads, so it is done while there
    is an interpreter; but not while something is in flight, for which closing would wait as long as for the time limit.
    """
    finish_all()
    for transport in list(_open) if all_idle() else []:
        transport.close()


backend = GlooBackend()
