"""Collectives that reduce, copy, gather and scatter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from . import checks, sparse, uneven
from .membership import Membership
from .profiling import recorded
from .reduce_op import ReduceOp, Reduction
from .torch_reduction import checked_reduction
from .work import Work


class GroupCollectives(Membership):
    """What a process group does with one tensor of each rank, or with one for each rank on one side."""

    # ---- one tensor on each rank ----

    @recorded("all_reduce")
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks; every rank ends with the same bits.

        Args:
            tensor: any shape, the same on every rank; a dtype that `op` is defined for. Overwritten with the result. May be
                sparse (COO, with different elements present on each rank) for SUM, AVG and `premul_sum`; see `sparse`.
            op: see `ReduceOp` and `premul_sum`; torch's are taken, too.
            async_op: return at once, before the collective has finished.

        Raises:
            InvalidArgumentError: the dtype has no such reduction.
        """
        if not checks.is_plain(tensor, self.device_types):
            if getattr(tensor, "layout", None) is torch.sparse_coo:
                op = checked_reduction(op, tensor.dtype)
                return self._all_reduce_sparse(tensor, op, async_op)
            self._check_tensors("all_reduce", writes=(tensor,))
        op = checked_reduction(op, tensor.dtype)
        return self._all_reduce(tensor, op, async_op)

    @recorded("reduce")
    def reduce(self, tensor: torch.Tensor, root: int = 0, op: Reduction = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        """Combine the tensors of all ranks on the root.

        Args:
            tensor: as for `all_reduce`. Overwritten with the result on the root; elsewhere only read.
            root: rank in this group.
            op: see `ReduceOp` and `premul_sum`; torch's are taken, too.
            async_op: return at once, before the collective has finished.
        """
        self._check_root("reduce", root)
        self._check_tensors("reduce", writes=(tensor,))
        op = checked_reduction(op, tensor.dtype)
        return self._reduce(tensor, root, op, async_op)

    @recorded("broadcast")
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

    @recorded("all_gather")
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks.

        Args:
            outputs: `size` tensors with the shape and dtype of `tensor`; number r is overwritten with rank r's.
            tensor: any shape and dtype, the same on every rank. Only read; may be one of the outputs.
            async_op: return at once, before the collective has finished.

        Extra memory: one block as large as all outputs together.
        """
        self._refuse_if("all_gather", checks.no_tensors({"tensor": tensor, "outputs": outputs}))
        self._check_tensors("all_gather", reads=(tensor,), writes=outputs)
        self._refuse_if("all_gather", checks.not_one_each("output", outputs, tensor, self.size))
        return self._all_gather(list(outputs), tensor, async_op)

    @recorded("_all_gather_base")
    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """Give every rank the tensors of all ranks, one after the other in one tensor.

        Args:
            output: `size` times the elements of `tensor`, same dtype, any shape. Overwritten.
            tensor: any shape and dtype, the same on every rank. Only read; may be this rank's own part of `output`.
            async_op: return at once, before the collective has finished.
        """
        self._refuse_if("all_gather_into_tensor", checks.no_tensors({"tensor": tensor, "output": output}))
        self._check_tensors("all_gather_into_tensor", reads=(tensor,), writes=(output,))
        self._refuse_if("all_gather_into_tensor", checks.not_times(output, tensor, self.size, "output"))
        self._refuse_if("all_gather_into_tensor", checks.not_own_part(tensor, output, self.rank))
        return self._all_gather_into_tensor(output, tensor, async_op)

    @recorded("gather")
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
        self._refuse_if("gather", checks.no_tensors({"tensor": tensor, "outputs": outputs}))
        self._check_tensors("gather", reads=(tensor,), writes=outputs or ())
        self._check_on_root("gather", "outputs", outputs, tensor, root)
        return self._gather(tensor, None if outputs is None else list(outputs), root, async_op)

    @recorded("scatter")
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
        self._refuse_if("scatter", checks.no_tensors({"tensor": tensor, "inputs": inputs}))
        self._check_tensors("scatter", reads=inputs or (), writes=(tensor,))
        self._check_on_root("scatter", "inputs", inputs, tensor, root)
        return self._scatter(tensor, None if inputs is None else list(inputs), root, async_op)

    @recorded("reduce_scatter")
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the lists of all ranks, tensor by tensor, and give rank r the r-th result.

        Args:
            output: like `inputs[rank]`; a dtype that `op` is defined for. Overwritten.
            inputs: `size` tensors; number r has the same shape on every rank. Only read. They may differ in shape, also in
                whether they have elements at all: that costs one `reduce` for each rank.
            op: see `ReduceOp` and `premul_sum`; torch's are taken, too.
            async_op: return at once, before the collective has finished.

        Extra memory: one block as large as all inputs together.
        """
        self._refuse_if("reduce_scatter", checks.no_tensors({"output": output, "inputs": inputs}))
        self._check_tensors("reduce_scatter", reads=inputs, writes=(output,))
        op = checked_reduction(op, output.dtype)
        if uneven.is_uneven(inputs):
            self._refuse_if("reduce_scatter", checks.not_one_each_like("input", inputs, output, self.rank, self.size))
            self._refuse_if("reduce_scatter", checks.overlapping((output,), inputs))
            return uneven.reduce_scatter(self, output, inputs, op, async_op)
        self._refuse_if("reduce_scatter", checks.not_one_each("input", inputs, output, self.size))
        return self._reduce_scatter(output, list(inputs), op, async_op)

    @recorded("_reduce_scatter_base")
    def reduce_scatter_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, async_op: bool = False
    ) -> Work:
        """Combine the tensors of all ranks and give rank r the r-th part of the result.

        Args:
            output: any shape; a dtype that `op` is defined for. Overwritten; may be this rank's own part of `tensor`.
            tensor: `size` times the elements of `output`, same dtype, any shape. Only read.
            op: see `ReduceOp` and `premul_sum`; torch's are taken, too.
            async_op: return at once, before the collective has finished.
        """
        self._refuse_if("reduce_scatter_tensor", checks.no_tensors({"output": output, "tensor": tensor}))
        self._check_tensors("reduce_scatter_tensor", reads=(tensor,), writes=(output,))
        op = checked_reduction(op, output.dtype)
        self._refuse_if("reduce_scatter_tensor", checks.not_times(tensor, output, self.size, "input"))
        self._refuse_if("reduce_scatter_tensor", checks.not_own_part(output, tensor, self.rank))
        return self._reduce_scatter_tensor(output, tensor, op, async_op)

    # ---- what a backend implements ----

    def _all_reduce_sparse(self, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
        return sparse.all_reduce(self, tensor, op, async_op)

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
