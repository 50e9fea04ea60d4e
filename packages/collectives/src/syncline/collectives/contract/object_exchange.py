"""Python objects between ranks, as pickles: use them only between ranks that you trust."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch

from .layout import contents
from .process_group import ProcessGroup
from .reduce_op import ReduceOp


def are_same_on_all_ranks(payload: bytes, *, group: ProcessGroup) -> bool:
    """Whether all ranks give the same bytes, as far as 62 bits of their SHA-256 tell.

    Cost: an all_reduce of 16 bytes, however long the payloads are: the largest digest is then also the smallest.
    """
    digest = int.from_bytes(hashlib.sha256(payload).digest()[:8], "big") >> 2
    numbers = torch.tensor([digest, -digest], dtype=torch.int64, device=_device_of(group))
    group.all_reduce(numbers, ReduceOp.MAX)
    largest, negative = numbers.tolist()
    return bool(largest == -negative)


def all_gather_bytes(payload: bytes, *, group: ProcessGroup) -> list[bytes]:
    """Give every rank the bytes of all ranks, by rank. The lengths may differ.

    Two all-gathers: one of the lengths, one of the payloads padded to the longest.
    """
    return [bytes(contents(block)[:length]) for block, length in _gathered(payload, group)]


def exchange_objects(payload: Any, *, group: ProcessGroup) -> list[Any]:
    """Give every rank the objects of all ranks, by rank."""
    return [pickle.loads(contents(block)[:length]) for block, length in _gathered(pickle.dumps(payload), group)]


def broadcast_object(payload: Any, root: int, *, group: ProcessGroup) -> Any:
    """Give every rank the root's object; what the others pass is ignored."""
    data = pickle.dumps(payload) if group.rank == root else b""
    device = _device_of(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(length, root)
    buffer = _to_tensor(data).to(device) if group.rank == root else torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(buffer, root)
    received = buffer.cpu()
    return pickle.loads(contents(received))


def _gathered(payload: bytes, group: ProcessGroup) -> list[tuple[torch.Tensor, int]]:
    """For each rank its bytes, on the CPU and padded, and how many they are."""
    device = _device_of(group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size)]
    group.all_gather(lengths, length)
    longest = max(int(entry) for entry in lengths)
    padded = _to_tensor(payload.ljust(longest, b"\0")).to(device)
    blocks = [torch.empty_like(padded) for _ in range(group.size)]
    group.all_gather(blocks, padded)
    return [(block.cpu(), int(entry)) for block, entry in zip(blocks, lengths, strict=True)]


def _device_of(group: ProcessGroup) -> torch.device:
    """Where the bytes travel: on the CPU if the group serves it, else on the GPU that this process has chosen."""
    return torch.device("cpu") if "cpu" in group.device_types else torch.device("cuda", torch.cuda.current_device())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
