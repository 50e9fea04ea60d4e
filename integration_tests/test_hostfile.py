"""The README's `mpirun --hostfile` from one host to another, without a scheduler. The hosts are network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import EmulatedHosts, check_possible
from commands import ToolError
from test_support.jobs import LIMIT_S

README = Path(__file__).parent.parent / "README.md"
PYTHON = Path(sys.executable).parent
TRAIN = """
import torch
from syncline.collectives import all_reduce, destroy_process_group, init_process_group, placement_of
from syncline.ddp import DistributedDataParallel

group = init_process_group(timeout=60)
torch.manual_seed(group.rank)
model = torch.nn.Linear(4, 1, bias=False)
parallel = DistributedDataParallel(model)
parallel(torch.eye(4) * (group.rank + 1)).sum().backward()
place = f"rank {group.rank} of {group.size} on node {placement_of(group).node}"
print(f"{place}: {model.weight.grad.tolist()[0]}\\n", end="", flush=True)
destroy_process_group()
"""


@pytest.mark.launch
def test_readme_starts_ranks_on_other_hosts(tmp_path: Path) -> None:
    try:
        check_possible(os.geteuid())
    except ToolError as error:
        pytest.skip(str(error))
    if not (PYTHON / "mpirun").exists():
        pytest.skip(f"there is no {PYTHON / 'mpirun'}; install the extra [mpich]")
    (documented,) = re.findall(r"mpirun -n \d+ --hostfile hosts python train\.py", README.read_text())
    (tmp_path / "train.py").write_text(TRAIN)
    with EmulatedHosts() as hosts:
        (tmp_path / "hosts").write_text("".join(f"{name}:2\n" for name in hosts.names))
        line = f"cd {shlex.quote(str(tmp_path))} && " + re.sub(r"-n \d+", "-n 4", documented)
        job = hosts.start(line, {"PATH": f"{PYTHON}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"})
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    assert job.returncode == 0, output
    mean = [2.5] * 4
    assert sorted(output.split("\n")) == ["", *(f"rank {rank} of 4 on node {rank // 2}: {mean}" for rank in range(4))]
