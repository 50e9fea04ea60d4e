"""The contract: every collective once, its arguments checked once, the rest abstract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .errors import InvalidArgumentError
from .layout import overlaps_itself
from .reduce_op import ReduceOp, check_reduction
from .work import Work


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as the error messages and the ranks' comparison of calls see it.

    Attributes:
        name: the method's name, such as "all_reduce".
        tensors: the tensors that travel, inputs first.
        detail: what else all ranks must agree on, such as "op=SUM" or "root=0"; empty if nothing.
    """

    name: str
    tensors: tuple[torch.Tensor, ...] = ()
    detail: str = ""

    def signature(self) -> str:
        """What must be the same on every rank, in words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = [_tensor_in_words(tensor) for tensor in self.tensors[:1]]
        if self.detail:
            words.append(self.detail)
        return f"{self.name}({', '.join(words)})"


def _tensor_in_words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class ProcessGroup(ABC):
    """A set of ranks that issue the same collectives in the same order.

    **Who calls.** Every rank of the group calls every collective, with matching arguments, in the same order. Any thread
    may call; calls of one rank that are not ordered with one another (two threads without a lock) have no order across
    ranks either. Note [One total order] in `progress` says what holds for calls from a future's callback.

    **What comes back.** Each collective returns a `Work`. With `async_op=False` it has finished; with `async_op=True` it
    may be in flight, and the tensors belong to it until `wait()` returns.

    **How tensors are treated.** Outputs are written in place, also through strides. Which devices a group serves is its
    `device_types`.

    A backend implements the underscored methods, which get arguments that were checked here.
    """

    def __init__(self, rank: int, size: int, *, name: str = "default", timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"expected a rank in 0..{size - 1} for a group of {size}, found {rank}")
        self.rank = rank
        self.size = size
        self.name = name
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' ({self.describe()}), rank {self.rank} of {self.size}>"

    # ---- what a backend says of itself ----

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """The name under which the registry knows the backend, such as "mpi"."""

    @property
    @abstractmethod
    def device_types(self) -> frozenset[str]:
        """The types of device whose tensors this group moves, such as {"cpu"}."""

    @abstractmethod
    def describe(self) -> str:
        """The library underneath and its version in a few words, such as "mpi: MPICH 5.0.2"."""

    # ---- the collectives ----

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks; every rank ends with the same bits.

        Args:
            tensor: any shape, the same on every rank; a dtype that `op` is defined for. Overwritten with the result.
            op: see `ReduceOp`.
            async_op: return at once, before the collective has finished.

        Raises:
            InvalidArgumentError: the dtype has no such reduction; the tensor is on a device that the group does not serve,
                is sparse, or overlaps itself.
            GroupClosedError: the group was closed.
            CollectiveTimeout, TransportError, DisagreementError: from the call, or from `wait()` if `async_op`.
        """
        check_reduction(op, tensor.dtype)
        self._check_tensors("all_reduce", writes=(tensor,))
        return self._all_reduce(tensor, op, async_op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Work:
        """Copy the root's tensor to every rank.

        Args:
            tensor: any shape and dtype, the same on every rank. Read on the root, overwritten elsewhere.
            root: rank in this group, 0 to size - 1.
            async_op: return at once, before the collective has finished.

        Raises:
            InvalidArgumentError: no such root, or a tensor that cannot be used (see `all_reduce`).
        """
        self._check_root("broadcast", root)
        self._check_tensors("broadcast", writes=(tensor,))
        return self._broadcast(tensor, root, async_op)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks.

        Args:
            outputs: `size` tensors with the shape and dtype of `tensor`; number r is overwritten with rank r's.
            tensor: any shape and dtype, the same on every rank. Only read.
            async_op: return at once, before the collective has finished.

        Raises:
            InvalidArgumentError: the wrong number of outputs, or one that differs from `tensor` in shape or dtype, or a
                tensor that cannot be used (see `all_reduce`).
        """
        self._check_outputs("all_gather", outputs, tensor)
        self._check_tensors("all_gather", reads=(tensor,), writes=outputs)
        self._check_apart("all_gather", outputs)
        return self._all_gather(list(outputs), tensor, async_op)

    def barrier(self, *, async_op: bool = False) -> Work:
        """Return on any rank only after all ranks have called it."""
        return self._barrier(async_op)

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory from which this group communicates fastest. A collective: all ranks call it with the same arguments.

        Returns:
            A flat, uninitialised tensor of `numel` elements. The default is `torch.empty`.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    # ---- the end ----

    @abstractmethod
    def close(self) -> None:
        """Finish what was issued, then give up everything the group holds. A second call does nothing. All ranks call it."""

    @abstractmethod
    def abort(self) -> None:
        """Give up without waiting for anything in flight; waiters get a `TransportError`. One rank may call it alone."""

    # ---- what a backend implements ----

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work: ...

    @abstractmethod
    def _barrier(self, async_op: bool) -> Work: ...

    # ---- checks ----

    def place(self) -> str:
        """Where an error happened, in words: "rank 1 of 4 in group 'default'"."""
        return f"rank {self.rank} of {self.size} in group '{self.name}'"

    def _invalid(self, collective: str, complaint: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{collective} on {self.place()}: {complaint}")

    def _check_root(self, collective: str, root: int) -> None:
        if not 0 <= root < self.size:
            raise self._invalid(collective, f"expected a root in 0..{self.size - 1}, found {root}")

    def _check_outputs(self, collective: str, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        if len(outputs) != self.size:
            raise self._invalid(collective, f"expected {self.size} output tensors, one for each rank, found {len(outputs)}")
        for index, output in enumerate(outputs):
            if output.shape != tensor.shape or output.dtype != tensor.dtype:
                raise self._invalid(
                    collective,
                    f"expected every output to be {_tensor_in_words(tensor)} as the input is, "
                    f"found {_tensor_in_words(output)} at index {index}",
                )

    def _check_tensors(
        self, collective: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        invalid = partial(self._invalid, collective)
        for tensor in (*reads, *writes):
            self._check_tensor(tensor, invalid)
        for tensor in writes:
            if overlaps_itself(tensor.shape, tensor.stride()):
                raise invalid(
                    f"the tensor would be written, but several of its elements share one place in memory (strides "
                    f"{tuple(tensor.stride())}, as after expand()); pass tensor.contiguous()"
                )

    def _check_apart(self, collective: str, outputs: Sequence[torch.Tensor]) -> None:
        first_at: dict[int, int] = {}
        for index, output in enumerate(outputs):
            first = first_at.setdefault(output.data_ptr(), index)
            if first != index and output.numel() > 0:
                raise self._invalid(collective, f"expected separate outputs, but number {first} and {index} share memory")

    def _check_tensor(self, tensor: torch.Tensor, invalid: Callable[[str], InvalidArgumentError]) -> None:
        if tensor.device.type not in self.device_types:
            served = ", ".join(sorted(self.device_types))
            raise invalid(
                f"backend '{self.backend_name}' moves tensors on {served}, found a tensor on {tensor.device}; move the "
                "tensor, or choose a backend for that device"
            )
        if tensor.layout is not torch.strided:
            raise invalid(f"expected a dense tensor, found layout {tensor.layout}")
