"""Send Python objects between ranks, as pickles. Use these functions only between ranks that you trust."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch

from ..group import ProcessGroup
from ..reduce_op import ReduceOp
from ..tensors.layout import contents


def are_same_on_all_ranks(payload: bytes, *, group: ProcessGroup) -> bool:
    """Whether all ranks pass the same bytes. The ranks compare 62 bits of a SHA-256.

    Cost: an all_reduce of 16 bytes, for payloads of any length.
    """
    digest = int.from_bytes(hashlib.sha256(payload).digest()[:8], "big") >> 2
    # The MAX of the digests and of their negatives gives the largest and the smallest digest, in one reduction.
    numbers = torch.tensor([digest, -digest], dtype=torch.int64, device=message_device(group))
    group.all_reduce(numbers, ReduceOp.MAX)
    largest, negative = numbers.tolist()
    return bool(largest == -negative)


def all_gather_bytes(payload: bytes, *, group: ProcessGroup) -> list[bytes]:
    """Give every rank the bytes of all ranks, in the order of the ranks. The lengths may differ.

    Cost: two all-gathers: one of the lengths, and one of the payloads, padded to the longest payload.
    """
    return [bytes(contents(block)[:length]) for block, length in _gathered(payload, group)]


def exchange_objects(payload: Any, *, group: ProcessGroup) -> list[Any]:
    """Return the objects of all ranks on every rank, as a list in the order of the ranks. Every rank calls this function."""
    return [pickle.loads(contents(block)[:length]) for block, length in _gathered(pickle.dumps(payload), group)]


def broadcast_object(payload: Any, root: int, *, group: ProcessGroup) -> Any:
    """Return the root's object on every rank. The objects that other ranks pass are ignored. Every rank calls this function."""
    data = pickle.dumps(payload) if group.rank == root else b""
    device = message_device(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(length, root)
    buffer = _to_tensor(data).to(device) if group.rank == root else torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(buffer, root)
    received = buffer.cpu()
    return pickle.loads(contents(received))


def _gathered(payload: bytes, group: ProcessGroup) -> list[tuple[torch.Tensor, int]]:
    """Gather the bytes of all ranks. Returns each rank's padded bytes on the CPU, and their number without the padding."""
    device = message_device(group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size)]
    group.all_gather(lengths, length)
    longest = max(int(entry) for entry in lengths)
    padded = _to_tensor(payload.ljust(longest, b"\0")).to(device)
    blocks = [torch.empty_like(padded) for _ in range(group.size)]
    group.all_gather(blocks, padded)
    return [(block.cpu(), int(entry)) for block, entry in zip(blocks, lengths, strict=True)]


def message_device(group: ProcessGroup, otherwise: torch.device | None = None) -> torch.device:
    """The device for tensors that carry lengths and pickles between the ranks of a group: the CPU, if the group serves the CPU.

    Otherwise the result is `otherwise`, or this process's current GPU if `otherwise` is None.
    """
    if "cpu" in group.device_types:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if otherwise is None else otherwise


def _to_tensor(data: bytes) -> torch.Tensor:
    # `frombuffer` refuses a buffer without bytes.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
