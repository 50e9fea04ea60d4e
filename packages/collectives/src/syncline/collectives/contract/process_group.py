"""The contract: every collective once, its arguments checked once, the rest abstract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..errors import InvalidArgumentError
from . import checks, sparse
from .collective import in_words
from .reduce_op import ReduceOp, Reduction, check_reduction
from .work import Work


class ProcessGroup(ABC):
    """A set of ranks that issue the same collectives in the same order.

    **Who calls.** Every rank of the group calls every collective, with matching arguments, in the same order; only `send` and
    `recv` concern two ranks. Any thread may call; calls of one rank that are not ordered with one another (two threads without
    a lock) have no order across ranks either. Note [One total order] in `progress` says what holds for calls from a future's
    callback.

    **What comes back.** Each collective returns a `Work`. With `async_op=False` it has finished; with `async_op=True` it may be
    in flight, and the tensors belong to it until `wait()` returns.

    **How tensors are treated.** Any dtype moves; reductions are defined as `ReduceOp` says. Outputs are written in place, also
    through strides. Tensors without elements and without dimensions are as good as others. Which devices a group serves is its
    `device_types`.

    **Ranks** are those of this group, 0 to size - 1; `ranks` maps them to the ranks of the default group.

    **What any of them may raise**, beside what is listed: `InvalidArgumentError` (a tensor on a device that the group does not
    serve, a sparse tensor, an output that overlaps itself or another), `GroupClosedError`, and, from the call or from `wait()`
    if `async_op`, `CollectiveTimeout`, `TransportError`, `DisagreementError`.

    A backend implements the underscored methods, which get arguments that were checked here.

    Attributes:
        rank: this process's rank in the group.
        size: the number of ranks.
        ranks: for each rank of this group its rank in the default group.
        name: how messages call the group.
        timeout_s: how long one collective may take, in seconds.
    """

    def __init__(
        self, rank: int, size: int, *, name: str = "default", timeout_s: float, ranks: Sequence[int] | None = None
    ) -> None:
        if not 0 <= rank < size:
            raise InvalidArgumentError(f"expected a rank in 0..{size - 1} for a group of {size}, found {rank}")
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self.name = name
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' ({self.describe()}), rank {self.rank} of {self.size}>"

    def set_timeout(self, timeout_s: float) -> None:
        """How long a collective that is issued from now on may take, in seconds."""
        self.timeout_s = timeout_s

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

    # ---- one tensor on each rank ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks; every rank ends with the same bits.

        Args:
            tensor: any shape, the same on every rank; a dtype that `op` is defined for. Overwritten with the result. May be
                sparse (COO, with different elements present on each rank) for SUM, AVG and `premul_sum`; see `sparse`.
            op: see `ReduceOp` and `premul_sum`.
            async_op: return at once, before the collective has finished.

        Raises:
            InvalidArgumentError: the dtype has no such reduction.
        """
        if not checks.is_plain(tensor, self.device_types):
            if getattr(tensor, "layout", None) is torch.sparse_coo:
                check_reduction(op, tensor.dtype)
                return sparse.all_reduce(self, tensor, op, async_op)
            self._check_tensors("all_reduce", writes=(tensor,))
        check_reduction(op, tensor.dtype)
        return self._all_reduce(tensor, op, async_op)

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks on the root.

        Args:
            tensor: as for `all_reduce`. Overwritten with the result on the root; elsewhere only read.
            root: rank in this group.
            op: see `ReduceOp` and `premul_sum`.
            async_op: return at once, before the collective has finished.
        """
        self._check_root("reduce", root)
        self._check_tensors("reduce", writes=(tensor,))
        check_reduction(op, tensor.dtype)
        return self._reduce(tensor, root, op, async_op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Work:
        """Copy the root's tensor to every rank.

        Args:
            tensor: any shape and dtype, the same on every rank. Read on the root, overwritten elsewhere.
            root: rank in this group.
            async_op: return at once, before the collective has finished.
        """
        self._check_root("broadcast", root)
        self._check_tensors("broadcast", writes=(tensor,))
        return self._broadcast(tensor, root, async_op)

    # ---- one tensor on one side, one for each rank on the other ----

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks.

        Args:
            outputs: `size` tensors with the shape and dtype of `tensor`; number r is overwritten with rank r's.
            tensor: any shape and dtype, the same on every rank. Only read; may be one of the outputs.
            async_op: return at once, before the collective has finished.

        Extra memory: one block as large as all outputs together.
        """
        self._complain("all_gather", checks.not_one_each("output", outputs, tensor, self.size))
        self._check_tensors("all_gather", reads=(tensor,), writes=outputs)
        return self._all_gather(list(outputs), tensor, async_op)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks, one after the other in one tensor.

        Args:
            output: `size` times the elements of `tensor`, same dtype, any shape. Overwritten.
            tensor: any shape and dtype, the same on every rank. Only read; may be this rank's own part of `output`.
            async_op: return at once, before the collective has finished.
        """
        self._complain("all_gather_into_tensor", checks.not_times(output, tensor, self.size, "output"))
        self._check_tensors("all_gather_into_tensor", reads=(tensor,), writes=(output,))
        self._complain("all_gather_into_tensor", checks.not_own_part(tensor, output, self.rank))
        return self._all_gather_into_tensor(output, tensor, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        outputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Work:
        """Give the root the tensors of all ranks.

        Args:
            tensor: any shape and dtype, the same on every rank. Only read.
            outputs: on the root `size` tensors like `tensor`, which are overwritten; None elsewhere.
            root: rank in this group.
            async_op: return at once, before the collective has finished.
        """
        self._check_root("gather", root)
        self._check_on_root("gather", "outputs", outputs, tensor, root)
        self._check_tensors("gather", reads=(tensor,), writes=outputs or ())
        return self._gather(tensor, None if outputs is None else list(outputs), root, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Work:
        """Give each rank its tensor of the root's list.

        Args:
            tensor: any shape and dtype, the same on every rank. Overwritten.
            inputs: on the root `size` tensors like `tensor`, which are only read; None elsewhere.
            root: rank in this group.
            async_op: return at once, before the collective has finished.
        """
        self._check_root("scatter", root)
        self._check_on_root("scatter", "inputs", inputs, tensor, root)
        self._check_tensors("scatter", reads=inputs or (), writes=(tensor,))
        return self._scatter(tensor, None if inputs is None else list(inputs), root, async_op)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the lists of all ranks, tensor by tensor, and give rank r the r-th result.

        Args:
            output: any shape, the same on every rank; a dtype that `op` is defined for. Overwritten.
            inputs: `size` tensors like `output`. Only read.
            op: see `ReduceOp` and `premul_sum`.
            async_op: return at once, before the collective has finished.

        Extra memory: one block as large as all inputs together.
        """
        check_reduction(op, output.dtype)
        self._complain("reduce_scatter", checks.not_one_each("input", inputs, output, self.size))
        self._check_tensors("reduce_scatter", reads=inputs, writes=(output,))
        return self._reduce_scatter(output, list(inputs), op, async_op)

    def reduce_scatter_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the tensors of all ranks and give rank r the r-th part of the result.

        Args:
            output: any shape; a dtype that `op` is defined for. Overwritten; may be this rank's own part of `tensor`.
            tensor: `size` times the elements of `output`, same dtype, any shape. Only read.
            op: see `ReduceOp` and `premul_sum`.
            async_op: return at once, before the collective has finished.
        """
        check_reduction(op, output.dtype)
        self._complain("reduce_scatter_tensor", checks.not_times(tensor, output, self.size, "input"))
        self._check_tensors("reduce_scatter_tensor", reads=(tensor,), writes=(output,))
        self._complain("reduce_scatter_tensor", checks.not_own_part(output, tensor, self.rank))
        return self._reduce_scatter_tensor(output, tensor, op, async_op)

    # ---- one tensor for each rank on both sides ----

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

        Args:
            outputs: `size` tensors of one dtype, of any shapes; `outputs[s]` on rank r as large as `inputs[r]` on rank s.
            inputs: `size` tensors of that dtype. Only read.
            async_op: return at once, before the collective has finished.

        Extra memory: a copy of the inputs and one of the outputs.
        """
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size:
                self._complain("all_to_all", f"expected {self.size} {what} tensors, one for each rank, found {len(tensors)}")
            if any(tensor.dtype != inputs[0].dtype for tensor in tensors):
                self._complain("all_to_all", f"expected every {what} to be {inputs[0].dtype}, as the first input is")
        self._complain("all_to_all", checks.overlapping(outputs, inputs))
        self._check_tensors("all_to_all", reads=inputs, writes=outputs)
        return self._all_to_all(list(outputs), list(inputs), async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Send a part of the rows of `tensor` to each rank, and receive rows from each into `output`.

        Args:
            output: rows like those of `tensor`, same dtype. Overwritten.
            tensor: at least one dimension. Only read.
            output_split_sizes: how many rows come from each rank; None: the same from each.
            input_split_sizes: how many rows go to each rank; None: the same to each.
            async_op: return at once, before the collective has finished.
        """
        name = "all_to_all_single"
        self._complain(name, checks.bad_splits("output", output, output_split_sizes, self.size))
        self._complain(name, checks.bad_splits("input", tensor, input_split_sizes, self.size))
        if output.dtype != tensor.dtype or output.shape[1:] != tensor.shape[1:]:
            self._complain(name, f"expected rows like those of {in_words(tensor)} in the output, found {in_words(output)}")
        self._complain(name, checks.overlapping((output,), (tensor,)))
        self._check_tensors(name, reads=(tensor,), writes=(output,))
        return self._all_to_all_single(
            output,
            tensor,
            self._splits(output, output_split_sizes),
            self._splits(tensor, input_split_sizes),
            async_op,
        )

    # ---- two ranks ----

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Send a tensor to one rank, which calls `recv`.

        Args:
            tensor: any shape and dtype. Only read; do not write it before the work has finished.
            dst: rank in this group; not this rank.
            tag: 0 or above; the receiver asks for the same.
            async_op: return at once. With False it may or may not wait for the receiver.
        """
        self._check_peer("send", dst, tag)
        self._check_tensors("send", reads=(tensor,))
        return self._send(tensor, dst, tag, async_op)

    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False) -> Work:
        """Receive a tensor from one rank, which calls `send`.

        Args:
            tensor: the dtype and number of elements that were sent. Overwritten.
            src: rank in this group; None receives from any rank, and the work's `source_rank()` says from which.
            tag: 0 or above.
            async_op: return at once, before the tensor has arrived.
        """
        self._check_peer("recv", src, tag)
        self._check_tensors("recv", writes=(tensor,))
        return self._recv(tensor, src, tag, async_op)

    # ---- no tensor ----

    def barrier(self, *, async_op: bool = False) -> Work:
        """Return on any rank only after all ranks have called it."""
        return self._barrier(async_op)

    def split(self, color: int | None, key: int | None = None, *, timeout_s: float | None = None) -> ProcessGroup | None:
        """Make new groups of the ranks that give the same color. A collective of this group.

        Args:
            color: 0 or above; None joins no group.
            key: ranks are ordered by it in the new group, then by their rank here; None keeps the order.
            timeout_s: the new group's time limit, this group's if None.

        Returns:
            The new group that this rank is in, or None without a color.
        """
        if color is not None and color < 0:
            self._complain("split", f"expected a color of 0 or above, or None, found {color}")
        return self._split(color, self.rank if key is None else key, self.timeout_s if timeout_s is None else timeout_s)

    def subset(self, members: Sequence[int], name: str, *, timeout_s: float | None = None) -> ProcessGroup:
        """Make a group of some ranks of this one, without the others: only the members call it, all of them alike.

        Args:
            members: ranks of this group, this rank among them; the new group has them in the order given.
            name: the new group's; at any time there is only one of that name.
            timeout_s: the new group's time limit, this group's if None.

        Raises:
            InvalidArgumentError: a rank twice or outside the group, or not this one; or the backend needs all ranks (`split`).
        """
        if len(set(members)) < len(members) or self.rank not in members or not all(0 <= rank < self.size for rank in members):
            self._complain("subset", f"expected ranks in 0..{self.size - 1}, each once, this one among them, found {members}")
        return self._subset(list(members), name, self.timeout_s if timeout_s is None else timeout_s)

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
    def _all_reduce(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work: ...

    @abstractmethod
    def _reduce(self, tensor: torch.Tensor, root: int, op: Reduction, async_op: bool) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool) -> Work: ...

    @abstractmethod
    def _gather(self, tensor: torch.Tensor, outputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _scatter(self, tensor: torch.Tensor, inputs: list[torch.Tensor] | None, root: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: Reduction, async_op: bool) -> Work: ...

    @abstractmethod
    def _reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool) -> Work: ...

    @abstractmethod
    def _all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], async_op: bool
    ) -> Work: ...

    @abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _barrier(self, async_op: bool) -> Work: ...

    @abstractmethod
    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None: ...

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:  # noqa: ARG002 - for those who can
        raise InvalidArgumentError(
            f"subset on {self.place()}: backend '{self.backend_name}' makes groups with all ranks together only; call split "
            "on every rank"
        )

    # ---- checks ----

    def place(self) -> str:
        """Where an error happened, in words: "rank 1 of 4 in group 'default'"."""
        return f"rank {self.rank} of {self.size} in group '{self.name}'"

    def _complain(self, collective: str, complaint: str | None) -> None:
        if complaint is not None:
            raise InvalidArgumentError(f"{collective} on {self.place()}: {complaint}")

    def _check_root(self, collective: str, root: int) -> None:
        if not 0 <= root < self.size:
            self._complain(collective, f"expected a root in 0..{self.size - 1}, found {root}")

    def _check_on_root(
        self, collective: str, what: str, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int
    ) -> None:
        if self.rank == root and tensors is None:
            self._complain(collective, f"this rank is the root and must pass {what}")
        if self.rank != root and tensors:
            self._complain(collective, f"only the root (rank {root}) passes {what}; pass None here")
        if self.rank == root and tensors is not None:
            self._complain(collective, checks.not_one_each(what.removesuffix("s"), tensors, like, self.size))

    def _check_peer(self, collective: str, peer: int | None, tag: int) -> None:
        if tag < 0:
            self._complain(collective, f"expected a tag of 0 or above, found {tag}")
        if peer == self.rank or (peer is not None and not 0 <= peer < self.size):
            self._complain(collective, f"expected another rank in 0..{self.size - 1}, found {peer}")

    def _check_tensors(
        self, collective: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        served = self.device_types
        for tensor in (*reads, *writes):
            if not checks.is_plain(tensor, served):
                self._complain(collective, checks.unusable(tensor, served, self.backend_name))
        for tensor in writes:
            self._complain(collective, checks.unwritable(tensor))
        if len(writes) > 1:
            self._complain(collective, checks.overlapping(writes))

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        return [tensor.shape[0] // self.size] * self.size if splits is None else list(splits)
