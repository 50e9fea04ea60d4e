"""Checks of broadcast_coalesced, which must give the result of single broadcasts."""

from __future__ import annotations

import torch

from ...api.coalescing import broadcast_coalesced
from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from .values import LAYOUTS, MOVABLE_DTYPES, Check, Laid, expect, expect_raises, values

_BUFFER_SIZES_BYTES = (1, 40, 1000, 250 * 1024 * 1024)


def every_buffer_size(group: ProcessGroup) -> None:
    """Check broadcast_coalesced with every root, and with buffer sizes below and above the tensors' sizes."""
    shapes = [(3,), (), (0,), (500,), (7, 9), (1,), (2, 0, 3), (300,), (4, 4)]
    for root in range(group.size):
        for size_bytes in _BUFFER_SIZES_BYTES:
            tensors = [values(shape, group.rank + 3 * n) for n, shape in enumerate(shapes)]
            broadcast_coalesced(tensors, group=group, root=root, buffer_size_bytes=size_bytes)
            for n, tensor in enumerate(tensors):
                expect(tensor, values(shapes[n], root + 3 * n), f"tensor {n} with buffers of {size_bytes} bytes")


def mixed_dtypes(group: ProcessGroup) -> None:
    """Check broadcast_coalesced with tensors of alternating dtypes. A buffer holds one dtype."""
    root = group.size - 1
    dtypes = MOVABLE_DTYPES * 2
    for size_bytes in _BUFFER_SIZES_BYTES:
        tensors = [values((n % 7 + 1,), group.rank + n, dtype) for n, dtype in enumerate(dtypes)]
        broadcast_coalesced(tensors, group=group, root=root, buffer_size_bytes=size_bytes)
        for n, dtype in enumerate(dtypes):
            expect(tensors[n], values((n % 7 + 1,), root + n, dtype), f"tensor {n}, {dtype}, {size_bytes} bytes")


def every_layout(group: ProcessGroup) -> None:
    """Check broadcast_coalesced with every layout. The memory between a tensor's elements must not change."""
    root = group.size // 2
    laid = [Laid(layout, values(layout.shape, group.rank)) for layout in LAYOUTS]
    broadcast_coalesced([one.tensor for one in laid], group=group, root=root, buffer_size_bytes=100)
    for layout, one in zip(LAYOUTS, laid, strict=True):
        one.expect(values(layout.shape, root))


def nothing_to_send(group: ProcessGroup) -> None:
    """Check that broadcast_coalesced accepts an empty list, and refuses an invalid buffer size."""
    broadcast_coalesced([], group=group)
    for size_bytes in (0, -1):

        def call(size_bytes: int = size_bytes) -> None:
            broadcast_coalesced([torch.ones(1)], group=group, buffer_size_bytes=size_bytes)

        expect_raises(InvalidArgumentError, call, "buffer size", str(size_bytes))


def model_state(group: ProcessGroup) -> None:
    """Check broadcast_coalesced of the parameters and buffers of a module."""
    torch_state = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    tensors = [*torch_state.parameters(), *torch_state.buffers()]
    with torch.no_grad():
        for n, tensor in enumerate(tensors):
            tensor.copy_(values(tensor.shape, group.rank + n, tensor.dtype))
    broadcast_coalesced(tensors, group=group, buffer_size_bytes=20)
    for n, tensor in enumerate(tensors):
        expect(tensor.detach(), values(tensor.shape, n, tensor.dtype), f"tensor {n} of the module")


CHECKS: dict[str, Check] = {
    "coalesced_every_buffer_size": every_buffer_size,
    "coalesced_mixed_dtypes": mixed_dtypes,
    "coalesced_every_layout": every_layout,
    "coalesced_nothing_to_send": nothing_to_send,
    "coalesced_model_state": model_state,
}
