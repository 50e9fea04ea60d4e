"""Ranks of two hosts find one another, whatever the hosts are called and however many interfaces they have.

The hosts are network namespaces, each with its own /etc/hosts; see `emulated_hosts`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import EmulatedHosts, check_possible
from commands import ToolError
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.launch

PYTHON = Path(sys.executable).parent
# The changes of each rank's host before it connects; $N is its number, 1 or 2.
JOB = r"""
import os, socket, subprocess, sys, time
from pathlib import Path
import torch
from syncline.collectives import SynclineError, all_reduce, destroy_process_group, init_process_group

folder, rank, way, *kinds = sys.argv[1:]
rank = int(os.environ["PMI_RANK"] if way == "mpi" else rank)
me = socket.gethostname()
others = [line for line in Path("/etc/hosts").read_text().splitlines() if me not in line]

def sh(*lines):
    subprocess.run(" && ".join(lines), shell=True, check=True, env={**os.environ, "N": str(rank + 1)})

def name(*lines):
    path = Path(folder, f"hosts.{rank}")
    path.write_text("\n".join([*lines, ""]))
    sh(f"mount --bind {path} /etc/hosts")

def link(device, address):
    sh(f"ip link add {device}0 type veth peer name {device}1", f"ip address add {address}/24 dev {device}0")
    sh(f"ip link set {device}0 up", f"ip link set {device}1 up")

def prepare(kind):
    if kind == "named":
        name(*others, f"10.213.0.{rank + 1} {me}")
    elif kind == "named 127.0.1.1":  # as Debian names it
        name(*others, f"127.0.1.1 {me}")
    elif kind == "nameless":
        name("127.0.0.1 localhost")
    elif kind == "a dead interface":  # whose address comes first
        link("a", "10.0.9.$N")
    elif kind == "version 6 only":
        name("127.0.0.1 localhost", f"fd00::{rank + 1} {me}")
        sh("ip address flush dev wire0 scope global", "ip -6 address add fd00::$N/64 dev wire0 nodad")
    elif kind == "cut off":
        sh("ip link set wire0 down")
        link("b", "10.1.$N.1")
    elif kind == "loopback chosen":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif kind == "an interface chosen":
        os.environ["GLOO_SOCKET_IFNAME"] = "wire0"
    else:
        raise ValueError(kind)

os.environ.pop("GLOO_SOCKET_IFNAME", None)
for kind in kinds:
    prepare(kind)
    Path(folder, f"{kind} {rank}").touch()
    while not Path(folder, f"{kind} {1 - rank}").exists():
        time.sleep(0.01)
    where = {} if way == "mpi" else dict(init_method=f"file://{folder}/{kind}", rank=rank, world_size=2)
    try:
        group = init_process_group("gloo", timeout=30, **where)
        tensor = torch.tensor([rank + 1.0, 10.0 * (rank + 1)])
        all_reduce(tensor)
        said = f"{tensor.tolist()}"
        destroy_process_group()
    except SynclineError as error:
        said = f"{type(error).__name__}: {error}"
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    sys.stdout.write(f"{kind}, rank {rank}: {said}\n")
    sys.stdout.flush()
"""
ENVIRON = {"OMP_NUM_THREADS": "1", "SYNCLINE_REPORT_DIR": ""}


@pytest.fixture(scope="module")
def hosts() -> Iterator[EmulatedHosts]:
    try:
        check_possible(os.geteuid())
    except ToolError as error:
        pytest.skip(str(error))
    with EmulatedHosts() as hosts:
        yield hosts


def finished(*ranks: subprocess.Popen[str]) -> str:
    try:
        said = "".join(rank.communicate(timeout=LIMIT_S)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    return said


def test_ranks_that_meet_over_mpi(hosts: EmulatedHosts, tmp_path: Path) -> None:
    """Rank 0 tells the others its addresses; no name is looked up."""
    if not (PYTHON / "mpirun").exists():
        pytest.skip(f"there is no {PYTHON / 'mpirun'}; install the extra [mpich]")
    (tmp_path / "job.py").write_text(JOB)
    kinds = ("named", "named 127.0.1.1", "nameless", "a dead interface", "an interface chosen")
    mpirun = ("mpirun", "-n", "2", "-hosts", ",".join(hosts.names), "-ppn", "1")
    words = (*mpirun, "python", "job.py", str(tmp_path), "-", "mpi", *kinds)
    environ = {**ENVIRON, "PATH": f"{PYTHON}{os.pathsep}{os.environ['PATH']}"}
    said = finished(hosts.start(f"cd {shlex.quote(str(tmp_path))} && {shlex.join(words)}", environ))
    assert sorted(said.splitlines()) == sorted(f"{kind}, rank {rank}: [3.0, 30.0]" for kind in kinds for rank in range(2))


def test_ranks_that_meet_in_a_folder(hosts: EmulatedHosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    works = ("named 127.0.1.1", "nameless", "version 6 only")
    fails = ("loopback chosen", "cut off")
    ranks = []
    for rank in range(2):
        words = (sys.executable, str(tmp_path / "job.py"), str(tmp_path), str(rank), "file", *works, *fails)
        ranks.append(hosts.start(shlex.join(words), ENVIRON, rank))
    said = finished(*ranks)
    lines = said.splitlines()
    for kind in works:
        for rank in range(2):
            assert f"{kind}, rank {rank}: [3.0, 30.0]" in lines, said
    for rank in range(2):
        assert (
            f"loopback chosen, rank {rank}: LaunchError: the job runs on several hosts, but interface lo has only loopback"
            in said
        )
        start = f"cut off, rank {rank}: LaunchError: rank 1 (host {hosts.names[1]}) reaches rank 0 at none of its addresses: "
        assert start in said, said
    assert "- 10.1.1.1: " in said, said
