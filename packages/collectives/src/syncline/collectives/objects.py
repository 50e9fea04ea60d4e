"""Collectives on Python objects, which travel as pickles. Only use them between ranks that you trust."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from .process_group import ProcessGroup


def all_gather_bytes(payload: bytes, *, group: ProcessGroup) -> list[bytes]:
    """Give every rank the bytes of all ranks, by rank. The lengths may differ.

    Two `all_gather`: one of the lengths, one of the payloads padded to the longest.
    """
    length = torch.tensor([len(payload)], dtype=torch.int64)
    lengths = [torch.empty_like(length) for _ in range(group.size)]
    group.all_gather(lengths, length)
    longest = max(int(entry) for entry in lengths)
    padded = torch.frombuffer(bytearray(payload.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
    blocks = [torch.empty_like(padded) for _ in range(group.size)]
    group.all_gather(blocks, padded)
    return [bytes(block[: int(entry)].tolist()) for block, entry in zip(blocks, lengths, strict=True)]


def all_gather_object(payload: Any, *, group: ProcessGroup) -> list[Any]:
    """Give every rank the objects of all ranks, by rank.

    Args:
        payload: anything that `pickle` takes.
        group: the group; all its ranks call.
    """
    return [pickle.loads(entry) for entry in all_gather_bytes(pickle.dumps(payload), group=group)]
