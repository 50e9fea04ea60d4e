"""One rank of a job that meets by a folder, by an address (twice) and in a store; see `test_rendezvous`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, all_reduce, destroy_process_group, init_process_group
from syncline.collectives.stores import FileStore


def listening() -> set[str]:
    """The local addresses, as the kernel writes them, on which this process listens."""
    handles = [f"/proc/self/fd/{handle}" for handle in os.listdir("/proc/self/fd")]
    mine = {os.readlink(handle) for handle in handles if os.path.islink(handle)}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    return {fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine}


def check(group: ProcessGroup, rank: int) -> None:
    assert (group.rank, group.size) == (rank, 2)
    tensor = torch.tensor([rank + 1.0])
    all_reduce(tensor)
    assert tensor.item() == 3
    half = group.split(0)  # meets in the same store again
    assert half is not None
    half.all_reduce(tensor)
    assert tensor.item() == 6
    assert not {"00000000", "0" * 32} & listening(), "a socket listens on all addresses"
    half.close()
    destroy_process_group()


def main(rank: int, folder: Path) -> None:
    address = f"tcp://127.0.0.1:{(folder / 'port').read_text()}?secret_file={folder}/secret"
    for url in (f"file://{folder}/meeting", address, address):
        check(init_process_group("gloo", url, timeout=60, world_size=2, rank=rank), rank)
    for store in (FileStore(folder, "ours"), dist.FileStore(str(folder / "torch"), 2)):
        check(init_process_group(timeout=60, world_size=2, rank=rank, store=store), rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
