"""One of our process groups seen as one of torch.distributed's."""

# Each method takes what several overloads of torch's take, and has its older name beside the newer one.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..contract.deadline import seconds
from ..contract.process_group import ProcessGroup
from ..contract.work import FinishedWork, Work
from ..default_group.coalescing import all_gather_coalesced, all_reduce_coalesced
from ..default_group.monitored_barrier import monitored_barrier
from ..errors import MisuseError
from ..torch_private import disable_dynamo
from .backend_shim import TorchBackendShim, UnservedDeviceError
from .options import listed, only, reduction_of, root_of, time_limit_s
from .works import CoalescedWork, TorchSideWork, profiled

Issue = Callable[[bool], Work]

# What a call that has finished returns: torch asks it for nothing but `wait`.
_FINISHED = TorchSideWork(FinishedWork([]))


class TorchProcessGroup(dist.ProcessGroup):
    """Hands every call to the group of ours underneath, `syncline_group`, with the options in our words.

    Note [A group that torch can hold]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    * torch's Python functions call these methods by their names here. C++ (the reducer of torch's DDP, functional
      collectives) calls some of them through pybind: those of `all_reduce`, `broadcast`, the gathers and scatters of lists and
      of coalesced tensors, `all_to_all_single`, `send`, `recv` and `barrier`; no other is reached from there.
    * Some have two names, as torch renamed them: `all_gather_single` was `_allgather_base`, and so on.
    * C++ keeps only its half of the object. torch's table of groups keeps this half, until the group is destroyed.
    * The base class keeps a group's name in its C++ backends, of which there are none here; hence `getGroupName` and the like,
      the names that C++ looks for.
    * `asyncOp` (absent from old versions) says that nobody will see the work: then the call ends when the collective has.
    """

    def __init__(self, ours: ProcessGroup, store: dist.Store, backend_name: str, *, on_close: Callable[[], None] | None = None):
        super().__init__(ours.rank, ours.size)  # type: ignore[call-arg]  # the one with a store is not for Python
        self.syncline_group = ours
        self._store = store
        self._backend_name = backend_name
        self._on_close = on_close
        self._group_name = ""
        self._group_description = "undefined"
        self._coalesced: list[Work] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self._group_name}' of {self.syncline_group!r}>"

    # ---- one tensor on each rank ----

    @disable_dynamo
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None) -> dist.Work:
        """Combine the tensors of all ranks, in place."""
        reduction = reduction_of(opts if op is None else op)
        mine = listed(tensors)
        if len(mine) != 1:
            return self.allreduce_coalesced(mine, opts if op is None else op)
        group, tensor = self.syncline_group, mine[0]
        return self._issue("all_reduce", lambda is_async: group.all_reduce(tensor, reduction, async_op=is_async), opts, timeout)

    @disable_dynamo
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        """Combine many tensors, in one collective for each dtype."""
        mine, reduction = list(tensors), reduction_of(opts)
        return self._issue("all_reduce_coalesced", lambda _: self._reduced_together(mine, reduction), opts)

    @disable_dynamo
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Copy the root's tensor to every rank."""
        group, tensor = self.syncline_group, only(listed(tensors), "tensor")
        source = root_of(opts) if root is None else root
        return self._issue("broadcast", lambda is_async: group.broadcast(tensor, source, async_op=is_async), opts, timeout)

    @disable_dynamo
    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Combine the tensors of all ranks on the root."""
        group, tensor = self.syncline_group, only(listed(tensors), "tensor")
        target = root_of(opts) if root is None else root
        reduction = reduction_of(op if isinstance(opts, int) or op is not None else opts)
        return self._issue("reduce", lambda is_async: group.reduce(tensor, target, reduction, async_op=is_async), opts, timeout)

    # ---- one tensor on one side, one for each rank on the other ----

    @disable_dynamo
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Give every rank the tensors of all ranks."""
        group, tensor = self.syncline_group, only(listed(input_tensors), "input")
        outputs = _rows(output_tensors)
        return self._issue("all_gather", lambda is_async: group.all_gather(outputs, tensor, async_op=is_async), opts, timeout)

    @disable_dynamo
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Give every rank the tensors of all ranks, in one tensor; the input may be a part of it."""
        group = self.syncline_group
        return self._issue(
            "_all_gather_base", lambda is_async: group.all_gather_into_tensor(output, input, async_op=is_async), opts
        )

    @disable_dynamo
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Give every rank the lists of tensors of all ranks."""

        def issue(_: bool) -> Work:
            return _there(all_gather_coalesced(output_lists, input_list, self.syncline_group, async_op=True))

        return self._issue("all_gather_coalesced", issue, opts)

    @disable_dynamo
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several `all_gather_single`."""
        group, pairs = self.syncline_group, list(zip(outputs, inputs, strict=True))

        def issue(_: bool) -> Work:
            return CoalescedWork([group.all_gather_into_tensor(into, tensor, async_op=True) for into, tensor in pairs])

        return self._issue("all_gather_into_tensor_coalesced", issue, opts)

    @disable_dynamo
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give the root the tensors of all ranks."""
        group, tensor = self.syncline_group, only(listed(input_tensors), "input")
        target = root_of(opts) if root is None else root
        outputs = _rows(output_tensors) if group.rank == target else None
        return self._issue("gather", lambda is_async: group.gather(tensor, outputs, target, async_op=is_async), opts, timeout)

    @disable_dynamo
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give each rank its tensor of the root's list."""
        group, tensor = self.syncline_group, only(listed(output_tensors), "output")
        source = root_of(opts) if root is None else root
        inputs = _rows(input_tensors) if group.rank == source else None
        return self._issue("scatter", lambda is_async: group.scatter(tensor, inputs, source, async_op=is_async), opts, timeout)

    @disable_dynamo
    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        """Combine the lists of all ranks, tensor by tensor, and give rank r the r-th result."""
        group, output = self.syncline_group, only(listed(output_tensors), "output")
        inputs, reduction = _rows(input_tensors), reduction_of(opts if op is None else op)
        return self._issue(
            "reduce_scatter",
            lambda is_async: group.reduce_scatter(output, inputs, reduction, async_op=is_async),
            opts,
            timeout,
        )

    @disable_dynamo
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Combine the tensors of all ranks and give rank r the r-th part of the result."""
        group, reduction = self.syncline_group, reduction_of(opts)
        return self._issue(
            "_reduce_scatter_base",
            lambda is_async: group.reduce_scatter_tensor(output, input, reduction, async_op=is_async),
            opts,
        )

    @disable_dynamo
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Several `reduce_scatter_single`."""
        group, reduction, pairs = self.syncline_group, reduction_of(opts), list(zip(outputs, inputs, strict=True))

        def issue(_: bool) -> Work:
            return CoalescedWork(
                [group.reduce_scatter_tensor(into, tensor, reduction, async_op=True) for into, tensor in pairs]
            )

        return self._issue("reduce_scatter_tensor_coalesced", issue, opts)

    # ---- one tensor for each rank on both sides ----

    @disable_dynamo
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send a part of the rows to each rank, and receive rows from each; without sizes the same number."""
        group, sizes = self.syncline_group, (output_split_sizes or None, input_split_sizes or None)
        return self._issue(
            "all_to_all",
            lambda is_async: group.all_to_all_single(output, input, *sizes, async_op=is_async),
            opts,
            timeout,
        )

    @disable_dynamo
    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Send a tensor to each rank and receive one from each."""
        group = self.syncline_group
        return self._issue(
            "all_to_all", lambda is_async: group.all_to_all(output_tensors, input_tensors, async_op=is_async), opts, timeout
        )

    # ---- two ranks ----

    @disable_dynamo
    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to one rank."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("send", lambda _: group.send(tensor, dst, tag, async_op=True))

    @disable_dynamo
    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from one rank."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("recv", lambda _: group.recv(tensor, src, tag, async_op=True))

    @disable_dynamo
    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from any rank; the work's `source_rank` says from which."""
        group, tensor = self.syncline_group, only(tensors, "tensor")
        return self._issue("recvAnySource", lambda _: group.recv(tensor, None, tag, async_op=True))

    # ---- no tensor ----

    @disable_dynamo
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Return on any rank only after all ranks have called it."""
        group = self.syncline_group
        return self._issue("barrier", lambda is_async: group.barrier(async_op=is_async), opts, timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that do not come."""
        limit_s = time_limit_s(timeout)
        monitored_barrier(self.syncline_group, limit_s, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        """From here on, what is issued is one work for whoever waits. It is issued at once all the same."""
        if self._coalesced is not None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} was started before; end that first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """The work of all that was issued since `_start_coalescing`."""
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} ends, but was not started")
        return TorchSideWork(CoalescedWork(works))

    # ---- other groups ----

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> TorchProcessGroup | None:
        """A group of some ranks of this one; None on the others. Only the new group's members need call it."""
        if self.rank() not in new_ranks:
            return None
        limit_s = time_limit_s(timeout) or time_limit_s(getattr(opts, "_timeout", None))
        name = group_name or f"{self._group_name}/{','.join(map(str, new_ranks))}"
        part = self.syncline_group.subset(list(new_ranks), name, timeout_s=limit_s)
        made = TorchProcessGroup(part, dist.PrefixStore(f"{name}/", self._store), self._backend_name)
        made.setGroupName(name)
        made.setGroupDesc(group_desc or "undefined")
        return made

    # ---- what torch asks a group ----

    @disable_dynamo
    def name(self) -> str:
        """The name under which the backend is registered."""
        return self._backend_name

    getBackendName = _get_backend_name = name  # noqa: N815 - the name that C++ looks for

    @disable_dynamo
    def getGroupName(self) -> str:  # noqa: N802 - the name that C++ looks for
        """Torch's name for this group, unique among the groups of a job."""
        return self._group_name

    @disable_dynamo
    def setGroupName(self, name: str) -> None:  # noqa: N802 - the name that C++ looks for
        """Torch's name for this group."""
        self._group_name = name

    @disable_dynamo
    def getGroupDesc(self) -> str:  # noqa: N802 - the name that C++ looks for
        """What its maker said of it."""
        return self._group_description

    @disable_dynamo
    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - the name that C++ looks for
        """What its maker says of it."""
        self._group_description = desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in sorted(self.syncline_group.device_types)]

    def _get_backend(self, device: torch.device | str) -> TorchBackendShim:
        kind = torch.device(device).type
        if kind not in self.syncline_group.device_types:
            served = ", ".join(sorted(self.syncline_group.device_types))
            raise UnservedDeviceError(f"backend '{self._backend_name}' serves tensors on {served}, not on {kind}")
        return TorchBackendShim(self)

    def get_group_store(self) -> dist.Store:
        """Where the ranks of this group may meet."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take from now on."""
        self.syncline_group.set_timeout(seconds(timeout))

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: our groups count from 0 on every rank."""

    # ---- the end ----

    def shutdown(self) -> None:
        """Finish what was issued and close. All ranks call it; `destroy_process_group` does.

        While an exception is on its way through, nothing is waited for, as the other ranks may not come.
        """
        if sys.exc_info()[0] is not None:
            self.abort()
            return
        try:
            self.syncline_group.close()
        finally:
            self._closed()

    def abort(self) -> None:
        """Give up without waiting for anything in flight."""
        self.syncline_group.abort()
        self._closed()

    def _closed(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    # ---- shared ----

    def _issue(self, title: str, issue: Issue, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, timedelta):  # in the place of the options, as some of torch's forms have it
            opts, timeout = None, opts
        is_async = getattr(opts, "asyncOp", True)
        limit_s = time_limit_s(getattr(opts, "timeout", None) if timeout is None else timeout)
        starts_only = is_async or limit_s is not None or self._coalesced is not None
        if torch._C._autograd._profiler_enabled():
            work = profiled(f"{self._backend_name}:{title}", lambda: issue(starts_only), is_async=starts_only)
        else:
            work = issue(starts_only)
        if self._coalesced is not None:
            self._coalesced.append(work)
            return TorchSideWork(work, limit_s)
        if is_async:
            return TorchSideWork(work, limit_s)
        work.wait(limit_s)
        return _FINISHED

    def _reduced_together(self, tensors: list[torch.Tensor], reduction: Any) -> Work:
        return _there(all_reduce_coalesced(tensors, reduction, self.syncline_group, async_op=True))

    # What torch called them before it renamed them, and C++ calls still.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _rows(tensors: Any) -> list[torch.Tensor]:
    """The tensors for all ranks, from a list of them or a list of such lists for several devices."""
    rows = only(tensors, "list of tensors") if isinstance(tensors[0], (list, tuple)) else tensors
    return list(rows)


def _there(work: Work | None) -> Work:
    assert work is not None  # it was asked for
    return work
