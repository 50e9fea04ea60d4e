"""Collectives on Python objects, which travel as pickles: use them only between ranks that you trust.

The functions named as in torch.distributed have its arguments; `exchange_objects` is what they are made of.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from .errors import InvalidArgumentError
from .process_group import ProcessGroup
from .world import rank_in, resolve_group


def all_gather_bytes(payload: bytes, *, group: ProcessGroup) -> list[bytes]:
    """Give every rank the bytes of all ranks, by rank. The lengths may differ.

    Two all-gathers: one of the lengths, one of the payloads padded to the longest.
    """
    device = _device_of(group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size)]
    group.all_gather(lengths, length)
    longest = max(int(entry) for entry in lengths)
    padded = _to_tensor(payload.ljust(longest, b"\0")).to(device)
    blocks = [torch.empty_like(padded) for _ in range(group.size)]
    group.all_gather(blocks, padded)
    return [_to_bytes(block)[: int(entry)] for block, entry in zip(blocks, lengths, strict=True)]


def exchange_objects(payload: Any, *, group: ProcessGroup) -> list[Any]:
    """Give every rank the objects of all ranks, by rank."""
    return [pickle.loads(entry) for entry in all_gather_bytes(pickle.dumps(payload), group=group)]


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Fill `object_list` (one place for each rank) with the objects of all ranks."""
    chosen = resolve_group(group)
    if len(object_list) != chosen.size:
        raise InvalidArgumentError(
            f"all_gather_object on {chosen.place()}: expected a list with {chosen.size} places, found {len(object_list)}"
        )
    object_list[:] = exchange_objects(obj, group=chosen)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Fill the root's `object_gather_list` with the objects of all ranks; the others pass None."""
    chosen = resolve_group(group)
    root = rank_in(chosen, dst, group_dst, default=0)
    if (chosen.rank == root) != (object_gather_list is not None):
        expected = "a list" if chosen.rank == root else "None, for it is not the root"
        raise InvalidArgumentError(f"gather_object on {chosen.place()}: expected {expected} as object_gather_list")
    objects = exchange_objects(obj, group=chosen)
    if object_gather_list is not None:
        object_gather_list[:] = objects


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Overwrite `object_list` with the root's; all lists are of one length."""
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src, default=0)
    received = _broadcast_object(list(object_list), root, chosen)
    if len(received) != len(object_list):
        raise InvalidArgumentError(
            f"broadcast_object_list on {chosen.place()}: expected a list of {len(received)} places as on the root, "
            f"found {len(object_list)}"
        )
    object_list[:] = received


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Put this rank's entry of the root's list into `scatter_object_output_list[0]`; the others pass no input."""
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src, default=0)
    if not scatter_object_output_list:
        raise InvalidArgumentError(f"scatter_object_list on {chosen.place()}: expected an output list with a place, found none")
    if chosen.rank == root and len(scatter_object_input_list or ()) != chosen.size:
        raise InvalidArgumentError(
            f"scatter_object_list on {chosen.place()}: expected {chosen.size} objects on the root, found "
            f"{len(scatter_object_input_list or ())}"
        )
    entries = _broadcast_object([pickle.dumps(entry) for entry in scatter_object_input_list or ()], root, chosen)
    scatter_object_output_list[0] = pickle.loads(entries[chosen.rank])


def _broadcast_object(payload: Any, root: int, group: ProcessGroup) -> Any:
    data = pickle.dumps(payload) if group.rank == root else b""
    device = _device_of(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(length, root)
    buffer = _to_tensor(data).to(device) if group.rank == root else torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(buffer, root)
    return pickle.loads(_to_bytes(buffer))


def _device_of(group: ProcessGroup) -> torch.device:
    """Where the bytes travel: on the CPU if the group serves it, else on the GPU that this process has chosen."""
    return torch.device("cpu") if "cpu" in group.device_types else torch.device("cuda", torch.cuda.current_device())


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def _to_bytes(tensor: torch.Tensor) -> bytes:
    on_cpu = tensor.cpu()
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.numel())
