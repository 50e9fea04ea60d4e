"""Helps jobs whose process 0 begins a training alone, and whose other processes join it."""

from __future__ import annotations

import os
from pathlib import Path

import syncline.horovod as hvd
from test_support.waiting import wait_until


def begin_or_join(number: int, folder: Path, may_join: Path) -> None:
    """As process 0, begin a training alone. As another process, join it when the file `may_join` exists."""
    if number:
        os.environ["SYNCLINE_JOIN"] = "1"
        wait_until(may_join.exists)
    numbers: dict[str, int] = {} if number else {"rank": 0, "world_size": 1}
    hvd.init(backend="gloo", init_method=f"file://{folder}/meeting", timeout=30, **numbers)
