"""Transfers in which a rank says what goes to which other rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from . import checks
from .collective import in_words
from .membership import Membership
from .profiling import recorded
from .work import Work


class GroupExchanges(Membership):
    """What a process group does with a tensor for each rank on both sides, and between two ranks."""

    # ---- one tensor for each rank on both sides ----

    @recorded("all_to_all")
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

        Args:
            outputs: `size` tensors of one dtype, of any shapes; `outputs[s]` on rank r as large as `inputs[r]` on rank s.
            inputs: `size` tensors of that dtype. Only read.
            async_op: return at once, before the collective has finished.

        Extra memory: a copy of the inputs and one of the outputs.
        """
        self._refuse_if("all_to_all", checks.no_tensors({"outputs": outputs, "inputs": inputs}))
        self._check_tensors("all_to_all", reads=inputs, writes=outputs)
        for what, tensors in (("output", outputs), ("input", inputs)):
            if len(tensors) != self.size:
                self._refuse_if("all_to_all", f"expected {self.size} {what} tensors, one for each rank, found {len(tensors)}")
            if any(tensor.dtype != inputs[0].dtype for tensor in tensors):
                self._refuse_if("all_to_all", f"expected every {what} to be {inputs[0].dtype}, as the first input is")
        self._refuse_if("all_to_all", checks.overlapping(outputs, inputs))
        return self._all_to_all(list(outputs), list(inputs), async_op)

    @recorded("all_to_all")
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
        self._refuse_if(name, checks.no_tensors({"output": output, "tensor": tensor}))
        self._check_tensors(name, reads=(tensor,), writes=(output,))
        self._refuse_if(name, checks.bad_splits("output", output, output_split_sizes, self.size))
        self._refuse_if(name, checks.bad_splits("input", tensor, input_split_sizes, self.size))
        if output.dtype != tensor.dtype or output.shape[1:] != tensor.shape[1:]:
            self._refuse_if(name, f"expected rows like those of {in_words(tensor)} in the output, found {in_words(output)}")
        self._refuse_if(name, checks.overlapping((output,), (tensor,)))
        return self._all_to_all_single(
            output,
            tensor,
            self._splits(output, output_split_sizes),
            self._splits(tensor, input_split_sizes),
            async_op,
        )

    # ---- two ranks ----

    @recorded("send")
    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Work:
        """Send a tensor to one rank, which calls `recv`.

        Args:
            tensor: any shape and dtype. Only read; do not write it before the work has finished.
            dst: rank in this group; not this rank.
            tag: 0 or above, and not 32,000 to 32,767, which are Syncline's own; the receiver asks for the same.
            async_op: return at once. With False it may or may not wait for the receiver.
        """
        self._check_peer("send", dst, tag)
        self._check_tensors("send", reads=(tensor,))
        return self._send(tensor, dst, tag, async_op)

    @recorded("recv")
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

    # ---- what a backend implements ----

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
