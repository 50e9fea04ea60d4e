"""Kernels for three operators of compiled programs. torch's kernels call a C++ backend, which Syncline's groups do not have.

Two of the operators write into a given tensor, for the buckets of FSDP; the third is for batches of sends and receives.

Note [Kernels of torch and the GIL]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A kernel of torch that is called from Python (`call_boxed`) keeps the GIL. A kernel that puts a collective into the queue of a
Gloo group waits for the queue's lock. The queue's thread may hold this lock while it drops a tensor that Python has seen. To
drop the tensor, the queue's thread needs the GIL, so both threads wait for ever. So two of our kernels also serve torch's
groups: they call a method of the group, and this method releases the GIL. Batches of sends and receives on torch's groups do
not use the queue, and still go to torch's kernel.
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
    """Register Syncline's kernels (see the module `compiled`) for these types of device. A second call does nothing.

    If torch.library has no `get_kernel`, torch's own kernels stay. On Syncline's groups, torch's own kernels raise an error,
    which says that the group has no backend.
    """
    for device in device_types - _served.keys():
        if not hasattr(torch.library, "get_kernel"):
            return
        library: Any = torch.library.Library(_OPERATORS, "IMPL")  # type: ignore[no-untyped-call]
        # Keep the library for ever: torch removes the kernels of a library that is freed.
        _served[device] = library
        for name in _KERNELS:
            if not hasattr(torch.ops._c10d_functional, name):  # torch 2.10 has no operator for batches
                continue
            torchs = torch.library.get_kernel(f"{_OPERATORS}::{name}", device.upper())
            library.impl(name, partial(_either, name, torchs), device.upper(), with_keyset=True)


def _either(name: str, torchs: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    # The operator's last argument is the group, or the group's name.
    *rest, named = args
    group = group_named(named) if isinstance(named, str) else dist.ProcessGroup.unbox(named)
    if name == "batch_p2p_ops" and not isinstance(group, CallIssuer):
        return torchs.call_boxed(keys, *args, **kwargs)
    return _KERNELS[name](group, *rest, **kwargs)


def _all_gather_into_tensor_out(group: Any, tensor: torch.Tensor, _: int, *, out: torch.Tensor) -> torch.Tensor:
    return _registered(out, group._allgather_base(out, _apart(tensor, out, group)))


def _reduce_scatter_tensor_out(group: Any, tensor: torch.Tensor, word: str, _: int, *, out: torch.Tensor) -> torch.Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, word.upper())
    return _registered(out, group._reduce_scatter_base(out, _apart(tensor, out, group), options))


def _apart(tensor: torch.Tensor, out: torch.Tensor, group: Any) -> torch.Tensor:
    """Return `tensor`, or a copy if `tensor` and `out` overlap, but neither is this rank's part of the other.

    torch.compile caches programs on disk, so this rank may run a program that was compiled for another rank's part.
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
    register_work(result, work.wait)
    return result


_KERNELS: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    "batch_p2p_ops": _batch_p2p_ops,
}
