"""Whether all ranks are about to do the same."""

from __future__ import annotations

from zlib import crc32

import torch

from ..contract.collective import different_calls
from ..contract.running_call import RunningCall
from .packing import empty_block
from .transport import Transport

_SIGNATURE_BYTES = 512


def verify_call(transport: Transport, size: int, call: RunningCall) -> None:
    """Gather what all ranks are about to do: eight bytes of each, and the signatures only where these differ.

    Raises:
        DisagreementError: they are about to do different things; names them.
    """
    mine = torch.tensor([crc32(call.collective.signature().encode())], device="cpu")
    digests = empty_block(mine, size)
    transport.all_gather(digests, mine, call)
    if digests.eq(mine).all():
        return
    padded = call.collective.signature().encode()[:_SIGNATURE_BYTES].ljust(_SIGNATURE_BYTES)
    line = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    lines = empty_block(line, size)
    transport.all_gather(lines, line, call)
    rows = lines.view(size, _SIGNATURE_BYTES)
    raise different_calls([bytes(row.tolist()).decode(errors="replace").strip() for row in rows])
