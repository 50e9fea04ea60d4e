"""broadcast_coalesced: many tensors in few broadcasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import InvalidArgumentError
from .process_group import ProcessGroup
from .work import Work

DEFAULT_BUFFER_BYTES = 250 * 1024 * 1024
_IN_FLIGHT = 2


def plan_buffers(nbytes: Sequence[int], kinds: Sequence[object], buffer_size_bytes: int) -> list[list[int]]:
    """Decide which tensors share a flat buffer. A pure function.

    Args:
        nbytes: size of each tensor in bytes.
        kinds: what must be equal within a buffer, such as (dtype, device).
        buffer_size_bytes: a buffer is closed before it would exceed this; a larger tensor has one to itself.

    Returns:
        Lists of indices; within a list ascending, and the lists by their first index.
    """
    buffers: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    for index, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        members, filled = filling.get(kind, ([], 0))
        if not members or filled + size > buffer_size_bytes:
            members, filled = [], 0
            buffers.append(members)
        members.append(index)
        filling[kind] = (members, filled + size)
    return buffers


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    *,
    group: ProcessGroup,
    root: int = 0,
    buffer_size_bytes: int = DEFAULT_BUFFER_BYTES,
) -> None:
    """Copy the root's tensors to every rank, flattened into few buffers, with two broadcasts in flight.

    Args:
        tensors: the same number, shapes and dtypes on every rank, in the same order. Read on the root, overwritten elsewhere.
        group: the group; all its ranks call.
        root: rank in the group whose values win.
        buffer_size_bytes: largest flat buffer.

    Extra memory: two buffers. Bytes on the wire: those of `broadcast` of all the tensors.

    Raises:
        InvalidArgumentError: the buffer size is not positive, or a tensor cannot be used (see `ProcessGroup.broadcast`).
    """
    if buffer_size_bytes < 1:
        raise InvalidArgumentError(f"expected buffer_size_bytes of at least 1, found {buffer_size_bytes}")
    plan = plan_buffers(
        [tensor.numel() * tensor.element_size() for tensor in tensors],
        [(tensor.dtype, tensor.device) for tensor in tensors],
        buffer_size_bytes,
    )
    flights: deque[_Flight] = deque()
    for members in plan:
        if len(flights) == _IN_FLIGHT:
            flights.popleft().land()
        flights.append(_take_off([tensors[index] for index in members], group, root))
    for flight in flights:
        flight.land()


@dataclass
class _Flight:
    """One buffer on its way, and the tensors to copy it back to (none on the root)."""

    work: Work
    buffer: torch.Tensor
    destinations: list[torch.Tensor]

    def land(self) -> None:
        self.work.wait()
        start = 0
        with torch.no_grad():
            for tensor in self.destinations:
                tensor.copy_(self.buffer[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def _take_off(tensors: list[torch.Tensor], group: ProcessGroup, root: int) -> _Flight:
    with torch.no_grad():
        buffer = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    work = group.broadcast(buffer, root, async_op=True)
    return _Flight(work, buffer, [] if group.rank == root else tensors)
