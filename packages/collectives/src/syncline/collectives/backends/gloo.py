"""Gloo, the default that is embedded in torch: torch's own group, put into one total order."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..composed.torch_group import TorchGroup
from ..contract.collective import Collective
from ..contract.deadline import Deadline
from ..contract.reduce_op import HALVES, Reduction
from ..contract.work import Work
from ..errors import BackendUnavailableError, CollectiveTimeout, LaunchError, TransportError
from ..host.host_group import HostGroup
from ..host.progress import finish_all
from ..host.transport import Request, Transport
from ..host.wire_tag import sized_wire_tag
from ..startup.backend import Backend, ConnectRequest
from ..startup.registry import load_backend
from ..startup.rendezvous import loopback_host, store_at, tcp_store_of_rank_0
from ..stores import AsTorchStore, Store

# The store may outlive a group (torchrun's does), so every connection writes under a number of its own; all ranks connect
# equally often.
_generations = itertools.count()
# Below it two collectives take longer than one of twice the bytes.
_SCATTER_HALVES_FROM_BYTES = 64 * 1024
_LARGEST_TAG = 2**31 - 1
_abandoned: list[TorchGroup] = []
_open: weakref.WeakSet[GlooTransport] = weakref.WeakSet()


class GlooTransport(Transport):
    """Blocking collectives of a torch Gloo group.

    Args:
        group: the torch group.
        store: where subsets of its ranks find one another.
        host: whose address alone Gloo shall use; None for its choice.
    """

    backend_name = "gloo"

    def __init__(self, group: TorchGroup, store: dist.Store, host: str | None = None) -> None:
        self._group = group
        self._store = store
        self._host = host
        _open.add(self)

    def describe(self) -> str:
        """Gloo's version is torch's."""
        return f"gloo of torch {torch.__version__}"

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """Gloo's ring; halves of some size as a reduce-scatter and an all-gather, which move two bytes for each."""
        if tensor.dtype not in HALVES or self._group.size == 1 or tensor.nbytes < _SCATTER_HALVES_FROM_BYTES:
            _wait(self._group.all_reduce(tensor, op, async_op=True), deadline)
            return
        padded = torch.nn.functional.pad(tensor, (0, -tensor.numel() % self._group.size))
        part = torch.empty_like(padded.view(self._group.size, -1)[0])
        _wait(self._group.reduce_scatter_tensor(part, padded, op, async_op=True), deadline)
        _wait(self._group.all_gather_into_tensor(padded, part, async_op=True), deadline)
        tensor.copy_(padded[: tensor.numel()])

    def reduce(self, tensor: torch.Tensor, root: int, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """An all_reduce of a copy."""
        _wait(self._group.reduce(tensor, root, op, async_op=True), deadline)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """Gloo's broadcast of bytes."""
        _wait(self._group.broadcast(tensor, root, async_op=True), deadline)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """Gloo's all-gather of bytes."""
        _wait(self._group.all_gather_into_tensor(block, tensor, async_op=True), deadline)

    def gather(self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Collective, deadline: Deadline) -> None:
        """Gloo's gather of bytes."""
        _wait(self._group.gather(tensor, self._parts(block, tensor), root, async_op=True), deadline)

    def scatter(
        self, tensor: torch.Tensor, block: torch.Tensor | None, root: int, call: Collective, deadline: Deadline
    ) -> None:
        """Gloo's scatter of bytes."""
        _wait(self._group.scatter(tensor, self._parts(block, tensor), root, async_op=True), deadline)

    def reduce_scatter(
        self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        """An all-to-all of bytes, then a reduction in rank order."""
        _wait(self._group.reduce_scatter_tensor(tensor, block, op, async_op=True), deadline)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        call: Collective,
        deadline: Deadline,
    ) -> None:
        """Gloo's all-to-all of bytes."""
        _wait(self._group.all_to_all_single(output, tensor, output_counts, input_counts, async_op=True), deadline)

    @override
    def barrier(self, call: Collective, deadline: Deadline) -> None:
        _wait(self._group.barrier(async_op=True), deadline)

    @override
    def start_send(self, tensor: torch.Tensor, dst: int, tag: int) -> Request:
        return self._group.start_send(tensor, dst, _tag(tag, tensor))

    @override
    def start_recv(self, tensor: torch.Tensor, src: int | None, tag: int) -> Request:
        return self._group.start_recv(tensor, src, _tag(tag, tensor))

    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """Another Gloo group, which meets in the same store under its own name."""
        rank = list(members).index(self._group.rank)
        return connect(self._store, rank, len(members), name, max(deadline.remaining_s(), 1.0), self._host)

    def close(self) -> None:
        """Gloo closes its sockets when the last reference to the group goes."""
        _open.discard(self)
        del self._group

    def abort(self) -> None:
        """Keep the torch group for the rest of the process: its destructor would wait for what is in flight."""
        _open.discard(self)
        _abandoned.append(self._group)

    def _parts(self, block: torch.Tensor | None, part: torch.Tensor) -> list[torch.Tensor] | None:
        return None if block is None else list(block.view(self._group.size, part.numel()))


def connect(store: dist.Store, rank: int, size: int, name: str, timeout_s: float, host: str | None = None) -> GlooTransport:
    """Connect with the other ranks, who call it with the same store, size and name; over one address of a host, or Gloo's."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._timeout = timedelta(seconds=timeout_s)
    try:
        options._devices = [_device(host)]
        gloo = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
    except RuntimeError as error:
        raise TransportError(f"Gloo could not connect rank {rank} of {size} in group '{name}': {error}") from error
    return GlooTransport(TorchGroup(gloo, name=name, timeout_s=timeout_s), store, host)


def _tag(tag: int, tensor: torch.Tensor) -> int:
    """Gloo compares neither dtypes nor sizes, so only tensors of one dtype and size meet."""
    return sized_wire_tag(tag, tensor.dtype, tensor.numel(), _LARGEST_TAG)


def _device(host: str | None) -> Any:
    gloo = dist.ProcessGroupGloo
    return gloo.create_default_device() if host is None else gloo.create_device(hostname=host)


def _wait(work: Work, deadline: Deadline) -> None:
    try:
        work.wait(max(deadline.remaining_s(), 1e-3))
    except CollectiveTimeout as error:
        raise TimeoutError(str(error)) from error


class GlooBackend(Backend):
    """Ranks are processes that find one another through a store."""

    @property
    @override
    def meets_in_store(self) -> bool:
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
        store, rank, size = rendezvous(request)
        store = dist.PrefixStore(f"syncline/{next(_generations)}", store)
        transport = connect(store, rank, size, request.group_name, request.timeout_s, _only_host(request, size))
        group = HostGroup(
            transport,
            rank,
            size,
            name=request.group_name,
            timeout_s=request.timeout_s,
            check_calls=request.check_calls,
        )
        group.start({"check_calls": request.check_calls, "reproducible": request.reproducible})
        return group


def rendezvous(request: ConnectRequest) -> tuple[dist.Store, int, int]:
    """A store that all ranks share, this process's rank, and the number of ranks."""
    rank, size = _place(request)
    return _shared_store(request, rank, size), rank, size


def _shared_store(request: ConnectRequest, rank: int, size: int) -> dist.Store:
    if request.store is not None:
        return AsTorchStore(request.store) if isinstance(request.store, Store) else request.store
    if request.init_method is not None:
        return store_at(request.init_method, rank, size, request.timeout_s)
    if size == 1:
        return dist.HashStore()
    lack = None
    if request.launch is not None and request.launch.is_mpi:
        lack = load_backend("mpi").missing()
        if lack is None:
            return _over_mpi(request)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return store_at("env://", rank, size, request.timeout_s)
    raise LaunchError(
        f"backend 'gloo' has {size} ranks and no way for them to meet: expected an init_method (such as "
        "'file:///shared/folder' or 'tcp://host:port?secret_file=PATH'), a store, MASTER_ADDR and MASTER_PORT as torchrun sets "
        f"them, or a launch by MPI{'' if lack is None else f'; MPI launched this job, but cannot be used: {lack}'}"
    )


def _only_host(request: ConnectRequest, size: int) -> str | None:
    """The loopback address, if the ranks meet there."""
    if size == 1 or request.store is not None or (request.launch is not None and request.launch.is_mpi):
        return None
    if request.init_method is not None:
        return loopback_host(request.init_method)
    return loopback_host("env://") if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ else None


def _place(request: ConnectRequest) -> tuple[int, int]:
    launch = request.launch
    if launch is None:
        if request.world_size is None:
            return 0, 1
        if request.rank is None:
            raise LaunchError(f"world_size={request.world_size} was given without a rank, and nothing launched this process")
        if request.rank >= request.world_size:
            raise LaunchError(f"expected a rank in 0..{request.world_size - 1} for that world_size, found {request.rank}")
        return request.rank, request.world_size
    if launch.world_size is None and request.world_size is None:
        raise LaunchError(f"{launch.launcher} does not say how many processes there are; give world_size, or use backend 'mpi'")
    for what, asked, told in (
        ("world_size", request.world_size, launch.world_size),
        ("rank", request.rank, launch.rank),
    ):
        if asked is not None and told is not None and asked != told:
            raise LaunchError(
                f"{what}={asked} was asked for, but {launch.launcher} says {told}; leave {what} out, or launch differently"
            )
    return launch.rank, launch.world_size or request.world_size or 1


def _over_mpi(request: ConnectRequest) -> dist.Store:
    """A store on a port that the system chose; MPI tells the others where it is."""
    mpi = load_backend("mpi").connect(request)
    try:
        return tcp_store_of_rank_0(mpi, request.timeout_s)
    finally:
        mpi.close()
        # After MPI's own, hence before it: a process that MPI keeps at its end shall not keep its sockets.
        atexit.register(_hang_up)


def _hang_up() -> None:
    """Close the connections of all groups, so that ranks that wait for this one fail, as when the process is gone."""
    finish_all()
    for transport in list(_open):
        transport.close()


backend = GlooBackend()
