"""Any torch.distributed process group seen as one of ours."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend  # the base of ProcessGroupGloo; torch.distributed hides it

from .deadline import DEFAULT_TIMEOUT_S, seconds
from .errors import CollectiveTimeout, TransportError
from .layout import bytes_of, in_plain_order
from .process_group import ProcessGroup
from .reduce_op import BOOL, COMPLEX, HALVES, ReduceOp
from .reduction import reduce_in_rank_order
from .work import TensorsFuture, Work

_TORCH_OP: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}

# What torch's CPU groups reduce only in another dtype: halves to round once, int16 and bool because Gloo has neither.
_REDUCED_AS = {torch.int16: torch.int32, **dict.fromkeys(HALVES, torch.float32), **dict.fromkeys(BOOL, torch.uint8)}


class TorchGroup(ProcessGroup):
    """Issues each collective at once, on the caller's thread, on a torch.distributed group.

    The order of collectives is therefore torch's: the order of the calls. A collective that is issued from a future's
    callback has no defined place among those of other threads; `GlooBackend` puts `HostGroup` around this class to give it
    one. Closing it leaves the torch group alone, which belongs to whoever made it.
    """

    def __init__(
        self, torch_group: dist.ProcessGroup | TorchBackend, *, name: str = "torch", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        super().__init__(torch_group.rank(), torch_group.size(), name=name, timeout_s=timeout_s)
        self.torch_group: Any = torch_group  # the stub of Backend has no collectives

    @property
    def backend_name(self) -> str:
        """The name "torch"."""
        return "torch"

    @property
    def device_types(self) -> frozenset[str]:
        """All that torch may serve; the torch group itself refuses those that it does not."""
        return frozenset({"cpu", "cuda"})

    def describe(self) -> str:
        """The torch group's own name and torch's version."""
        return f"torch.distributed {self.torch_group.name()} of torch {torch.__version__}"

    def close(self) -> None:
        """Nothing: the torch group is its maker's."""

    def abort(self) -> None:
        """Nothing: the torch group is its maker's."""

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work:
        if tensor.dtype in COMPLEX and op is ReduceOp.PRODUCT:
            return self._all_reduce_here(tensor, op, async_op)
        plain = tensor.resolve_conj().resolve_neg()
        source = torch.view_as_real(plain) if tensor.dtype in COMPLEX else plain
        wire = source.to(_REDUCED_AS.get(source.dtype, source.dtype)).contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = _TORCH_OP[op]

        def finish() -> None:
            if op is ReduceOp.AVG:
                wire.div_(self.size)
            if wire is not source:
                source.copy_(wire)
            if plain is not tensor:
                tensor.copy_(plain)

        must_finish = op is ReduceOp.AVG or wire is not source or plain is not tensor
        return self._work([tensor], self.torch_group.allreduce([wire], options), finish if must_finish else None, async_op)

    def _all_reduce_here(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work:
        terms, torch_work = self._gather(tensor)
        return self._work([tensor], torch_work, lambda: tensor.copy_(reduce_in_rank_order(op, terms)), async_op)

    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work:
        wire = in_plain_order(tensor)
        options = dist.BroadcastOptions()
        options.rootRank = root
        torch_work = self.torch_group.broadcast([bytes_of(wire)], options)
        return self._work([tensor], torch_work, None if wire is tensor else lambda: tensor.copy_(wire), async_op)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work:
        gathered, torch_work = self._gather(tensor)

        def finish() -> None:
            for output, row in zip(outputs, gathered, strict=True):
                output.copy_(row)

        return self._work(outputs, torch_work, finish, async_op)

    def _barrier(self, async_op: bool) -> Work:
        return self._work([], self.torch_group.barrier(dist.BarrierOptions()), None, async_op)

    def _gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        wire = in_plain_order(tensor)
        gathered = [torch.empty_like(wire) for _ in range(self.size)]
        as_bytes = [bytes_of(row) for row in gathered]
        return gathered, self.torch_group.allgather([as_bytes], [bytes_of(wire)])

    def _work(self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work:
        work = TorchWork(tensors, torch_work, finish, self.place())
        if not async_op:
            work.wait(self.timeout_s)
        return work


class TorchWork(Work):
    """A torch.distributed work, and what remains to be done when it has finished."""

    def __init__(self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None, place: str) -> None:
        self._tensors = tensors
        self._torch_work = torch_work
        self._place = place

        def deliver(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            done.value()
            if finish is not None:
                with torch.no_grad():
                    finish()
            return tensors

        self._future: TensorsFuture = torch_work.get_future().then(deliver)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until finished; see `Work.wait`."""
        try:
            if timeout is not None:
                self._torch_work.wait(timedelta(seconds=seconds(timeout)))
            self._future.wait()
        except RuntimeError as error:
            kind = CollectiveTimeout if "timed out" in str(error).lower() else TransportError
            raise kind(f"torch.distributed reported on {self._place}: {error}") from error
        return True

    def is_completed(self) -> bool:
        """Whether the collective and what followed it are done."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """The error, if it has finished with one."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """A future that completes when `wait` would return."""
        return self._future
