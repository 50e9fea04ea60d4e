"""A process group of torch.distributed as a Syncline `ProcessGroup`."""

from __future__ import annotations

import functools
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
from ..reduce_op import ReduceOp
from ..tensors.layout import flat, in_one_block, in_plain_order, pack, unpack
from ..torch_internals import timeout_of
from ..work import Work
from .torch_calls import TorchCalls
from .torch_work import TorchRequest, TorchWork

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend as TorchBackend  # the base of ProcessGroupGloo

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
        self._calls = TorchCalls(torch_group)
        self.torch_group = self._calls.torch_group
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

        def compare() -> None:
            if numbers[0] != -numbers[1]:
                # All ranks see the same two numbers, so all of them take part in this all-gather.
                said = all_gather_bytes(marks.encode(), group=self)
                raise different_calls(Statements.of([f"calls with the marks: {text.decode()}" for text in said]))

        work = TorchWork([], self._calls.all_reduce(numbers, ReduceOp.MAX), compare, self.torch_group)
        return self._waited(work, async_op)

    # ---- calls ----

    @override
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        self._refuse_in_fork(signature.name)
        return self._waited(self._started(signature, reads, writes), async_op)

    def _started(self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Work:
        calls = self._calls
        is_root = signature.root == self.rank
        match signature.name:
            case "barrier":
                return calls.barrier()
            case "all_reduce":
                return calls.all_reduce(writes[0], signature.reduction)
            case "reduce":
                return calls.reduce(writes[0], signature.root_rank, signature.reduction)
            case "reduce_scatter":
                return calls.reduce_scatter(writes[0], in_one_block(reads), signature.reduction)
            case "reduce_scatter_tensor":
                return calls.reduce_scatter(writes[0], flat(in_plain_order(reads[0])), signature.reduction)
            case "broadcast":
                return calls.broadcast(writes[0], signature.root_rank)
            case "all_gather":
                return calls.all_gather(list(writes), reads[0])
            case "all_gather_into_tensor":
                return calls.all_gather_into_tensor(writes[0], reads[0])
            case "gather":
                return calls.gather(reads[0], list(writes) if is_root else None, signature.root_rank)
            case "scatter":
                return calls.scatter(writes[0], list(reads) if is_root else None, signature.root_rank)
            case "all_to_all" | "all_to_all_single":
                received, sent = pack(signature.name, reads, writes, self.size)
                assert sent is not None
                assert signature.splits is not None
                exchange = calls.all_to_all(flat(received), flat(sent), *signature.splits)
                outputs = list(writes)
                deliver = functools.partial(unpack, signature.name, received, sent, outputs)
                return TorchWork(outputs, exchange, deliver, self.torch_group)
        raise AssertionError(f"no collective {signature.name}")

    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work:
        self._refuse_in_fork("send")
        return self._transfer(self._calls.start_send(in_plain_order(tensor), dst, tag), tensor, lambda: None, async_op)

    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work:
        self._refuse_in_fork("recv")
        wire = in_plain_order(tensor)
        deliver = (lambda: None) if wire is tensor else (lambda: tensor.copy_(wire))
        return self._transfer(self._calls.start_recv(wire, src, tag), tensor, deliver, async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        raise InvalidArgumentError(
            f"split on {self.place()}: this group belongs to torch.distributed; make the new one there "
            "(torch.distributed.new_group) and wrap it in TorchGroup"
        )

    def _refuse_in_fork(self, call: str) -> None:
        if self._fork_count != fork_count():
            raise not_the_rank(call, self.place())

    def _transfer(self, request: TorchRequest, tensor: torch.Tensor, deliver: Callable[[], Any], async_op: bool) -> Work:
        place = lambda: f"a transfer on {self.place()}"  # noqa: E731
        return self._waited(TransferWork(request, [tensor], deliver, place, self.timeout_s), async_op)

    def _waited(self, work: Work, async_op: bool) -> Work:
        if not async_op:
            work.wait(self.timeout_s)
        return work
