"""A process of a job that gives torch.distributed its default group, and changes: RENEWING_JOB NUMBER COUNT FOLDER.

Rank 2 of three is killed. Then process 3 joins the two that are left.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.collectives import (
    ProcessGroup,
    TransportError,
    as_process_group,
    destroy_process_group,
    get_default_group,
    init_process_group,
)
from syncline.collectives.internal import replace_default_group
from syncline.collectives.torch_backend import share_default_group
from test_support.waiting import wait_until


def check(size: int) -> None:
    """torch.distributed has our default group, and its groups, collectives and store work."""
    ours = get_default_group()
    assert as_process_group(dist.group.WORLD) is ours
    assert (dist.get_rank(), dist.get_world_size()) == (ours.rank, size)
    for group in (None, dist.new_group(range(size)), dist.new_group(backend="gloo")):
        tensor = torch.tensor([ours.rank + 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == size * (size + 1) / 2
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    assert store.add("ranks", 1) <= size
    wait_until(lambda: store.add("ranks", 0) == size)


def go_on(make: Callable[[], ProcessGroup]) -> None:
    old = get_default_group()
    assert replace_default_group(old, make())


def main(number: int, folder: Path) -> None:
    os.environ["SYNCLINE_REPORT_DIR"] = str(folder)
    meeting = f"file://{folder}/meeting"
    if number == 3:
        wait_until((folder / "lost").exists)
        os.environ["SYNCLINE_JOIN"] = "1"
        group = init_process_group("gloo", meeting, timeout=60)
        share_default_group()
    else:
        group = init_process_group("gloo", meeting, rank=number, world_size=3, timeout=60)
        share_default_group()
        check(3)
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                dist.all_reduce(torch.ones(1))
        except TransportError:
            go_on(group.shrink)
        check(2)
        (folder / "lost").touch()
        group = get_default_group()
        wait_until(lambda: group.newcomers() == 1)
    go_on(group.admit)
    check(3)
    dist.destroy_process_group()
    destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
