"""Ranks on GPUs, for tests: each its own if there are enough, else all on one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from syncline.collectives.api.default_group import init_process_group
from syncline.collectives.group import ProcessGroup
from syncline.collectives.transports.nccl.connections import HOST_ID_VARIABLE


def choose_gpu(rank: int, size: int) -> torch.device:
    """Make a GPU the current one, before other code uses CUDA.

    With fewer GPUs than ranks, all ranks share the first one. Each rank then pretends to be on a host of its own, because NCCL
    refuses otherwise, and uses loopback sockets. This is slow, and for tests only.
    """
    own = torch.cuda.device_count() >= size
    if not own and size > 1:
        os.environ[HOST_ID_VARIABLE] = f"syncline-test-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", rank if own else 0)
    torch.cuda.set_device(device)
    return device


def connect(backend: str, rank: int, size: int, folder: Path, *, timeout_s: float = 60.0) -> ProcessGroup:
    """The default group of processes that `run_processes` started: they meet in a file of the folder."""
    return init_process_group(
        backend, init_method=f"file://{folder}/{backend.replace(':', '-')}", rank=rank, world_size=size, timeout=timeout_s
    )
