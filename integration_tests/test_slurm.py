"""The documentation's scripts for Slurm, and the batch files of the gallery, on a Slurm cluster of two nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from test_support.full_run import cases
from test_support.slurm_cluster import SlurmCluster, what_is_missing
from test_support.waiting import wait_until

pytestmark = pytest.mark.launch

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "slurm.md"
SCRIPTS = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL))
# Jobs that train until they are told to end sleep between steps, to leave the cores to others.
_BEFORE, _AFTER = SCRIPTS["train.py"].split("    step += 1\n")
SCRIPTS["train.py"] = f"import time\n{_BEFORE}    step += 1\n    time.sleep(0.02)\n{_AFTER}"
GALLERY = PAGE.parent.parent.parent / "examples"
SCRIPTS |= {path.name: path.read_text() for path in (*GALLERY.glob("*.py"), *GALLERY.glob("slurm/*.sbatch"))}
(_ASK,) = re.findall(r"`(scancel --signal=USR1[^`]*) JOB`", PAGE.with_name("find-a-hang.md").read_text())
ASK_FOR_REPORTS = _ASK.split()
PYTHON = Path(sys.executable).parent
FOR_EVER = str(10**9)
JOB_S = 120.0  # to load torch, and the time limit of train.py: a group that waits for a rank names it
_ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
"""Slurm's last states of a job; meanwhile it shows RUNNING, and also COMPLETING, SIGNALING or STAGE_OUT."""

# There are more ranks than cores, so ranks yield while they wait.
ENVIRONMENT = {
    "PATH": f"{PYTHON}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Debian's Open MPI is built for PMIx.
OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    lack = what_is_missing(os.geteuid())
    if lack is not None:
        pytest.skip(lack)
    with SlurmCluster() as cluster:
        yield cluster


class Job:
    """A submitted script of the documentation; its output is that of all its steps."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        script: str,
        *options: str,
        arguments: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
        self._cluster = cluster
        self._output = folder / f"{script}.out"
        self._output.touch()
        words = ["sbatch", "--parsable", f"--output={self._output}", "--open-mode=append", *options, script, *arguments]
        submitted = cluster.start(words, folder, {**ENVIRONMENT, **variables})
        said, _ = submitted.communicate(timeout=JOB_S)
        assert submitted.returncode == 0, said
        self.id = said.strip().split(";")[0]

    def wait_for(self, pattern: str) -> None:
        """Wait until its output matches."""
        self._until(lambda: re.search(pattern, self.output) is not None, f"it says {pattern!r}")

    def has_checkpoint(self) -> bool:
        return (self.folder / "checkpoint.pt").exists()

    def wait_for_checkpoint(self) -> None:
        """Wait until it has trained for a while."""
        self._until(self.has_checkpoint, "it saves its state")

    def wait(self) -> str:
        """Wait until it has ended; returns its state, such as COMPLETED."""
        self._until(lambda: self._state() in _ENDED, "it ends")
        return self._state()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def _state(self) -> str:
        shown = self._cluster.call("scontrol", "--oneliner", "show", "job", self.id)
        states = re.findall(r"\bJobState=(\w+)", shown)
        return next((state for state in states if state not in _ENDED), states[0])

    def _until(self, is_so: Callable[[], bool], words: str) -> None:
        end_s = time.monotonic() + JOB_S
        while not is_so():
            if time.monotonic() > end_s:
                state = self._cluster.call("scontrol", "show", "job", self.id)
                self._cluster.call("scancel", "--full", self.id)
                pytest.fail(f"waited {JOB_S:g} s until {words}; it printed:\n{self.output}\n{state}\n{self._cluster.logs()}")
            time.sleep(0.2)


@pytest.fixture
def submit(cluster: SlurmCluster, tmp_path: Path) -> Callable[..., Job]:
    def submit(script: str, *options: str, arguments: Sequence[str] = (), **variables: str) -> Job:
        return Job(cluster, tmp_path / script, script, *options, arguments=arguments, **variables)

    return submit


@pytest.fixture
def open_mpi() -> dict[str, str]:
    """Variables that make a job use the system's Open MPI instead of this environment's MPICH."""
    if not OPEN_MPI.exists():
        pytest.skip(f"there is no {OPEN_MPI}; on Debian and Ubuntu: apt install openmpi-bin")
    # All nodes are this machine. By default Open MPI takes each network that it finds, also one that another test removes soon.
    return {"MPI4PY_LIBMPI": str(OPEN_MPI), "OMPI_MCA_btl_tcp_if_include": "lo"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("pmix.sbatch", "2 ranks over mpi: Open MPI"),
        ("pmi2.sbatch", "4 ranks over mpi: MPICH"),
        ("gloo.sbatch", "2 ranks over gloo"),
        ("heterogeneous.sbatch", "3 ranks over mpi: Open MPI"),
    ],
)
def test_every_way_to_connect(submit, request: pytest.FixtureRequest, script: str, said: str) -> None:
    variables = request.getfixturevalue("open_mpi") if "Open MPI" in said else {}
    job = submit(script, STEPS="5", **variables)
    assert job.wait() == "COMPLETED", job.output
    # All nodes of this cluster are at 127.0.0.1. For ranks that meet at a node's name, rank 0 warns of this first.
    assert f"\n{said}" in f"\n{job.output}", job.output
    assert job.output.endswith("finished after step 5\n"), job.output
    assert not list(job.folder.glob("secret-*")), "the secret outlived its job"


@pytest.mark.timeout(400)  # torchrun loads torch once more than the ranks
@pytest.mark.parametrize(
    ("batch_file", "said"),
    cases(
        [("torchrun.sbatch", "2 ranks over gloo"), ("syncline_run.sbatch", "2 ranks on 2 nodes")],
        in_full=[
            ("srun_pmix.sbatch", "2 ranks over mpi: Open MPI"),
            ("srun_pmi2.sbatch", "2 ranks over mpi: MPICH"),
            ("mpirun.sbatch", "2 ranks over mpi: MPICH"),
        ],
    ),
)
def test_every_batch_file_of_the_gallery(submit, request: pytest.FixtureRequest, batch_file: str, said: str) -> None:
    """On one rank of each node. A training of one epoch; `syncline run` gets a script for torchrun."""
    pytest.importorskip("sklearn", reason="the script's images are in scikit-learn")
    needs_open_mpi = batch_file in {"srun_pmix.sbatch", "syncline_run.sbatch"}
    variables = request.getfixturevalue("open_mpi") if needs_open_mpi else {}
    arguments = ["native.py"] if batch_file == "syncline_run.sbatch" else ["image_classification.py", "--epochs=1"]
    job = submit(batch_file, "--ntasks-per-node=1", arguments=arguments, STEPS="3", **variables)
    assert job.wait() == "COMPLETED", job.output
    assert re.search(rf"(?m)^{re.escape(said)}", job.output), job.output
    assert re.search(r"(?m)\bloss (of )?\d", job.output), job.output


@pytest.mark.timeout(400)  # torch's DistributedDataParallel loads much
def test_a_script_for_torchrun(cluster: SlurmCluster, submit, open_mpi, tmp_path: Path) -> None:
    """Unmodified, by `syncline run`: over MPI, and without MPI by Slurm's variables. The losses are the same."""
    job = submit("run.sbatch", STEPS="3", **open_mpi)
    assert job.wait() == "COMPLETED", job.output
    words = ["srun", "-N2", "-n4", "--mpi=none", "python", "-m", "syncline.collectives", "run", "native.py"]
    without_mpi = cluster.start(words, job.folder, {**ENVIRONMENT, "STEPS": "3"})
    said, _ = without_mpi.communicate(timeout=JOB_S)
    assert without_mpi.returncode == 0, said
    results = [re.findall(r"(?m)^4 ranks on 2 nodes end with a loss of \d+\.\d+$", output) for output in (job.output, said)]
    assert results[0], job.output
    assert results[0] == results[1], said
    assert said.count("no MPI carries these 4 ranks: Slurm started 4 rank(s), but MPICH") == 1, said


def test_libraries_that_srun_cannot_start_are_told_before_they_die(cluster: SlurmCluster, tmp_path: Path) -> None:
    """MPICH from PyPI has no PMIx.

    Over UCX its addresses may be too long for Slurm's PMI-2. With neither, its ranks are alone.
    """
    doctor = ("python", "-m", "syncline.collectives", "doctor")
    init = ("python", "-c", "from syncline.collectives import init_process_group; init_process_group()")
    by_hand = f"if [ $SLURM_PROCID = 0 ]; then {shlex.join(init)}; fi"  # typed by a user in the shell of rank 0
    shell = shlex.join(("srun", "-N1", "-n2", "--pty", "sh", "-c", by_hand))
    jobs = {
        name: cluster.start([*words], tmp_path, {**ENVIRONMENT, **variables})
        for name, words, variables in (
            ("doctor pmix", ("srun", "-N2", "-n2", "--mpi=pmix", *doctor), {}),
            ("doctor pmi2", ("srun", "-N2", "-n2", "--mpi=pmi2", *doctor), {}),
            ("over OFI", ("srun", "-N2", "-n2", "--mpi=pmi2", *doctor), {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
            ("init pmix", ("srun", "-N2", "-n2", "--mpi=pmix", *init), {}),
            ("init none", ("srun", "-N2", "-n2", *init), {}),
            ("a shell", ("script", "--quiet", "--return", "--command", shell, "/dev/null"), {}),
        )
    }
    said = {name: " ".join(process.communicate(timeout=JOB_S)[0].split()) for name, process in jobs.items()}

    assert jobs["over OFI"].returncode == 0, said["over OFI"]
    assert "2 node(s), 2 rank(s): n0 with 1 (ranks 0), n1 with 1 (ranks 1)" in said["over OFI"]
    for name in ("doctor pmix", "doctor pmi2", "init pmix"):
        assert jobs[name].returncode != 0, said[name]
        assert "Abort(" not in said[name], said[name]
    assert "WRONG MPI" in said["doctor pmix"], said["doctor pmix"]
    assert "LaunchError: " in said["init pmix"], said["init pmix"]
    for name in ("doctor pmix", "init pmix"):
        assert "srun --mpi=pmix started this process, but does not work with MPICH from PyPI: start it with" in said[name], (
            said[name]
        )
        assert "srun --mpi=pmi2" in said[name]
    assert "export MPIR_CVAR_CH4_NETMOD=ofi" in said["doctor pmi2"], said["doctor pmi2"]
    assert "terminated" not in said["doctor pmi2"], said["doctor pmi2"]
    assert jobs["init none"].returncode != 0
    for name in ("init none", "a shell"):
        assert "LaunchError: Slurm started 2 rank(s), but MPICH" in said[name], said[name]
        assert "--mpi=pmi2 (MPICH, Intel MPI)" in said[name]
        assert "or this process was started by hand inside a job" in said[name]
        assert "`env -u SLURM_STEP_ID python ...`" in said[name]


PART = """
from mpi4py import MPI
import torch
from syncline.collectives import all_reduce, destroy_process_group, init_process_group

world = MPI.COMM_WORLD
trainers = world.Split(0 if world.rank else MPI.UNDEFINED)
if world.rank:
    group = init_process_group(communicator=trainers, timeout=60)
    tensor = torch.tensor([1.0 * world.rank])
    all_reduce(tensor)
    world.send(f"rank {group.rank} of {group.size} over {group.describe()}: {tensor.item()}", dest=0)
    destroy_process_group()
else:
    print(*sorted(world.recv() for _ in range(2)), sep="\\n")
"""
FOLDER = """
import sys
import torch
from syncline.collectives import all_reduce, destroy_process_group, init_process_group
group = init_process_group("gloo", f"file://{sys.argv[1]}", timeout=60)
tensor = torch.tensor([1.0 + group.rank])
all_reduce(tensor)
print(f"rank {group.rank} of {group.size}: {tensor.item()}\\n", end="")
destroy_process_group()
"""


def test_a_part_of_the_ranks_and_ranks_without_mpi(cluster: SlurmCluster, tmp_path: Path, open_mpi: dict[str, str]) -> None:
    """Rank 0 of three serves the others, which train over MPI. Without --mpi, ranks meet in a folder."""
    part = cluster.start(["srun", "-N1", "-n3", "--mpi=pmix", "python", "-c", PART], tmp_path, {**ENVIRONMENT, **open_mpi})
    folder = cluster.start(["srun", "-N2", "-n2", "python", "-c", FOLDER, tmp_path / "meeting"], tmp_path, ENVIRONMENT)
    said = part.communicate(timeout=JOB_S)[0]
    lines = [line for line in said.splitlines() if not line.startswith("srun: job ")]  # srun's notes while it waits
    assert [line.partition(" over mpi: Open MPI")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"], said
    assert all(line.endswith(": 3.0") for line in lines), said
    said = folder.communicate(timeout=JOB_S)[0]
    assert sorted([line for line in said.splitlines() if not line.startswith("srun: job ")]) == [
        "rank 0 of 2: 3.0",
        "rank 1 of 2: 3.0",
    ], said


def test_time_limit_and_killed_ranks(cluster: SlurmCluster, submit, open_mpi) -> None:
    """Slurm checks time limits every half minute. Meanwhile another job loses its ranks, and restarts.

    First the ranks are asked for reports: the job goes on.
    The limit is shortened when the ranks train: an earlier signal would kill them, as any program without a handler.
    """
    limited = submit("time-limit.sbatch", STEPS=FOR_EVER, SYNCLINE_REPORT_DIR=".", **open_mpi)
    again = submit("again.sbatch", STEPS=FOR_EVER, **open_mpi)
    limited.wait_for_checkpoint()
    cluster.call(*ASK_FOR_REPORTS, limited.id)
    for rank in (0, 1):
        limited.wait_for(f"rank {rank} has written its report")
    cluster.call("scontrol", "update", f"jobid={limited.id}", "timelimit=5")
    again.wait_for_checkpoint()
    cluster.call("scancel", "--signal=KILL", f"{again.id}.0")
    again.wait_for("attempt 1 ended with status 137")
    again.wait_for(r"begin at step [1-9]\d*")
    cluster.call("scancel", "--signal=TERM", again.id)
    assert again.wait() == "COMPLETED", again.output
    assert re.search(r"(?m)^asked to end after step [1-9]\d*$", again.output), again.output
    assert limited.wait() == "COMPLETED", limited.output
    assert re.search(r"(?m)^asked to end after step [1-9]\d*$", limited.output), limited.output
    assert limited.has_checkpoint()


# Sends SIGTERM when Python has restored the default actions of the signals.
LATE = """
import os, signal
class Last:
    def __del__(self, send=os.kill, process=os.getpid(), number=signal.SIGTERM, write=os.write):
        write(1, b"asked late\\n")
        send(process, number)
last = Last()
"""
RESUMING = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.with_name("resume.md").read_text())[-1]


@pytest.mark.parametrize(
    ("script", "step", "said"),
    [
        (SCRIPTS["train.py"], "    step += 1\n", "asked to end after step 1\n"),
        (RESUMING, "    stop = told_to_stop.clone()\n", ""),
    ],
    ids=["slurm", "resume"],
)
def test_a_late_signal_does_not_kill_a_rank_that_ends(script: str, step: str, said: str, tmp_path: Path) -> None:
    """Slurm signals each node by itself. So a rank of one node may make the others end before their own signals come."""
    before, after = script.split(step)
    (tmp_path / "train.py").write_text(f"{LATE}{before}{step}    os.kill(os.getpid(), signal.SIGTERM)\n{after}")
    words = [sys.executable, "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=JOB_S)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.endswith(f"{said}asked late\n"), done.stdout


def test_a_node_fails(cluster: SlurmCluster, submit, open_mpi) -> None:
    job = submit("no-kill.sbatch", STEPS=FOR_EVER, **open_mpi)
    job.wait_for_checkpoint()
    cluster.call("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    job.wait_for("1 of 2 nodes left")
    job.wait_for(r"1 ranks over mpi: Open MPI \S+ begin at step [1-9]\d*")
    cluster.call("scancel", "--signal=TERM", job.id)
    assert job.wait() == "COMPLETED", job.output
    assert re.search(r"(?m)^asked to end after step [1-9]\d*$", job.output), job.output


KILLED = """
from test_support.slurm_cluster import SlurmCluster

with SlurmCluster() as cluster:
    srun = cluster.start(["srun", "-N2", "sh", "-c", "readlink /proc/self/ns/pid; sleep 600"], cluster.folder, {})
    print(cluster.folder, srun.stdout.readline().strip(), srun.stdout.readline().strip(), flush=True)
    input()
"""


def test_a_killed_test_leaves_no_daemon_and_no_step(cluster: SlurmCluster) -> None:
    words = [sys.executable, "-c", KILLED]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "tools")}
    with subprocess.Popen(words, env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder, namespace, same = process.stdout.readline().split()
        try:
            assert namespace == same
            names = {"munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sleep"}
            wait_until(lambda: names <= set(processes_in(namespace)))  # `sh` starts `sleep` only after what it prints
            process.kill()
            wait_until(lambda: not processes_in(namespace))
        finally:
            process.kill()
            shutil.rmtree(folder)


def processes_in(namespace: str) -> list[str]:
    """The names of the processes in a namespace of process ids, such as "pid:[4026531836]"."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "ns" / "pid") == namespace:
                found.append((path / "comm").read_text().strip())
        except OSError:
            pass  # the process has ended meanwhile
    return found
