"""Operators that compiled programs call on a group by its name, and that C++ does not hand to a group in Python.

torch.compile makes functional operators of collectives. Most reach our groups. Three end at the group's C++ backend instead, of
which ours have none: those that write into a given tensor (the compiler's bucketing of FSDP makes them), and batches of
transfers. A kernel of ours stands before torch's own for these three; it hands calls on groups that are not ours to torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..tensors import checks
from ..torch_internals import group_named, register_work
from .call_issuer import CallIssuer

_OPERATORS = "_c10d_functional"
_served: dict[str, torch.library.Library] = {}


def serve(device_types: frozenset[str]) -> None:
    """Serve the operators for tensors on these devices, from now on. A second call is harmless.

    Without `get_kernel` of torch.library, torch's own stay, and say that there is no backend.
    """
    for device in device_types - _served.keys():
        if not hasattr(torch.library, "get_kernel"):
            return
        library: Any = torch.library.Library(_OPERATORS, "IMPL")  # type: ignore[no-untyped-call]
        _served[device] = library
        for name, ours in _KERNELS.items():
            if not hasattr(torch.ops._c10d_functional, name):  # torch 2.10 has no batches, so no program calls one
                continue
            torchs = torch.library.get_kernel(f"{_OPERATORS}::{name}", device.upper())
            library.impl(name, partial(_either, ours, torchs), device.upper(), with_keyset=True)


def _either(ours: Callable[..., Any], torchs: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call our kernel, if the group, the last argument, is ours."""
    *rest, named = args
    group = group_named(named) if isinstance(named, str) else dist.ProcessGroup.unbox(named)
    if isinstance(group, CallIssuer):
        return ours(group, *rest, **kwargs)
    return torchs.call_boxed(keys, *args, **kwargs)


def _all_gather_into_tensor_out(group: Any, tensor: torch.Tensor, _: int, *, out: torch.Tensor) -> torch.Tensor:
    return _registered(out, group.all_gather_single(out, _apart(tensor, out, group)))


def _reduce_scatter_tensor_out(group: Any, tensor: torch.Tensor, word: str, _: int, *, out: torch.Tensor) -> torch.Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, word.upper())
    return _registered(out, group.reduce_scatter_single(out, _apart(tensor, out, group), options))


def _apart(tensor: torch.Tensor, out: torch.Tensor, group: Any) -> torch.Tensor:
    """The input, copied if it shares memory with the output in another way than as this rank's part.

    The compiler keeps programs on disk, and a rank may find there what another rank has compiled, with the part of that one.
    """
    part, block = (tensor, out) if tensor.numel() < out.numel() else (out, tensor)
    return tensor if checks.not_own_part(part, block, group.rank()) is None else tensor.clone()


def _batch_p2p_ops(
    group: Any, kinds: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    done = []
    for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
        receives = kind == "irecv"
        work = (group.recv if receives else group.send)([tensor], peer, tag)
        done.append(_registered(tensor if receives else tensor.new_empty(0), work))
    return done


def _registered(result: torch.Tensor, work: dist.Work) -> torch.Tensor:
    """The result, for which torch's `wait_tensor` waits."""
    register_work(result, work.wait)
    return result


_KERNELS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    "batch_p2p_ops": _batch_p2p_ops,
}
