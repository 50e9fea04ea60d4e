"""`syncline run`: the environment of a script, the end of a job, and cases that are refused before the start."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from benchmarks.emulated_hosts import EmulatedHosts, check_possible
from commands import ToolError
from mpi_runtimes import find
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.launch

RUN = ("-m", "syncline.collectives", "run")
PYTHON = Path(sys.executable)


def lines(output: str, pattern: str) -> list[str]:
    return sorted(line for line in output.split("\n") if re.match(pattern, line))


# ---- what a script finds ----

PLACES = """
    import os
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    place = " ".join(os.environ[name] for name in names)
    print(f"{place} {os.environ['MASTER_ADDR']} {os.environ['TORCHELASTIC_RUN_ID']}\\n", end="", flush=True)
"""


def test_variables_of_torchrun_go_before_what_a_shell_has_left(run_job) -> None:
    left = {"RANK": "5", "WORLD_SIZE": "16", "MASTER_ADDR": "203.0.113.7", "LOCAL_RANK": "5"}
    job = run_job(2, PLACES, *RUN, "script.py", **left)
    assert job.status == 0, job.output
    found = [line.split() for line in lines(job.output, r"\d \d")]
    assert [line[:8] for line in found] == [f"{rank} 2 {rank} 2 0 1 {rank} 127.0.0.1".split() for rank in range(2)]
    assert found[0][8] == found[1][8]
    (warning,) = lines(job.output, "syncline run: overrides")
    assert "RANK=5 (now 0), WORLD_SIZE=16 (now 2)" in warning
    assert "MASTER_ADDR=203.0.113.7 (now 127.0.0.1)" in warning


def test_nodes_are_those_that_share_memory(run_job) -> None:
    """MPICH is told that even and odd ranks are on two nodes; the launcher reports one."""
    job = run_job(4, PLACES, *RUN, "script.py", MPIR_CVAR_ODD_EVEN_CLIQUES="1")
    assert job.status == 0, job.output
    found = [line.split()[:7] for line in lines(job.output, r"\d \d")]
    assert found == [f"{rank} 4 {rank // 2} 2 {rank % 2} 2 {rank}".split() for rank in range(4)]
    assert job.output.count("the ranks of a node are not neighbours") == 1


def test_threads_are_the_ranks_share_and_the_script_can_change_it_before_it_imports_torch(run_job) -> None:
    script = """
        import os, sys
        assert not {"torch", "numpy"} & set(sys.modules), "loaded before the script"
        said = os.environ["OMP_NUM_THREADS"]
        os.environ["OMP_NUM_THREADS"] = str(int(said) + 1)
        import torch
        print(f"threads {said} {torch.get_num_threads()}\\n", end="", flush=True)
    """
    job = run_job(2, script, *RUN, "script.py", plain=True, OMP_NUM_THREADS="")
    assert job.status == 0, job.output
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert lines(job.output, "threads") == [f"threads {share} {share + 1}"] * 2
    assert job.output.count(f"OMP_NUM_THREADS was not set; it is {share} on rank 0") == 1


MAIN = """
    import __main__, inspect, os, pickle, sys, traceback
    from dataclasses import dataclass

    @dataclass
    class Point:
        x: int

    assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
    print(__name__, __file__, __package__, __spec__ and __spec__.name, __loader__.name, sys.argv, sys.path[0])
    print(sorted(set(globals()) - {"__annotations__"}), __main__.__dict__ is globals(), "Point" in inspect.getsource(Point))
    print(type(__builtins__), __import__("builtins") is __builtins__)

    def fail():
        raise {"key": ValueError("here"), "exit": SystemExit("words"), "status": SystemExit(7)}[sys.argv[1]]

    if sys.argv[1:2] == ["twice"]:
        try:
            1 / 0
        except ZeroDivisionError:
            fail()
    if sys.argv[1] != "none":
        fail()
"""


@pytest.mark.parametrize(
    "words",
    [
        ("script.py", "none", "--", "-m"),
        ("script.py", "key"),
        ("script.py", "exit"),
        ("script.py", "status"),
        ("script.py", "twice"),
        ("-m", "package.inner", "status"),
        ("-m", "package", "key"),
    ],
    ids=" ".join,
)
def test_as_with_python(run_job, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Output, traceback and status, to the letter."""
    (tmp_path / "package").mkdir()
    for name in ("package/__init__.py", "package/inner.py", "package/__main__.py", "script.py"):
        text = "" if name.endswith("__init__.py") else textwrap.dedent(MAIN)
        (tmp_path / name).write_text(text)
    expected, found = (
        subprocess.run([sys.executable, *run, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        for run in ((), RUN)
    )
    assert expected.stdout
    said = re.sub(r'  File "<frozen runpy>".*\n', "", expected.stderr)  # `python -m` shows itself
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, said, expected.returncode)


# ---- which library ----

CARRIER = """
    import logging, os, sys
    logging.basicConfig(format="%(message)s")
    logging.getLogger("syncline.collectives").setLevel(logging.INFO)
    import torch
    import torch.distributed as dist
    backend, timeout_s = sys.argv[1], sys.argv[2]
    dist.init_process_group(None if backend == "None" else backend)
    rank = dist.get_rank()
    group = dist.group.WORLD
    ours = getattr(group, "syncline_group", None)
    sum_of_all = torch.tensor([1.0 + rank])
    dist.all_reduce(sum_of_all)
    part = dist.new_group([1])
    whole = dist.new_group(backend="gloo")
    product = torch.tensor([2.0 + rank])
    dist.all_reduce(product, dist.ReduceOp.PRODUCT, group=whole)
    kind = "torch" if ours is None else ours.backend_name
    limit_s = "-" if ours is None else ours.timeout_s
    parts = "none" if rank == 0 else dist.get_backend(part)
    said = [kind, dist.get_backend(), parts, sum_of_all.item(), product.item(), limit_s, dist.is_mpi_available()]
    print(f"carrier {rank} {said}\\n", end="", flush=True)
    dist.destroy_process_group()
    dist.init_process_group(None if backend == "None" else backend)  # meets anew
    again = torch.tensor([5.0 + rank])
    dist.all_reduce(again)
    assert again.item() == 11.0
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("options", "asked", "carrier", "name", "limit_s", "has_mpi"),
    [
        ((), "gloo", "mpi", "gloo", 1800.0, True),
        (("--timeout", "77"), "None", "mpi", "undefined", 77.0, True),
        ((), "mpi", "mpi", "mpi", 1800.0, True),
        (("--backend", "mpi"), "cpu:gloo,cuda:nccl", "mpi", "cpu:gloo,cuda:nccl", 1800.0, True),
        (("--backend", "keep"), "gloo", "torch", "gloo", "-", False),
    ],
)
def test_who_carries_what_the_script_asks_for(run_job, options, asked, carrier, name, limit_s, has_mpi) -> None:
    job = run_job(2, CARRIER, *RUN, *options, "script.py", asked, "")
    assert job.status == 0, job.output
    for rank in range(2):
        said = [carrier, name, name if rank else "none", 3.0, 6.0, limit_s, has_mpi]
        assert f"carrier {rank} {said}" in job.output
    over = "torch's own" if carrier == "torch" else "mpi: MPICH"
    told = [line for line in job.output.split("\n") if line.startswith("init_process_group(")]
    assert len(told) == 2, job.output  # for each group one line, on rank 0
    assert all(f"2 rank(s) over {over}" in line for line in told)


def test_a_group_of_other_ranks_than_mpis_is_torchs_own(run_job) -> None:
    """The script counts backwards; rank 1 of MPI is its rank 0."""
    script = """
        import os
        import torch
        import torch.distributed as dist
        rank = 1 - int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        gathered = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(gathered, torch.tensor([10.0 + rank]))
        print(f"{hasattr(dist.group.WORLD, 'syncline_group')} {[t.item() for t in gathered]}\\n", end="", flush=True)
        dist.destroy_process_group()
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 0, job.output
    assert job.output.count("False [10.0, 11.0]") == 2, job.output


def test_no_port_is_opened(run_job) -> None:
    """MASTER_PORT stays free: neither our group nor the store listens there."""
    script = """
        import os, socket
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        with socket.socket() as probe:
            refused = probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        dist.barrier()
        if dist.get_rank() == 0:
            server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, True)
        else:
            server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False)
        server.set(f"from {dist.get_rank()}", "here")
        server.wait(["from 0", "from 1"])
        dist.barrier()
        print(f"refused {refused != 0}\\n", end="", flush=True)
        dist.destroy_process_group()
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 0, job.output
    assert job.output.count("refused True") == 2, job.output


def test_synclines_ddp_takes_the_place_of_torchs(run_job, tmp_path: Path) -> None:
    """With a trace of its steps, without a change of the script."""
    script = """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.nn.parallel.distributed import DistributedDataParallel as Same
        assert DistributedDataParallel is Same is torch.nn.parallel.DistributedDataParallel
        dist.init_process_group("gloo")
        module = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        for step in range(12):
            module(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
        print(f"{type(module).__module__} {module.module.weight.grad.tolist()}\\n", end="", flush=True)
        dist.destroy_process_group()
    """
    job = run_job(2, script, *RUN, "--ddp", "syncline", "--trace", "traces", "script.py", SYNCLINE_TRACE_STEPS="2-4")
    assert job.status == 0, job.output
    assert job.output.count(f"syncline.ddp.distributed_data_parallel {[[18.0, 18.0, 18.0]]}") == 2, job.output
    assert (tmp_path / "traces" / "trace.json").exists()


# ---- how a job ends ----


def test_an_uncaught_exception_ends_the_job_with_one_traceback(run_job) -> None:
    script = """
        import time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        def step():
            if dist.get_rank() == 1:
                raise ValueError("the loss is not finite")
            dist.barrier()
            time.sleep(600)
        step()
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 1
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert re.search(r'Traceback.*\n.*File ".*/script.py", line 10, in <module>', job.output), job.output
    assert "ValueError: the loss is not finite" in job.output
    assert re.search(r"\[syncline\] rank 1 of 2 \(host .*\) failed and ends the job", job.output)


@pytest.mark.parametrize("backend", ["auto", "keep"])
def test_ranks_that_fail_together_print_one_traceback(run_job, backend: str) -> None:
    """Also without a group, when no rank has imported torch. The job ends when each rank has said what it has to say."""
    script = """
        import os, time
        from pathlib import Path
        from syncline.collectives.cli.run import ending

        ending._TOGETHER_S = 60.0  # on a busy machine, ranks fail one after the other
        say, abort_job = ending.say, ending.abort_job

        def say_and_note(*words):
            say(*words)
            Path("said by " + os.environ["RANK"]).touch()

        def abort_when_all_have_spoken(status):
            while not all(Path(f"said by {rank}").exists() for rank in range(3)):
                time.sleep(0.01)
            abort_job(status)

        ending.say, ending.abort_job = say_and_note, abort_when_all_have_spoken
        raise KeyError("no such setting")
    """
    job = run_job(3, script, *RUN, "--backend", backend, "script.py")
    assert job.status == 1
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    (speaker,) = re.findall(r"\[syncline\] rank (\d) of 3 .* failed and ends the job", job.output)
    too = r"\[syncline\] rank \d of 3 .* failed, too, at script.py:19: KeyError: 'no such setting'; rank (\d) failed first"
    followers = re.findall(too, job.output)
    assert followers == [speaker] * 2, job.output


def test_a_rank_whose_own_excepthook_fails_ends_the_job(run_job) -> None:
    script = """
        import os, sys, time
        def hook(kind, error, trace):
            raise OSError("no space left for the log")
        sys.excepthook = hook
        if os.environ["RANK"] == "1":
            raise ValueError("the loss is not finite")
        time.sleep(600)
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 1
    for words in ("Error in sys.excepthook", "OSError: no space left", "ValueError: the loss is not finite", "ends the job"):
        assert words in job.output, job.output


def test_a_status_of_one_rank_ends_the_job_after_its_exit_handlers(run_job) -> None:
    script = """
        import atexit, os, sys, time
        if os.environ["RANK"] == "1":
            atexit.register(print, "the handler of rank 1", flush=True)
            sys.exit(3)
        time.sleep(600)
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 3
    assert "the handler of rank 1" in job.output
    assert re.search(r"rank 1 of 2 .* exits with status 3 and ends the job", job.output)


def test_a_status_that_skips_exit_handlers_ends_the_job_too(run_job) -> None:
    """Also after the rank has taken part in collectives: the others must not take it for a rank that returned early."""
    script = """
        import os, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "1":
            os._exit(7)
        time.sleep(600)
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 7, job.output
    assert re.search(r"rank 1 of 2 .* exits with status 7 and ends the job", job.output)


def test_frames_inside_syncline_are_left_out_although_torch_has_its_own_excepthook(run_job) -> None:
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32))
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 1, job.output
    assert "DisagreementError" in job.output
    assert os.path.join("engine", "host_group.py") not in job.output


def test_a_status_of_all_ranks_is_no_failure_of_one(run_job) -> None:
    script = """
        import sys
        from syncline.collectives.cli.run import ending

        ending._TOGETHER_S = 60.0  # on a busy machine, ranks end one after the other
        sys.exit(5)
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 5
    assert "ends the job" not in job.output, job.output


@pytest.mark.parametrize("way", ["os._exit(0)", "sys.exit(0)"])
def test_who_ends_early_ends_nobodys_work(run_job, way: str) -> None:
    script = f"""
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 0:
            sys.stdout.flush()
            {way}
        time.sleep(1.0)
        print("rank 1 has saved its work", flush=True)
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 0, job.output
    assert "rank 1 has saved its work" in job.output


def test_a_fork_of_a_rank_ends_alone(run_job) -> None:
    """It ends with its own status, before and after the group was made. Under torchrun such a child hangs."""
    script = """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        child = os.fork()
        if child == 0:
            raise ValueError("of a child")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        number = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(number)
        print(f"sum {number.item()}\\n", end="", flush=True)
        dist.destroy_process_group()
    """
    job = run_job(2, script, *RUN, "script.py")
    assert job.status == 0, job.output
    assert job.output.count("sum 3.0") == 2
    assert "ends the job" not in job.output


# ---- standard streams ----


def test_each_line_can_have_its_rank(run_job) -> None:
    script = """
        import os, subprocess, sys
        print("first", flush=True)
        subprocess.run(["sh", "-c", "echo of a child; echo to stderr >&2"], check=True)
        print("without an end", end="", flush=True)
    """
    job = run_job(2, script, *RUN, "--tag-output", "script.py")
    assert job.status == 0, job.output
    said = ["first", "of a child", "to stderr", "without an end"]
    assert lines(job.output, r"\[\d\]") == sorted(f"[{rank}] {line}" for rank in range(2) for line in said)


def test_a_traceback_is_tagged_to_its_end(run_job) -> None:
    script = """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("at the end")
        time.sleep(600)
    """
    job = run_job(2, script, *RUN, "--tag-output", "script.py")
    assert job.status == 1
    assert "[1] Traceback (most recent call last):" in job.output, job.output
    assert "[1] ValueError: at the end" in job.output


def test_the_others_can_be_silenced(run_job) -> None:
    script = """
        import os, sys
        print("to stdout by", os.environ["RANK"])
        print(f"to stderr by {os.environ['RANK']}\\n", end="", file=sys.stderr)
    """
    job = run_job(3, script, *RUN, "--quiet-others", "script.py")
    assert job.status == 0, job.output
    assert lines(job.output, "to stdout") == ["to stdout by 0"]
    assert lines(job.output, "to stderr") == [f"to stderr by {rank}" for rank in range(3)]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("gone.py",), 2, r"cannot open 'gone.py' in .*: No such file or directory"),
        (("torchrun", "train.py"), 2, "torchrun's place is taken by `syncline run`: leave it out"),
        (("-m", "torch.distributed.run", "train.py"), 1, "leave `-m torch.distributed.run` out"),
        (("-m", "gone.inner"), 1, "no module named gone.inner"),
        (("wrong.py",), 1, r"(?s)the script is no Python:.*wrong.py\", line 2.*SyntaxError"),
        (("--backend", "smoke", "script.py"), 2, r"unknown --backend 'smoke'; known are auto .*keep"),
        (("--ddp", "smoke", "script.py"), 2, "unknown --ddp 'smoke'; installed are torch, syncline"),
        (("--timeout", "0", "script.py"), 2, "expected a number of seconds above 0, found '0'"),
        (("--gossip", "script.py"), 2, "the following arguments are required|unrecognized arguments: --gossip"),
        (("-n", "3", "script.py"), 2, r"started 2 rank\(s\), and `-n 3` asks for others: two launchers at once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_use_is_told_once_and_ends_all_ranks(run_job, tmp_path: Path, words, status: int, message: str) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\nif True print()\n")
    job = run_job(2, "print('not reached')", *RUN, *words)
    assert job.status == status, job.output
    assert len(re.findall(message, job.output)) == 1, job.output
    assert job.output.count("syncline run: ") == 1, job.output
    assert "not reached" not in job.output


SPEAKS_LATE = """
import time
from syncline.collectives.cli.run import command

say = command.say
command.say = lambda *words: (time.sleep(2), say(*words))
"""


def test_an_error_in_one_nodes_copy_ends_all(tmp_path: Path) -> None:
    """Each rank runs in its own folder; rank 1 has another script, and says so late."""
    for rank, text in enumerate(("print('not reached')", "print('not reached'\n")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "train.py").write_text(text)
    (tmp_path / "1" / "sitecustomize.py").write_text(SPEAKS_LATE)
    command = [sys.executable, *RUN, "train.py"]
    there = [["-n", "1", "-wdir", str(tmp_path / str(rank)), *command] for rank in range(2)]
    there[1][:0] = ["-env", "PYTHONPATH", str(tmp_path / "1")]
    mpiexec = str(PYTHON.parent / "mpiexec")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([mpiexec, *there[0], ":", *there[1]], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("syncline run: ") == 1
    assert re.search(r"rank 1 of 2 \(.*\): the script is no Python:", done.stderr), done.stderr
    assert "SyntaxError: '(' was never closed" in done.stderr
    assert "not reached" not in done.stdout


def test_torchrun_around_it(run_job) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable)
    job = run_job(None, "print('not reached')", *torchrun, *RUN, "script.py")
    assert job.status != 0
    assert job.output.count("torchrun started this process, and `syncline run` takes torchrun's place") == 1, job.output
    assert "not reached" not in job.output


def test_mpirun_and_library_of_different_mpis(run_job) -> None:
    try:
        other = find("openmpi")
    except ToolError as error:
        pytest.skip(str(error))
    job = run_job(2, "print('not reached')", *RUN, "script.py", plain=True, **other.env)
    assert job.status != 0
    assert job.output.count("syncline run: MPICH's mpiexec started this process, but does not work with Open MPI") == 1, (
        job.output
    )
    assert job.output.count("or set MPI4PY_LIBMPI to the launcher's libmpi.so") == 1, job.output
    assert "not reached" not in job.output


def test_a_child_of_a_rank_is_none(run_job) -> None:
    script = """
        import subprocess, sys
        if len(sys.argv) == 1:
            command = [sys.executable, "-m", "syncline.collectives", "run", __file__, "inner"]
            done = subprocess.run(command, capture_output=True, text=True)
            print(f"status {done.returncode} {'no rank itself' in done.stderr}\\n", end="", flush=True)
        else:
            print("not reached")
    """
    job = run_job(1, script, *RUN, "script.py")
    assert job.status == 0, job.output
    assert "status 2 True" in job.output


def test_a_package_may_end_the_program_before_its_module_runs(run_job, tmp_path: Path) -> None:
    (tmp_path / "versioned").mkdir()
    (tmp_path / "versioned" / "__init__.py").write_text("import sys\nprint('found', sys.argv[1:])\nsys.exit(0)\n")
    job = run_job(2, "", *RUN, "-m", "versioned", "--version", PYTHONPATH=str(tmp_path))
    assert job.status == 0, job.output
    assert lines(job.output, "found") == ["found ['--version']"] * 2
    assert "Traceback" not in job.output


ENDS_RANK_1 = "import os, sys\nif os.environ['RANK'] == '1': sys.exit(0)\n"


def test_a_package_may_end_the_program_on_one_rank(run_job, tmp_path: Path) -> None:
    (tmp_path / "uneven").mkdir()
    (tmp_path / "uneven" / "__init__.py").write_text(ENDS_RANK_1)
    (tmp_path / "uneven" / "__main__.py").write_text("print('the other runs')\n")
    job = run_job(2, "", *RUN, "-m", "uneven", PYTHONPATH=str(tmp_path))
    assert job.status == 0, job.output
    assert lines(job.output, "the other") == ["the other runs"]


def test_a_package_may_end_the_program_where_another_rank_finds_no_script(run_job, tmp_path: Path) -> None:
    (tmp_path / "uneven").mkdir()
    (tmp_path / "uneven" / "__init__.py").write_text(ENDS_RANK_1)
    job = run_job(2, "", *RUN, "-m", "uneven", PYTHONPATH=str(tmp_path))
    assert job.status == 1, job.output
    assert job.output.count("no module named uneven.__main__") == 1, job.output


def test_a_rank_that_fails_before_its_script_ends_the_job(run_job) -> None:
    run = """
        import os, sys
        from syncline.collectives.cli.run import command, output
        def fail(rank):
            if rank == 1:
                raise BlockingIOError(11, "no process left")
        output.tag_lines = fail
        sys.exit(command.main(["--tag-output", "-m", "this"]))
    """
    job = run_job(2, run, "script.py")
    assert job.status == 1, job.output
    assert "BlockingIOError: [Errno 11] no process left" in job.output
    assert "Zen" not in job.output


def test_ctrl_c_while_the_ranks_compare_their_scripts_ends_the_job(run_job) -> None:
    run = """
        import sys
        from syncline.collectives.cli.run import command, ranks
        exchange, calls = ranks.Job.exchange, []
        def interrupted(job, value):
            calls.append(value)
            if job.rank == 1 and len(calls) == 2:  # the first call was about variables
                raise KeyboardInterrupt
            return exchange(job, value)
        ranks.Job.exchange = interrupted
        sys.exit(command.main(["-m", "this"]))
    """
    job = run_job(2, run, "script.py")
    assert job.status == 130, job.output
    assert "Zen" not in job.output


def test_ctrl_c_while_a_rank_waits_for_the_others_at_exit_ends_the_job(run_job, tmp_path: Path) -> None:
    """The script has no group."""
    (tmp_path / "waits.py").write_text("from mpi4py import MPI\nimport time\ntime.sleep(30 * MPI.COMM_WORLD.rank)\n")
    run = """
        import sys, time
        from syncline.collectives.cli.run import command, ending
        class Interrupted:
            def sleep(self, _):
                raise KeyboardInterrupt
            def __getattr__(self, name):
                return getattr(time, name)
        ending.time = Interrupted()
        sys.exit(command.main(["waits.py"]))
    """
    job = run_job(2, run, "script.py")
    assert job.status == 130, job.output
    assert "rank 0 of 2" in job.output
    assert "interrupted while it waited for the other ranks at exit, and ends the job: KeyboardInterrupt" in job.output


def test_an_error_is_printed_although_mpi_cannot_tell_the_other_ranks(run_job, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('the reason')\n")
    run = """
        import os, sys
        from syncline.collectives.cli.run import command, ending
        def broken(*_):
            raise RuntimeError("MPI has lost a rank")
        ending.first_to_fail, ending.abort_job = broken, os._exit
        sys.exit(command.main(["fails.py"]))
    """
    job = run_job(2, run, "script.py")
    assert "ValueError: the reason" in job.output


# ---- ranks of its own ----

# The command on a machine without MPI.
WITHOUT_MPI = "import sys; from syncline.collectives.cli.run import command, local; local._mpiexec = lambda: None; "
ALONE = {
    "mpiexec": list(RUN),
    "processes": ["-c", WITHOUT_MPI + "sys.exit(command.main(sys.argv[1:]))"],
}
SUM = """
    import os, sys
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    number = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(number)
    carrier = "ours" if hasattr(dist.group.WORLD, "syncline_group") else "torch's"
    stdin = sys.stdin.read()  # only rank 0 gets the input; the others read its end
    print(f"sum {number.item()} {carrier} {os.environ['LOCAL_WORLD_SIZE']} {sys.argv[1:]} {stdin}\\n", end="", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("way", "carrier"), [("mpiexec", "ours"), ("processes", "torch's")])
def test_ranks_of_its_own(tmp_path: Path, way: str, carrier: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SUM))
    command = [sys.executable, *ALONE[way], "-n", "2", "script.py", "-n", "7"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, input="typed", capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done.stdout, "sum") == [f"sum 3.0 {carrier} 2 ['-n', '7'] ", f"sum 3.0 {carrier} 2 ['-n', '7'] typed"]


@pytest.mark.parametrize("way", ALONE)
def test_a_rank_that_fails_ends_those_of_its_own(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(6)\ntime.sleep(600)\nprint('not reached')\n"
    )
    command = [sys.executable, *ALONE[way], "-n", "3", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "not reached" not in done.stdout
    assert re.search(r"rank 1 .* exit(s|ed) with status 6", done.stderr), done.stderr


def test_a_broken_output_leaves_the_errors_that_a_rank_prints(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("for _ in range(100_000):\n    print('a long line of output')\n")
    command = [sys.executable, *ALONE["processes"], "-n", "1", "--tag-output", "script.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.returncode != 0
    assert "[0] BrokenPipeError" in done.stderr, done.stderr
    assert "output.py" not in done.stderr


@pytest.mark.parametrize("way", ALONE)
def test_signals_are_handed_on(tmp_path: Path, way: str) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            heard = []
            def say(words):  # `print` cannot be called again while it runs
                os.write(1, f"rank {os.environ['RANK']} {words}\\n".encode())
            def hear(number, frame):
                heard.append(number)
                say(f"heard {signal.Signals(number).name}")
            for number in (signal.SIGUSR1, signal.SIGTERM):
                signal.signal(number, hear)
            say("is ready")
            while signal.SIGTERM not in heard:
                time.sleep(0.02)
        """)
    )
    command = [sys.executable, *ALONE[way], "-n", "2", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        ready = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGUSR1)
        heard = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        heard += [process.stdout.readline() for _ in range(2)]
        process.wait(timeout=LIMIT_S)
        limit.cancel()
    assert sorted(ready) == [f"rank {rank} is ready\n" for rank in range(2)]
    assert sorted(heard[:2]) == [f"rank {rank} heard SIGUSR1\n" for rank in range(2)]
    assert sorted(heard[2:]) == [f"rank {rank} heard SIGTERM\n" for rank in range(2)]
    assert process.returncode == 0


# ---- hosts ----

ON_HOSTS = """
    import os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    served = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    served.set(f"from {rank}", os.environ["GROUP_RANK"])
    nodes = [served.get(f"from {other}").decode() for other in range(size)]
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.eye(4) * (rank + 1)).sum().backward()
    gradient = model.module.weight.grad[0]
    words = f"rank {rank} of {size}: nodes {''.join(nodes)}, {os.environ['MASTER_ADDR']}, {gradient.tolist()}"
    print(f"{words}\\n", end="", flush=True)
    dist.destroy_process_group()
"""


def test_the_address_of_rank_0_is_reached_from_another_host(tmp_path: Path) -> None:
    """The hosts have their own networks, in which loopback leads nowhere and names have no meaning."""
    try:
        check_possible(os.geteuid())
    except ToolError as error:
        pytest.skip(str(error))
    (tmp_path / "script.py").write_text(textwrap.dedent(ON_HOSTS))
    with EmulatedHosts() as hosts:
        (tmp_path / "hosts").write_text("".join(f"{name}:2\n" for name in hosts.names))
        run = shlex.join([sys.executable, *RUN, "script.py"])
        line = f"cd {shlex.quote(str(tmp_path))} && mpirun -n 4 --hostfile hosts {run}"
        environ = {"PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        job = hosts.start(line, environ)
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        finally:
            job.kill()
    assert job.returncode == 0, output
    found = lines(output, "rank")
    (address,) = {line.split(", ")[1] for line in found}
    assert not address.startswith("127."), address
    assert found == [f"rank {rank} of 4: nodes 0011, {address}, {[2.5] * 4}" for rank in range(4)]
