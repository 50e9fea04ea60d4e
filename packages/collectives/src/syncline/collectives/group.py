"""ProcessGroup: the base class of all groups of ranks. Its docstrings are the contract of every group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .engine.call import Signature, device_type_of, tensor_in_words
from .engine.cancel_scope import seconds
from .engine.observers import public_call
from .engine.tags import FIRST_RESERVED, LAST_RESERVED, is_reserved
from .errors import BackendUnavailableError, InvalidArgumentError, InvalidTypeError, MisuseError
from .reduce_op import ReduceOp, Reduction, checked_reduction
from .tensors import checks, sparse, uneven
from .work import Work

if TYPE_CHECKING:
    import torch.distributed as dist

DEFAULT_SILENCE_TIMEOUT_S = 30.0
"""The default of `silence_timeout_s` in `ProcessGroup.shrink` and `ProcessGroup.admit`, in seconds."""


class ProcessGroup(ABC):
    """A set of ranks that issue the same collectives in the same order.

    **Calls.** Every rank calls every collective, in the same order, with matching arguments. For a transfer, one rank calls
    `send` and one rank calls `recv`. Any thread may call a method, but the order of the calls must be the same on all ranks.

    **Results.** Each collective returns a `Work`. With `async_op=False` the collective has finished when the method returns (on
    CUDA, the current stream waits for the collective instead). With `async_op=True` do not read or write the tensors until the
    work's `wait()` returns. Until then, do not pass the tensors to another collective either. Some collectives, for example a
    `reduce_scatter` whose inputs have different shapes, read their inputs as soon as they are called.

    **Tensors.** A group sends every dtype that torch can copy; `ReduceOp` lists the dtypes of each reduction. A tensor's device
    must be of a type in `device_types`. All tensors that a rank passes to one call are on one type of device. Outputs are
    written in place, even if they are not contiguous. Tensors may be empty or without dimensions. If an argument is wrong on
    this rank, the method raises an error before it issues the call, and the group stays usable.

    **Ranks** in arguments and results are ranks in this group, 0 to size - 1.

    **Errors.** Each method may also raise `InvalidArgumentError`, `GroupClosedError`, `CollectiveTimeout`, `TransportError` and
    `DisagreementError`. With `async_op=True` the work's `wait()` may raise the last three errors.

    A backend implements `_issue`, `_send`, `_recv`, `_split`, `close`, `abort`, `describe`, and the abstract properties.

    Attributes:
        rank: this process's rank in the group.
        size: the number of ranks.
        ranks: for each rank of this group, its rank in the default group.
        name: the group's name in error messages.
        timeout_s: the time limit of one collective, in seconds.
        torch_group: the group of torch.distributed that carries out the calls; None if Syncline carries them out itself.
        hosts: one text for each rank of the default group: the boot id of the rank's host, a space, and the host's name. None
            if the ranks have not exchanged these texts.
    """

    torch_group: Any = None
    hosts: Sequence[str] | None = None

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
        self._marks: dict[int, str] = {}  # by thread; mostly empty. See `marked`

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}' ({self.describe()}), rank {self.rank} of {self.size}>"

    def __reduce__(self) -> NoReturn:
        """Refuse `pickle`, `copy.copy` and `copy.deepcopy`: a group belongs to this process.

        Raises:
            InvalidTypeError: always. A TypeError, because programs that test whether an object can be pickled expect one.
        """
        raise InvalidTypeError(
            f"a process group ({self.place()}) cannot be copied or pickled: save the state_dict() of the object that holds the "
            "group, or set its attribute to None before the copy"
        )

    # ---- properties of a group ----

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """The backend's name, such as "mpi"."""

    @property
    @abstractmethod
    def device_types(self) -> frozenset[str]:
        """The types of device on which this group accepts tensors, such as {"cpu"}."""

    @abstractmethod
    def describe(self) -> str:
        """Return the communication library and its version, such as "mpi: MPICH 5.0.2"."""

    @property
    def profiled_as(self) -> str | None:
        """The prefix under which torch's profiler shows this group's collectives, such as "syncline-mpi".

        None if this group adds nothing to the profile.
        """
        return f"syncline-{self.backend_name}"

    def place(self) -> str:
        """This rank and this group in words, for error messages: "rank 1 of 4 in group 'default'"."""
        return f"rank {self.rank} of {self.size} in group '{self.name}'"

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit, in seconds, for collectives that start after this call.

        Raises:
            InvalidArgumentError: `timeout_s` is not a positive number.
        """
        self.timeout_s = seconds(timeout_s)

    # ---- one tensor on each rank ----

    @public_call
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks. Every rank gets the same result, bit for bit.

        Args:
            tensor: any shape; all ranks pass the same shape and dtype. Overwritten with the result. SUM, AVG and
                `premul_sum` also take sparse COO tensors, whose indices may differ between ranks.
            op: see `ReduceOp`.
            async_op: if true, do not wait for the result.

        Raises:
            InvalidArgumentError: `op` is not defined for the dtype.
        """
        # Most tensors are plain and pass this one quick check. Only the others need the slower checks.
        if not checks.is_plain(tensor, self.device_types):
            if getattr(tensor, "layout", None) is torch.sparse_coo:
                op = checked_reduction(op, tensor.dtype)
                self._refuse_if("all_reduce", checks.elsewhere(tensor, self.device_types, self.backend_name))
                self._refuse_if("all_reduce", sparse.irreducible(tensor, op))
                return self._all_reduce_sparse(tensor, op, async_op)
            self._check_tensors("all_reduce", writes=(tensor,))
        op = checked_reduction(op, tensor.dtype)
        return self._issue(Signature.of("all_reduce", tensor, op), (), (tensor,), async_op)

    @public_call
    def reduce(self, tensor: torch.Tensor, root: int = 0, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks on the root.

        Args:
            tensor: dense, any shape; all ranks pass the same shape and dtype. Overwritten with the result on the root; only
                read on other ranks.
            root: the rank in this group that gets the result.
            op: see `ReduceOp`.
            async_op: if true, do not wait for the result.
        """
        root = self._check_root("reduce", root)
        self._check_tensors("reduce", writes=(tensor,))
        op = checked_reduction(op, tensor.dtype)
        return self._issue(Signature.of("reduce", tensor, op, root), (), (tensor,), async_op)

    @public_call
    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, async_op: bool = False) -> Work:
        """Copy the root's tensor to every rank.

        Args:
            tensor: any shape and dtype; all ranks pass the same shape and dtype. Read on the root, overwritten on the other
                ranks.
            root: the rank in this group whose tensor is copied.
            async_op: if true, do not wait for the result.
        """
        root = self._check_root("broadcast", root)
        self._check_tensors("broadcast", writes=(tensor,))
        return self._issue(Signature.of("broadcast", tensor, root=root), (), (tensor,), async_op)

    # ---- one tensor on one side, one for each rank on the other ----

    @public_call
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks.

        Args:
            outputs: `size` tensors with the shape and dtype of `tensor`. `outputs[r]` is overwritten with rank r's tensor.
            tensor: any shape and dtype; all ranks pass the same shape and dtype. Only read. May be one of the outputs.
            async_op: if true, do not wait for the result.

        Extra memory: one buffer as large as all outputs together.
        """
        self._refuse_if("all_gather", checks.no_tensors({"tensor": tensor, "outputs": outputs}))
        self._check_tensors("all_gather", reads=(tensor,), writes=outputs)
        self._refuse_if("all_gather", checks.not_one_each("output", outputs, tensor, self.size))
        return self._issue(Signature.of("all_gather", tensor), (tensor,), tuple(outputs), async_op)

    @public_call
    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Concatenate the tensors of all ranks into one tensor on every rank.

        Args:
            output: any shape, the dtype of `tensor`, and `size` times as many elements. Overwritten.
            tensor: any shape and dtype; all ranks pass the same shape and dtype. Only read. May be this rank's part of
                `output`.
            async_op: if true, do not wait for the result.
        """
        self._refuse_if("all_gather_into_tensor", checks.no_tensors({"tensor": tensor, "output": output}))
        self._check_tensors("all_gather_into_tensor", reads=(tensor,), writes=(output,))
        self._refuse_if("all_gather_into_tensor", checks.not_times(output, tensor, self.size, "output"))
        self._refuse_if("all_gather_into_tensor", checks.not_own_part(tensor, output, self.rank))
        return self._issue(Signature.of("all_gather_into_tensor", tensor), (tensor,), (output,), async_op)

    @public_call
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
            tensor: any shape and dtype; all ranks pass the same shape and dtype. Only read.
            outputs: on the root, `size` tensors like `tensor`; `outputs[r]` is overwritten with rank r's tensor. On other
                ranks, None.
            root: the rank in this group that gets the tensors.
            async_op: if true, do not wait for the result.
        """
        root = self._check_root("gather", root)
        self._refuse_if("gather", checks.no_tensors({"tensor": tensor, "outputs": outputs}, only_on_root="outputs"))
        self._check_tensors("gather", reads=(tensor,), writes=outputs or ())
        self._check_on_root("gather", "outputs", outputs, tensor, root)
        return self._issue(Signature.of("gather", tensor, root=root), (tensor,), tuple(outputs or ()), async_op)

    @public_call
    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
    ) -> Work:
        """Send each rank one tensor of the root's list: rank r gets `inputs[r]` in its `tensor`.

        Args:
            tensor: any shape and dtype; all ranks pass the same shape and dtype. Overwritten.
            inputs: on the root, `size` tensors like `tensor`. Only read. On other ranks, None.
            root: the rank in this group that sends the tensors.
            async_op: if true, do not wait for the result.
        """
        root = self._check_root("scatter", root)
        self._refuse_if("scatter", checks.no_tensors({"tensor": tensor, "inputs": inputs}, only_on_root="inputs"))
        self._check_tensors("scatter", reads=inputs or (), writes=(tensor,))
        self._check_on_root("scatter", "inputs", inputs, tensor, root)
        return self._issue(Signature.of("scatter", tensor, root=root), tuple(inputs or ()), (tensor,), async_op)

    @public_call
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the lists of all ranks, entry by entry. Rank r gets the result of entry r in its `output`.

        Args:
            output: the shape and dtype of `inputs[rank]`. Overwritten.
            inputs: `size` tensors of one dtype; only read. `inputs[r]` has the same shape on every rank. If the shapes in the
                list differ, the call costs one `reduce` for each rank.
            op: see `ReduceOp`.
            async_op: if true, do not wait for the result.

        Extra memory: one buffer as large as all inputs together.
        """
        self._refuse_if("reduce_scatter", checks.no_tensors({"output": output, "inputs": inputs}))
        self._check_tensors("reduce_scatter", reads=inputs, writes=(output,))
        op = checked_reduction(op, output.dtype)
        # Backends want equal parts in one block. Unequal parts take one `reduce` for each rank.
        if uneven.is_uneven(inputs):
            self._refuse_if("reduce_scatter", checks.not_one_each_like("input", inputs, output, self.rank, self.size))
            self._refuse_if("reduce_scatter", checks.overlapping((output,), inputs))
            return uneven.reduce_scatter(self, output, inputs, op, async_op)
        self._refuse_if("reduce_scatter", checks.not_one_each("input", inputs, output, self.size))
        return self._issue(Signature.of("reduce_scatter", output, op), tuple(inputs), (output,), async_op)

    @public_call
    def reduce_scatter_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the tensors of all ranks, and divide the result into `size` equal parts. Rank r gets part r.

        Args:
            output: any shape. Overwritten. May be this rank's part of `tensor`.
            tensor: any shape, the dtype of `output`, and `size` times as many elements. Only read, unless `output` is a part of
                `tensor`; then this part is overwritten.
            op: see `ReduceOp`.
            async_op: if true, do not wait for the result.
        """
        self._refuse_if("reduce_scatter_tensor", checks.no_tensors({"output": output, "tensor": tensor}))
        self._check_tensors("reduce_scatter_tensor", reads=(tensor,), writes=(output,))
        op = checked_reduction(op, output.dtype)
        self._refuse_if("reduce_scatter_tensor", checks.not_times(tensor, output, self.size, "input"))
        self._refuse_if("reduce_scatter_tensor", checks.not_own_part(output, tensor, self.rank))
        return self._issue(Signature.of("reduce_scatter_tensor", output, op), (tensor,), (output,), async_op)

    # ---- one tensor for each rank on both sides ----

    @public_call
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False) -> Work:
        """For each rank r, send `inputs[r]` to rank r, and receive `outputs[r]` from rank r.

        Args:
            outputs: `size` tensors of any shapes. `outputs[s]` on rank r receives `inputs[r]` of rank s, and these two must
                have the same number of elements. Overwritten.
            inputs: `size` tensors with the dtype of the outputs. Only read.
            async_op: if true, do not wait for the result.

        Extra memory: a copy of the inputs and a copy of the outputs.
        """
        self._refuse_if("all_to_all", checks.no_tensors({"outputs": outputs, "inputs": inputs}))
        self._check_tensors("all_to_all", reads=inputs, writes=outputs)
        lists = {"output": outputs, "input": inputs}
        for what, tensors in lists.items():
            if len(tensors) != self.size:
                self._refuse_if("all_to_all", f"expected {self.size} {what} tensors, one for each rank, found {len(tensors)}")
        for what, tensors in lists.items():
            if any(tensor.dtype != inputs[0].dtype for tensor in tensors):
                self._refuse_if("all_to_all", f"expected every {what} to be {inputs[0].dtype}, as the first input is")
        self._refuse_if("all_to_all", checks.overlapping(outputs, inputs))
        splits = tuple(map(torch.numel, outputs)), tuple(map(torch.numel, inputs))
        return self._issue(
            self._all_to_all_signature("all_to_all", inputs[0], "", splits), tuple(inputs), tuple(outputs), async_op
        )

    @public_call
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Work:
        """Send a part of the rows of `tensor` to each rank, and receive rows from each rank into `output`.

        Args:
            output: overwritten with the received rows. Has the dtype of `tensor`, and rows of the same shape as `tensor`.
            tensor: at least one dimension. The first dimension counts the rows. Only read.
            output_split_sizes: entry r is the number of rows that this rank receives from rank r. None means equal numbers.
            input_split_sizes: entry r is the number of rows that this rank sends to rank r. None means equal numbers.
            async_op: if true, do not wait for the result.
        """
        name = "all_to_all_single"
        self._refuse_if(name, checks.no_tensors({"output": output, "tensor": tensor}))
        self._check_tensors(name, reads=(tensor,), writes=(output,))
        self._refuse_if(name, checks.bad_splits("output", output, output_split_sizes, self.size))
        self._refuse_if(name, checks.bad_splits("input", tensor, input_split_sizes, self.size))
        if output.dtype != tensor.dtype or output.shape[1:] != tensor.shape[1:]:
            self._refuse_if(
                name, f"expected rows like those of {tensor_in_words(tensor)} in the output, found {tensor_in_words(output)}"
            )
        self._refuse_if(name, checks.overlapping((output,), (tensor,)))
        row = math.prod(tensor.shape[1:])
        # A signature counts elements. Backends know nothing of rows.
        received = tuple(rows * row for rows in self._splits(output, output_split_sizes))
        sent = tuple(rows * row for rows in self._splits(tensor, input_split_sizes))
        signature = self._all_to_all_signature(name, tensor, f", row={list(tensor.shape[1:])}", (received, sent))
        return self._issue(signature, (tensor,), (output,), async_op)

    # ---- two ranks ----

    @public_call
    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Send a tensor to one rank, which calls `recv`.

        Messages with the same receiver, tag, dtype and size arrive in the order in which they were sent.

        Args:
            tensor: any shape and dtype. Do not write to the tensor before the work has finished.
            dst: another rank in this group.
            tag: a number, 0 or above; the receiver passes the same number. Over NCCL, the only tag is 0. Syncline reserves the
                tags 32,000 to 32,767.
            async_op: if true, return at once. If false, return when the tensor may be written again; `send` may have to wait
                for the receiver.
        """
        self.check_transfer("send", tensor, dst, tag)
        # Convert integers of other libraries: Syncline calculates with the tag, and an int8 of NumPy would overflow.
        return self._send(tensor, int(dst), int(tag), async_op)

    @public_call
    def recv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False) -> Work:
        """Receive a tensor from one rank, which calls `send`.

        Args:
            tensor: the dtype and the number of elements of the sent tensor. Overwritten.
            src: another rank in this group. None means any rank (not over NCCL); then the work's `source_rank()` names the
                sender.
            tag: the tag that the sender passes.
            async_op: if true, do not wait for the tensor.
        """
        self.check_transfer("recv", tensor, src, tag)
        return self._recv(tensor, None if src is None else int(src), int(tag), async_op)

    def check_transfer(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
        """Check the arguments of a `send` or `recv`, but begin no transfer.

        For example, check several transfers before the first one begins.

        Args:
            name: "send" or "recv".
            tensor: the tensor of the transfer, not a FakeTensor.
            peer: `dst` of a send, or `src` of a receive.
            tag: the tag of the transfer.

        Raises:
            InvalidArgumentError: an argument is wrong. If all are valid, the method returns.
        """
        self._check_peer(name, peer, tag)
        if name == "send":
            self._check_tensors(name, reads=(tensor,))
        else:
            self._check_tensors(name, writes=(tensor,))

    # ---- no tensor ----

    @public_call
    def barrier(self, *, async_op: bool = False) -> Work:
        """Wait until all ranks have called this method.

        If `async_op` is true, return at once; the work's `wait` then waits for the other ranks.
        """
        return self._issue(Signature("barrier"), (), (), async_op)

    def split(self, color: int | None, key: int | None = None, *, timeout_s: float | None = None) -> ProcessGroup | None:
        """Divide this group into new groups: ranks that pass the same color are in the same new group.

        Every rank of this group calls this method.

        Args:
            color: a number, 0 or above. None means that this rank joins no new group.
            key: the new group orders its ranks by key, then by their rank in this group. None means this rank's number in
                this group. If all ranks pass None, they keep their order.
            timeout_s: the new group's time limit, in seconds. None means the time limit of this group.

        Returns:
            The new group, or None if `color` is None.
        """
        if color is not None and not (checks.is_integer(color) and 0 <= int(color) < 2**63):
            self._refuse_if("split", f"expected a color of 0 or above (64 bits), or None, found {color!r}")
        if key is not None and not (checks.is_integer(key) and -(2**63) <= int(key) < 2**63):
            self._refuse_if("split", f"expected a key that is an integer of 64 bits, or None, found {key!r}")
        color, key = None if color is None else int(color), self.rank if key is None else int(key)
        made = self._split(color, key, seconds(timeout_s, self.timeout_s))
        # `hosts` has an entry for each rank of the default group, so it fits every new group.
        if made is not None:
            made.hosts = self.hosts
        return made

    def subset(self, members: Sequence[int], name: str, *, timeout_s: float | None = None) -> ProcessGroup:
        """Make a new group of some ranks of this group. Only the new members call this method, all with the same arguments.

        Args:
            members: ranks of this group, including this rank. Rank `members[i]` of this group becomes rank i of the new group.
            name: the new group's name, which must differ from the names of all open groups.
            timeout_s: the new group's time limit, in seconds. None means the time limit of this group.

        Raises:
            InvalidArgumentError: `members` is not valid, or the backend needs all ranks to make a group. In the second case,
                call `split` on all ranks.
        """
        if (
            not checks.is_list_of_integers(members)
            or not all(0 <= int(rank) < self.size for rank in members)
            or len(set(map(int, members))) < len(members)
            or self.rank not in members
        ):
            self._refuse_if("subset", f"expected ranks in 0..{self.size - 1}, each once, this one among them, found {members}")
        made = self._subset([int(rank) for rank in members], name, seconds(timeout_s, self.timeout_s))
        made.hosts = self.hosts
        return made

    def exchange_texts(self, text: str) -> list[str] | None:  # noqa: ARG002 - for subclasses that can
        """Give every rank the short texts of all ranks, in rank order. Return None if the group cannot exchange texts.

        All ranks call this method. `init_process_group` uses this method for the names of the hosts, right after the ranks have
        connected.
        """
        return None

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Allocate a tensor in the memory that is fastest for collectives of this group.

        Over MPI, for example, the ranks of a node share this memory. All ranks call this method, with the same
        arguments.

        Returns:
            A flat, uninitialised tensor of `numel` elements. If the backend has no special memory, the tensor is
                from `torch.empty`.
        """
        self._refuse_if("allocate", checks.no_size(numel, dtype))
        return torch.empty(int(numel), dtype=dtype, device=device)

    # ---- what a group can do: callers ask these methods, and do not look at the group's type ----

    @property
    def has_total_order(self) -> bool:
        """Whether a callback of a work's future may issue collectives of this group.

        If true, all ranks run the callback's collectives and all other collectives in one order. If false, the order could
        differ between ranks, so wait for the work and then issue the collectives.
        """
        return True

    @property
    def can_split(self) -> bool:
        """Whether `split` works. If false, make sub-groups with the library that made this group."""
        return True

    def meeting_store(self) -> dist.Store | None:
        """Return the store in which the ranks found each other, so that other groups of these ranks can meet there, too.

        None if the group has no such store, for example because its ranks met over MPI.
        """
        return None

    # ---- marks, and the comparison of calls ----

    @contextmanager
    def marked(self, mark: str) -> Iterator[None]:
        """A context manager that adds a mark to the first call that this thread issues inside the context.

        A mark says to which part of the program a call belongs. Errors show the marks. When the ranks compare calls, they also
        compare the marks, so pass the same mark on every rank. Calls from callbacks get no mark.

        Inside another such context, the first call gets both marks.

        Args:
            mark: a few words without a comma, such as "backward 1 since forward 12".
        """
        me = get_ident()
        outer = self._marks.get(me)
        self._marks[me] = mark if outer is None else f"{outer}, {mark}"
        try:
            yield
        finally:
            was_used = self._marks.pop(me, None) is None
            # No call has used the marks, so the outer mark is for the next call.
            if outer is not None and not was_used:
                self._marks[me] = outer

    def algorithm_of(self, name: str, tensor: torch.Tensor) -> str | None:  # noqa: ARG002
        """Return the algorithm that this rank has used for a collective on tensors of this dtype and shape.

        The algorithm may also depend on the reduction and the root. If this rank has used several reductions or roots on such
        tensors, the answer is for the reduction and the root that the rank began to use last.

        Args:
            name: the method's name, such as "all_reduce".
            tensor: a tensor of the dtype and shape that you ask about.

        Returns:
            A word or two for logs, such as "window" or "MPI". None if this rank has made no such call recently, or if the
                backend names no algorithms.
        """
        return None

    def agree_on_calls(self, *, async_op: bool = False) -> Work | None:  # noqa: ARG002 - for subclasses that can
        """Check that all ranks have called the same collectives since the group was made. All ranks call this method.

        Returns:
            The work of the comparison. None if the group compares each call before the call starts, or if another thread
                compares the calls (over NCCL, with `async_op=True`). Also None if the group cannot compare calls, so that this
                method checks nothing.

        Raises:
            DisagreementError: the ranks called different collectives, so results are wrong. All ranks raise this error. With
                `async_op=True`, the work's `wait` raises this error. Over NCCL, `async_op=True` gives no work; the group fails
                instead, and its next call raises an error.
        """
        return None

    def verify_calls(self, *, async_op: bool = False) -> NoReturn:  # noqa: ARG002 - the older signature
        """Raise an error that says that this method is now called `agree_on_calls`.

        Raises:
            MisuseError: always.
        """
        raise MisuseError("verify_calls is now called agree_on_calls; call group.agree_on_calls(async_op=...)")

    def end_together(self, companion: ProcessGroup) -> None:  # noqa: B027 - for subclasses that can
        """Close or abort another group, `companion`, when this group is closed or aborted. `companion` has the same ranks.

        When this group is closed, it first closes `companion`, or aborts `companion` if this group has failed. When this group
        is aborted, it also aborts `companion`. A group of torch ignores this method, so the caller must close `companion`.
        """

    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback that belongs to a work of this group. Always false for a group of torch."""
        return False

    # ---- after a loss ----

    def expect_losses(self, are_expected: bool) -> None:  # noqa: B027 - for groups that write reports
        """Tell the group whether the program goes on after the loss of a rank, as elastic training does.

        If true, the group writes no report when a call fails with a `TransportError`, and `close` does not raise such an error.
        By default the group writes such reports, and `close` raises an error that the program has not seen.
        """

    def missing_for_shrink(self) -> str | None:
        """Return None if `shrink` can work for this group. Otherwise return a text: why not, and what to do instead."""
        return (
            f"backend '{self.backend_name}' cannot connect the ranks that are left when one is lost; use backend 'gloo' with "
            "init_method='file:///shared/folder', or save checkpoints and let the launcher start the job again"
        )

    def shrink(self, *, silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S) -> ProcessGroup:
        """Make a new group of the surviving ranks, after a `TransportError`. All survivors call this method.

        All survivors get a new group with the same members, in the old order, even if another rank dies during the call. The
        method aborts this group. Do not use this group, its sub-groups, or memory from its `allocate` again.

        Calls that were in flight may have finished on some ranks and failed on others. So the ranks must agree, in the new
        group, on the training step from which they go on.

        Args:
            silence_timeout_s: how long, in seconds, to wait for a rank that may still run but does not call `shrink`. After
                this time the survivors go on without the rank. Over MPI, `shrink` fails instead, and the program may call
                `shrink` again.

        Returns:
            The new group, with the name and the time limit of this group.

        Raises:
            BackendUnavailableError: this group cannot shrink; see `missing_for_shrink`.
            InvalidArgumentError: `silence_timeout_s` is not a positive number. The group stays usable.
            RankGivenUpError: the other ranks have gone on without this rank. End this process.
            CollectiveTimeout: over MPI, a rank that still runs does not call `shrink`.
            StoreError: the store in which the ranks would meet is lost.
        """
        lack = self.missing_for_shrink()
        if lack is not None:
            raise BackendUnavailableError(f"shrink on {self.place()}: {lack}")
        return self._shrink(seconds(silence_timeout_s))

    def meets_in(self, host: ProcessGroup) -> bool:  # noqa: ARG002 - for subclasses that do
        """Whether the ranks of this group used another group, `host`, to find each other. An NCCL group may do so.

        After the loss of a rank, a new group replaces `host`. If this method returns true, call `beside` next to replace this
        group, too. If this method returns false, do not call `beside`.
        """
        return False

    def beside(self, host: ProcessGroup) -> ProcessGroup:
        """After the loss of a rank, return a group that replaces this group. The new group has the ranks of `host`.

        `host` is a group without the lost rank. `host` replaces the host group through which the ranks of this group had found
        each other. Call this method only if `meets_in` is true for the earlier host group. Abort this group first.
        """
        raise NotImplementedError  # only called if `meets_in` is true

    # ---- with newcomers ----

    def missing_for_admit(self) -> str | None:
        """Return None if `admit` can work for this group. Otherwise return a text: why not, and what to do instead."""
        return (
            f"backend '{self.backend_name}' cannot let processes in that come later; use backend 'gloo' with "
            "init_method='file:///shared/folder'"
        )

    @property
    def members(self) -> tuple[int, ...]:
        """For each rank of this group, a number that identifies its process as long as the job runs.

        After `shrink` or `admit`, a process may have another rank, but keeps this number.
        """
        return tuple(range(self.size))

    @property
    def is_waiting(self) -> bool:
        """Whether this is the one-rank group of a newcomer: a process that started later and is not admitted yet."""
        return False

    def newcomers(self) -> int:
        """Return how many newcomers (processes that want to join the running job) wait for a call of `admit`.

        Ranks may see different numbers. So before all ranks call `admit`, make them agree on one number, for example by a
        broadcast of rank 0's number. Cost: a few reads of the store.
        """
        return 0

    def admit(self, *, silence_timeout_s: float = DEFAULT_SILENCE_TIMEOUT_S, limit: int | None = None) -> ProcessGroup:
        """Make a new group from this group's members and the waiting newcomers. All members call `admit`.

        A newcomer is a process that was started with SYNCLINE_JOIN=1. A newcomer begins in a group of one rank, and calls
        `admit` on that group. In the new group, newcomers come after the old members. A member that dies during the call is
        left out.

        The method aborts this group: wait for all its calls first. Do not use this group, its sub-groups, or memory from its
        `allocate` afterwards.

        Args:
            silence_timeout_s: on a member, how many seconds to wait for another member that may still run but does not call
                `admit`; see `shrink`. On a newcomer, how many seconds to wait until the members admit it.
            limit: the largest number of newcomers that enter the group, 0 or above. The newcomers that came first enter.
                None lets all newcomers enter. If a newcomer dies during the call, no other newcomer takes its place.

        Returns:
            The new group, with the name and the time limit of this group.

        Raises:
            BackendUnavailableError: this group cannot admit newcomers; see `missing_for_admit`.
            InvalidArgumentError: `silence_timeout_s` is not a positive number, or `limit` is negative or not an integer. The
                group stays usable.
            CollectiveTimeout: the members did not admit this newcomer in time.
            RankGivenUpError: the other ranks have gone on without this rank. End this process.
            RankLostError: all members that could have admitted this newcomer are gone.
            StoreError: the store in which the ranks would meet is lost.
        """
        lack = self.missing_for_admit()
        if lack is not None:
            raise BackendUnavailableError(f"admit on {self.place()}: {lack}")
        if limit is not None and not (checks.is_integer(limit) and limit >= 0):
            self._refuse_if("admit", f"expected a limit of 0 or above, or None for all newcomers, found {limit!r}")
        return self._admit(seconds(silence_timeout_s), limit)

    # ---- the end ----

    @abstractmethod
    def close(self) -> None:
        """Finish all issued calls, then release the group's resources. All ranks call `close`. A second call does nothing.

        After this rank's calls have finished, the method waits at most 60 seconds for the other ranks to close. If a rank does
        not close in this time, the method still returns without an error.

        Raises:
            SynclineError: a call has failed, and the program has not seen the error, because nobody waited for the work.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the group without waiting for calls in flight. A rank may call this method without the other ranks.

        Call this method instead of `close` after a failure, when other ranks may never call `close`. A thread that waits for a
        call of this group gets a `TransportError`. There is one exception: over Gloo, a thread that waits for a send or receive
        goes on waiting until its time limit.
        """

    # ---- what a backend implements ----

    @abstractmethod
    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        """Issue one collective whose arguments were checked.

        Args:
            signature: the kind of the collective, with its reduction, root, dtype and shape.
            reads: tensors that are only read: the input if the output is another tensor, or one input for each rank.
            writes: tensors that are written. For a gather, one tensor for each rank on the root, and none on other ranks.
            async_op: return at once.
        """

    @abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Work: ...

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        return sparse.all_reduce(self, tensor, op, async_op)

    @abstractmethod
    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None: ...

    def _shrink(self, silence_timeout_s: float) -> ProcessGroup:
        raise NotImplementedError  # only called if `missing_for_shrink` gives None

    def _admit(self, silence_timeout_s: float, limit: int | None) -> ProcessGroup:
        raise NotImplementedError  # only called if `missing_for_admit` gives None

    def _subset(self, members: list[int], name: str, timeout_s: float) -> ProcessGroup:  # noqa: ARG002 - for subclasses that can
        raise InvalidArgumentError(
            f"subset on {self.place()}: backend '{self.backend_name}' makes groups with all ranks together only; call split "
            "on every rank"
        )

    # ---- checks of arguments ----

    def _refuse_if(self, collective: str, problem: str | None) -> None:
        if problem is not None:
            raise InvalidArgumentError(f"{collective} on {self.place()}: {problem}")

    def _check_root(self, collective: str, root: int) -> int:
        if not checks.is_integer(root) or not 0 <= int(root) < self.size:
            self._refuse_if(collective, f"expected a root in 0..{self.size - 1}, found {root!r}")
        # Ranks compare digests of the arguments' texts. An integer of another library may have another text than an int.
        return int(root)

    def _check_on_root(
        self, collective: str, what: str, tensors: Sequence[torch.Tensor] | None, like: torch.Tensor, root: int
    ) -> None:
        if self.rank == root and tensors is None:
            self._refuse_if(collective, f"this rank is the root and must pass {what}")
        if self.rank != root and tensors:
            self._refuse_if(collective, f"only the root (rank {root}) passes {what}; pass None here")
        if self.rank == root and tensors is not None:
            self._refuse_if(collective, checks.not_one_each(what.removesuffix("s"), tensors, like, self.size))

    def _check_peer(self, collective: str, peer: int | None, tag: int) -> None:
        if not checks.is_integer(tag) or int(tag) < 0:
            self._refuse_if(collective, f"expected a tag of 0 or above, found {tag!r}")
        if is_reserved(tag):
            self._refuse_if(collective, f"the tags {FIRST_RESERVED} to {LAST_RESERVED} are for Syncline itself, found {tag}")
        if peer is None and collective == "recv":  # from any rank
            return
        if not checks.is_integer(peer) or int(peer) == self.rank or not 0 <= int(peer) < self.size:  # type: ignore[arg-type]
            self._refuse_if(collective, f"expected another rank in 0..{self.size - 1}, found {peer!r}")

    def _check_tensors(
        self, collective: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        served = self.device_types
        for tensor in (*reads, *writes):
            if not checks.is_plain(tensor, served):
                self._refuse_if(collective, checks.unusable(tensor, served, self.backend_name))
        # The group carries out a call on one type of device. There, the address of a tensor on another type would be wrong.
        if len(served) > 1 and len({device_type_of(tensor) for tensor in (*reads, *writes)}) > 1:
            found = " and ".join(sorted({str(tensor.device) for tensor in (*reads, *writes)}))
            self._refuse_if(collective, f"expected all tensors on one type of device, found {found}")
        for tensor in writes:
            self._refuse_if(collective, checks.unwritable(tensor))
        # `unwritable` looks at one output at a time. Different outputs must not overwrite one another either.
        if len(writes) > 1:
            self._refuse_if(collective, checks.overlapping(writes))

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        return [tensor.shape[0] // self.size] * self.size if splits is None else list(map(int, splits))

    def _all_to_all_signature(
        self, name: str, tensor: torch.Tensor, detail: str, splits: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Signature:
        return Signature(name, device_type=device_type_of(tensor), detail=f"dtype={tensor.dtype}{detail}", splits=splits)
