"""One rank of a job over Gloo of which some are killed, or stopped, between two collectives; see `test_shrink`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup, RankGivenUpError, TransportError, destroy_process_group, init_process_group

STEPS = 20


def total(group: ProcessGroup) -> float:
    tensor = torch.full((1000,), float(10**group.rank))
    group.all_reduce(tensor)
    return tensor[-1].item()


def fail(group: ProcessGroup) -> None:
    began_s = time.perf_counter()
    try:
        while True:
            total(group)
    except TransportError as error:
        print(f"noticed after {time.perf_counter() - began_s:.3f} s: {error}", flush=True)


def stop_and_come_back(group: ProcessGroup, folder: Path) -> None:
    """The others give this rank up while it is stopped; then one of them wakes it."""
    (folder / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    fail(group)
    try:
        group.shrink()
    except RankGivenUpError as error:
        (folder / "given-up").write_text(str(error))


def main(rank: int, world_size: int, folder: Path) -> None:
    os.environ["SYNCLINE_REPORT_DIR"] = str(folder)
    plan = (folder / "plan").read_text().split()
    what, lost = plan[0], set(map(int, plan[1:]))
    group = init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world_size, timeout=60)
    assert group.missing_for_shrink() is None
    for _ in range(STEPS):
        assert total(group) == 1111
    if rank in lost and what == "stop":
        stop_and_come_back(group, folder)
        return
    if rank in lost:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        group.set_timeout(3)  # nobody tells that a process is only stopped
    began_s = time.perf_counter()
    fail(group)
    group = group.shrink(silence_timeout_s=2 if what == "stop" else 30)
    group.set_timeout(60)
    print(f"went on after {time.perf_counter() - began_s:.3f} s", flush=True)
    survivors = [other for other in range(world_size) if other not in lost]
    assert (group.rank, group.size) == (survivors.index(rank), len(survivors))
    for _ in range(STEPS):
        assert total(group) == sum(10**number for number in range(group.size))
    part = group.split(group.rank % 2)  # sub-groups are made anew
    assert part is not None
    assert total(part) == sum(10**number for number in range(part.size))
    if what == "stop" and group.rank == 0:
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        while not (folder / "given-up").exists():
            time.sleep(0.05)
    assert total(group) == sum(10**number for number in range(group.size))  # who came back harms nobody
    part.close()
    group.close()
    destroy_process_group()  # the group that lost its ranks; it was aborted


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
