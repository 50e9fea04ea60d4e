"""A process group of torch.distributed as a Syncline `ProcessGroup`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from typing_extensions import override

from ..api.object_exchange import all_gather_bytes
from ..engine.call import Signature
from ..engine.cancel_scope import DEFAULT_TIMEOUT_S
from ..engine.transfer import TransferWork
from ..errors import InvalidArgumentError, MisuseError
from ..forks import fork_count, not_the_rank
from ..group import ProcessGroup
from ..health.statements import Statements, different_calls
from ..reduce_op import BOOL, HALVES, PremulSum, ReduceOp, Reduction, divide
from ..tensors.layout import bytes_of, flat, in_one_block, in_plain_order, pack, unpack, untracked
from ..tensors.reduction import core_op, reduce_in_rank_order
from ..torch_internals import timeout_of
from ..work import Work
from .torch_work import TorchRequest, TorchWork, mapped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as TorchBackend  # the base of ProcessGroupGloo

_TORCH_OP: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}

# Dtypes that torch's CPU groups must reduce as another dtype. Halves become float32, so that sums are rounded once. Gloo does
# not have int16 and bool.
_REDUCED_AS = {torch.int16: torch.int32, **dict.fromkeys(HALVES, torch.float32), **dict.fromkeys(BOOL, torch.uint8)}

# With fewer ranks than this, each rank sends its halves to every other rank: with p ranks, 2 (p - 1) bytes for each element.
# A ring of float32 would send more, 8 (p - 1) / p bytes.
_RING_FROM_RANKS = 4

# An error shows at most this many marks of each rank.
_MOST_MARKS = 16

# For each group of torch, the number of forks before this module first saw the group. A forked child inherits this dictionary,
# so a `TorchGroup` that the child makes for a group of its parent refuses calls, too. See Note [Forks] in `forks`.
_fork_counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def as_process_group(torch_group: dist.ProcessGroup | None) -> ProcessGroup:
    """Return a Syncline group for a group of torch.distributed, so that Syncline's functions can use the torch group.

    If the torch group has one of Syncline's backends (see `torch_backend`), the result is the Syncline group that carries out
    the torch group's calls. Otherwise the result is a new `TorchGroup`. Its time limit is that of the torch group, but at
    least 30 minutes. If the torch group has a shorter limit, torch itself ends a call at this limit.

    Args:
        torch_group: a group of torch.distributed; None means torch's default group.

    Raises:
        MisuseError: torch has no default group, or this rank is not in the group.
        InvalidArgumentError: `torch_group` is not a group.
    """
    if torch_group is None:
        torch_group = dist.group.WORLD
        if torch_group is None:
            raise MisuseError("torch.distributed has no default group; call torch.distributed.init_process_group first")
    # `torch.distributed.new_group` returns this object on ranks that are not in the group.
    if torch_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]  # not in torch's types
        raise MisuseError("this rank is not in the group of torch.distributed; call collectives only on the group's ranks")
    if not hasattr(torch_group, "rank") or not hasattr(torch_group, "size"):
        raise InvalidArgumentError(f"expected a group of torch.distributed, found {type(torch_group).__name__}")
    ours = getattr(torch_group, "syncline_group", None)
    if isinstance(ours, ProcessGroup):
        return ours
    # Let torch itself apply a shorter limit, because torch does not count the time that a call waits behind earlier calls.
    return TorchGroup(torch_group, timeout_s=max(timeout_of(torch_group), DEFAULT_TIMEOUT_S))


def _ranks_in_default_group(torch_group: Any) -> list[int] | None:
    """Return the ranks of the group's members in torch's default group; None if torch.distributed does not know the group."""
    try:
        return dist.get_process_group_ranks(torch_group)
    except (KeyError, ValueError):  # a backend, or a group that the program made without `new_group`
        return None


class TorchGroup(ProcessGroup):
    """A torch.distributed group as a Syncline group. Each collective is issued at once, on the caller's thread.

    If a callback of a work's future issues a collective, this collective has no defined order relative to collectives of other
    threads. Closing this group does not close the torch group.

    Args:
        torch_group: a group of torch.distributed, or a `Backend` object of torch.
        name: the group's name in error messages.
        timeout_s: the time limit of a call with `async_op=False`, and of a send or receive, in seconds.
    """

    def __init__(
        self, torch_group: dist.ProcessGroup | TorchBackend, *, name: str = "torch", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        ranks = _ranks_in_default_group(torch_group)
        super().__init__(torch_group.rank(), torch_group.size(), name=name, timeout_s=timeout_s, ranks=ranks)
        self.torch_group = torch_group  # typed as Any: the stub of Backend has no collectives
        served = getattr(torch_group, "_device_types", None)  # a backend has no such attribute
        self._device_types = frozenset({"cpu", "cuda"} if served is None else (device.type for device in served))
        self._fork_count = _fork_counts.setdefault(torch_group, fork_count())
        self._marks_digest = 0
        self._new_marks: list[str] = []  # the first marks since the last comparison, for the error

    @property
    @override
    def has_total_order(self) -> bool:
        return False

    @property
    @override
    def can_split(self) -> bool:
        return False

    @property
    def backend_name(self) -> str:
        """The name "torch"."""
        return "torch"

    @property
    def device_types(self) -> frozenset[str]:
        """The types of device on which the torch group accepts tensors.

        If `torch_group` is a `Backend` object of torch, these are CPU and CUDA.
        """
        return self._device_types

    @property
    def profiled_as(self) -> None:
        """None, because torch itself shows the calls in its profile."""

    def describe(self) -> str:
        """Return the name of the torch group's backend, and torch's version."""
        return f"torch.distributed {self.torch_group.name()} of torch {torch.__version__}"

    def close(self) -> None:
        """Do nothing: the torch group belongs to its creator."""

    def abort(self) -> None:
        """Do nothing: the torch group belongs to its creator."""

    # ---- agreement ----

    @contextmanager
    @override
    def marked(self, mark: str) -> Iterator[None]:
        """Return a context manager that sets a mark, a text about the part of the program that runs. See `ProcessGroup.marked`.

        In this class, `agree_on_calls` compares only the marks of the ranks, not their calls.
        """
        if len(self._new_marks) < _MOST_MARKS:
            self._new_marks.append(mark)
        self._marks_digest = crc32(f"{mark}\n".encode(), self._marks_digest)
        yield

    @override
    def agree_on_calls(self, *, async_op: bool = False) -> Work | None:
        """Check that all ranks have set the same marks (see `marked`) in the same order. All ranks call this method.

        If there are no new marks since the last check, or the group does not serve the CPU, the method checks nothing and
        returns None.

        Cost: an all_reduce of 16 bytes.

        Raises:
            DisagreementError: the marks differ. All ranks raise this error; with `async_op=True`, the work's `wait` raises it.
        """
        if self.size == 1 or not self._new_marks or "cpu" not in self._device_types:
            return None
        self._refuse_in_fork("agree_on_calls")
        marks, digest = ", ".join(self._new_marks), self._marks_digest
        self._new_marks.clear()
        # One reduction by MAX gives both the largest and the smallest digest, because the second number is negated.
        numbers = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OP[ReduceOp.MAX]

        def compare() -> None:
            if numbers[0] != -numbers[1]:
                # All ranks see the same two numbers, so all of them take part in this all-gather.
                said = all_gather_bytes(marks.encode(), group=self)
                raise different_calls(Statements.of([f"calls with the marks: {text.decode()}" for text in said]))

        return self._work([], self.torch_group.allreduce([numbers], options), compare, async_op)

    # ---- calls ----

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        self._refuse_in_fork(signature.name)
        is_root = signature.root == self.rank
        match signature.name:
            case "barrier":
                return self._work([], self.torch_group.barrier(dist.BarrierOptions()), None, async_op)
            case "all_reduce":
                return self._all_reduce(writes[0], signature.reduction, async_op)
            case "reduce":
                return self._reduce(writes[0], signature.root_rank, signature.reduction, async_op)
            case "reduce_scatter":
                return self._reduce_scatter(writes[0], in_one_block(reads), signature.reduction, async_op)
            case "reduce_scatter_tensor":
                return self._reduce_scatter(writes[0], flat(in_plain_order(reads[0])), signature.reduction, async_op)
            case "broadcast":
                return self._broadcast(writes[0], signature.root_rank, async_op)
            case "all_gather":
                return self._all_gather(list(writes), reads[0], async_op)
            case "all_gather_into_tensor":
                return self._all_gather_into_tensor(writes[0], reads[0], async_op)
            case "gather":
                return self._gather(reads[0], list(writes) if is_root else None, signature.root_rank, async_op)
            case "scatter":
                return self._scatter(writes[0], list(reads) if is_root else None, signature.root_rank, async_op)
            case "all_to_all" | "all_to_all_single":
                return self._all_to_all(signature, list(writes), reads, async_op)
        raise AssertionError(f"no collective {signature.name}")

    # ---- reductions ----

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        if self._swaps_cheaper(tensor):
            terms, torch_work = self._swapped(tensor)
            return self._work([tensor], torch_work, lambda: _reduce_flat(op, terms, tensor), async_op)
        # torch's own reduction would give a wrong result, so each rank gathers and reduces the tensors of all ranks.
        if not _torch_reduces(tensor, op):
            terms, torch_work = self._gathered(tensor)
            return self._work([tensor], torch_work, lambda: tensor.copy_(reduce_in_rank_order(op, terms)), async_op)
        wire = _reducible(tensor, op)
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OP[core_op(op)]
        torch_work = self.torch_group.allreduce([wire], options)
        return self._work([tensor], torch_work, lambda: self._deliver_reduced(wire, tensor, op), async_op)

    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work:
        # Reduce a copy, because a rank that is not the root must keep its tensor.
        copy = tensor.clone()
        return self._work([tensor], self._all_reduce(copy, op, async_op=True), self._on(root, tensor, copy), async_op)

    def _reduce_scatter(self, output: torch.Tensor, wire: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        terms = torch.empty_like(wire)
        counts = [output.numel()] * self.size

        def deliver() -> None:
            rows = terms.view(self.size, output.numel())
            output.copy_(reduce_in_rank_order(op, list(rows)).view(output.shape))

        return self._work([output], self._exchanged(terms, wire, counts, counts), deliver, async_op)

    # ---- moves ----

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        wire = in_plain_order(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        torch_work = self.torch_group.broadcast([bytes_of(wire)], options)
        return self._work([tensor], torch_work, None if wire is tensor else lambda: tensor.copy_(wire), async_op)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        gathered, torch_work = self._gathered(tensor)
        return self._work(outputs, torch_work, lambda: _copy_each(gathered, outputs), async_op)

    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work:
        gathered, torch_work = self._gathered(tensor)

        def deliver() -> None:
            output.copy_(torch.cat([row.view(-1) for row in gathered]).view(output.shape))

        return self._work([output], torch_work, deliver, async_op)

    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        wire = in_plain_order(tensor)
        gathered = [torch.empty_like(wire) for _ in outputs or ()]
        options = dist.GatherOptions()
        options.rootRank = root
        into = [[bytes_of(row) for row in gathered]] if outputs is not None else []
        torch_work = self.torch_group.gather(into, [bytes_of(wire)], options)
        return self._work(outputs or [], torch_work, lambda: _copy_each(gathered, outputs or []), async_op)

    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work:
        wire = in_plain_order(tensor)
        options = dist.ScatterOptions()
        options.rootRank = root
        source = [[bytes_of(in_plain_order(entry)) for entry in inputs]] if inputs is not None else []
        torch_work = self.torch_group.scatter([bytes_of(wire)], source, options)
        return self._work([tensor], torch_work, None if wire is tensor else lambda: tensor.copy_(wire), async_op)

    def _all_to_all(
        self, signature: Signature, outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        received, sent = pack(signature.name, inputs, outputs, self.size)
        assert sent is not None
        assert signature.splits is not None
        torch_work = self._exchanged(flat(received), flat(sent), *signature.splits)
        return self._work(outputs, torch_work, lambda: unpack(signature.name, received, sent, outputs), async_op)

    # ---- the rest ----

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        self._refuse_in_fork("send")
        return self._transfer(self.start_send(in_plain_order(tensor), dst, tag), tensor, lambda: None, async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        self._refuse_in_fork("recv")
        wire = in_plain_order(tensor)
        deliver = (lambda: None) if wire is tensor else (lambda: tensor.copy_(wire))
        return self._transfer(self.start_recv(wire, src, tag), tensor, deliver, async_op)

    def start_send(self, wire: torch.Tensor, dst: int, tag: int) -> TorchRequest:
        """Begin to send a contiguous tensor, and return the request. Only transports call this; other code calls `send`."""
        torch_work = _begun(lambda: self.torch_group.send([bytes_of(wire)], dst, tag))
        return TorchRequest(torch_work, wire, receives=False)

    def start_recv(self, wire: torch.Tensor, src: int | None, tag: int) -> TorchRequest:
        """Begin to receive a contiguous tensor, and return the request. Only transports call this; other code calls `recv`."""
        into = [bytes_of(wire)]
        group = self.torch_group
        torch_work = _begun(lambda: group.recv_anysource(into, tag) if src is None else group.recv(into, src, tag))
        return TorchRequest(torch_work, wire, receives=True, source=src)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        raise InvalidArgumentError(
            f"split on {self.place()}: this group belongs to torch.distributed; make the new one there "
            "(torch.distributed.new_group) and wrap it in TorchGroup"
        )

    # ---- shared ----

    def _refuse_in_fork(self, call: str) -> None:
        if self._fork_count != fork_count():
            raise not_the_rank(call, self.place())

    def _swaps_cheaper(self, tensor: torch.Tensor) -> bool:
        """Return whether a direct exchange of this 16-bit tensor moves fewer bytes than a ring all-reduce in float32."""
        # The ring sends `8 * (size - 1) / size` bytes for each element.
        return tensor.dtype in HALVES and tensor.device.type == "cpu" and 1 < self.size < _RING_FROM_RANKS

    def _gathered(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        wire = in_plain_order(tensor)
        gathered = [torch.empty_like(wire) for _ in range(self.size)]
        return gathered, self.torch_group.allgather([[bytes_of(row) for row in gathered]], [bytes_of(wire)])

    def _swapped(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Start an exchange that gives every rank all tensors. Return the flat tensors in rank order, and torch's work."""
        wire = in_plain_order(tensor).view(-1)
        received = wire.new_empty(self.size - 1, wire.numel())
        counts = [0 if rank == self.rank else wire.numel() for rank in range(self.size)]
        # With two ranks there is one receiver, so the tensor is sent without a copy.
        sent = wire if self.size == 2 else wire.repeat(self.size - 1)
        # torch copies less in this exchange than in its all-gather.
        torch_work = self._exchanged(received, sent, counts, counts)
        return [*received[: self.rank], wire, *received[self.rank :]], torch_work

    def _exchanged(
        self, received: torch.Tensor, sent: torch.Tensor, received_counts: Sequence[int], sent_counts: Sequence[int]
    ) -> Any:
        itemsize = sent.element_size()
        return self.torch_group.alltoall_base(
            bytes_of(received),
            bytes_of(sent),
            [count * itemsize for count in received_counts],
            [count * itemsize for count in sent_counts],
            dist.AllToAllOptions(),
        )

    def _deliver_reduced(self, wire: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> None:
        if op is ReduceOp.AVG:
            divide(wire, self.size)
        result = torch.view_as_complex(wire) if tensor.is_complex() else wire
        # Without a copy, `wire` is the program's tensor, and torch has put the result there already.
        if result.data_ptr() != tensor.data_ptr():
            tensor.copy_(result)

    def _on(self, root: int, tensor: torch.Tensor, copy: torch.Tensor) -> Callable[[], Any] | None:
        return (lambda: tensor.copy_(copy)) if self.rank == root else None

    def _work(self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work:
        work = TorchWork(tensors, torch_work, finish, self.torch_group)
        if not async_op:
            work.wait(self.timeout_s)
        return work

    def _transfer(self, request: TorchRequest, tensor: torch.Tensor, deliver: Callable[[], Any], async_op: bool) -> Work:
        work = TransferWork(request, [tensor], deliver, lambda: f"a transfer on {self.place()}", self.timeout_s)
        if not async_op:
            work.wait(self.timeout_s)
        return work


def _torch_reduces(tensor: torch.Tensor, op: Reduction) -> bool:
    # If an element is not-a-number, torch's MIN and MAX are wrong on some ranks.
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not tensor.is_floating_point()
    # torch reduces complex numbers as pairs of real numbers, which is wrong for PRODUCT.
    return op is not ReduceOp.PRODUCT or not tensor.is_complex()


def _reducible(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Return the tensor in a form that torch can reduce, multiplied by the factor of a `PremulSum`.

    The result shares the tensor's memory if the tensor is contiguous and torch reduces its dtype.
    """
    plain = in_plain_order(tensor)
    real = torch.view_as_real(plain) if tensor.is_complex() else plain
    wire = real.to(_REDUCED_AS.get(real.dtype, real.dtype))
    if isinstance(op, PremulSum):
        with untracked():  # `wire` may be the program's own tensor, which may require a gradient
            wire.mul_(op.factor)
    return wire


def _reduce_flat(op: Reduction, terms: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    into.copy_(reduce_in_rank_order(op, terms).view(into.shape))


def _begun(begin: Callable[[], Any]) -> Any:
    try:
        return begin()
    except RuntimeError as error:
        # Gloo raises if the connection to the other rank is broken.
        raise mapped(error) from error


def _copy_each(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
