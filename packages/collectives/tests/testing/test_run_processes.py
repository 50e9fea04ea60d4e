"""Ranks as processes: what they printed is seen, however they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncline.collectives.testing import processes
from syncline.collectives.testing.processes import run_processes
from test_support.jobs import LIMIT_S
from test_support.waiting import wait_until

pytestmark = pytest.mark.launch

JOB = """
import os, signal, sys, time
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print(f"rank {rank} of {size} was here", flush=True)
action = open(f"{folder}/action").read()
if action == "hang" and rank == 1:
    time.sleep(60)
if action == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3 if action == "fail" and rank == 1 else 0)
"""


def run(folder: Path, action: str, **options) -> None:
    (folder / "action").write_text(action)
    (folder / "job.py").write_text(JOB)
    run_processes(folder / "job.py", 2, folder, **options)


def pid_of_server() -> int:
    assert processes._server._process is not None
    return processes._server._process.pid


def test_all_is_well(tmp_path: Path) -> None:
    run(tmp_path, "nothing")
    assert (tmp_path / "output-1").read_text() == "rank 1 of 2 was here\n"


def test_a_relative_folder_is_relative_to_the_callers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):  # the server starts in the first directory, if it does not run already
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run(Path(), "nothing")
        assert Path("output-1").read_text() == "rank 1 of 2 was here\n"
        with pytest.raises(AssertionError, match="rank 1 of 2 was here"):
            run(Path(), "fail")


def test_environment_folder_and_exit_are_those_of_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THIS_JOB", "as the caller has it")
    monkeypatch.chdir(tmp_path)
    script = "import atexit, os, sys; atexit.register(print, os.getcwd(), os.environ['OF_THIS_JOB'], __name__, sys.path[0])"
    (tmp_path / "job.py").write_text(script)
    run_processes(tmp_path / "job.py", 1, tmp_path)
    assert (tmp_path / "output-0").read_text() == f"{tmp_path} as the caller has it __main__ {tmp_path}\n"


def test_what_is_preloaded_is_there_before_the_script_begins(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print('colorsys' in sys.modules)")
    for preload, said in (([], "False\n"), (["colorsys"], "True\n")):
        run_processes(tmp_path / "job.py", 1, tmp_path, preload=preload)
        assert (tmp_path / "output-0").read_text() == said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_forks_has_one_thread(tmp_path: Path) -> None:
    """The others of a process are missing in its forks."""
    run(tmp_path, "nothing")
    assert len(list(Path(f"/proc/{pid_of_server()}/task").iterdir())) == 1


def test_a_rank_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, "hang", timeout_s=3.0)
    said = capsys.readouterr().out.split("--- rank 1 ---")[1]
    assert "rank 1 of 2 was here" in said
    assert re.search(r'job\.py", line \d+ in <module>', said), "where it hangs"


def test_a_rank_that_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)the ranks ended with \[0, 3\].*rank 1 of 2 was here"):
        run(tmp_path, "fail")


def test_who_stops_waiting_ends_the_ranks(tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("as by pytest's limit")

    def run_until_the_alarm() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        run(tmp_path, "hang")

    run(tmp_path, "nothing")  # the server is there
    group = pid_of_server()
    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptedError):
            run_until_the_alarm()
    finally:
        signal.signal(signal.SIGALRM, earlier)
    while has_processes(group):  # their new parent may not have collected them
        time.sleep(0.01)
    run(tmp_path, "nothing")


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


CALLER = """
import os, sys, threading
from pathlib import Path
from syncline.collectives.testing import processes

folder = Path(sys.argv[1])
threading.Thread(target=processes.run_processes, args=(folder / "job.py", 2, folder), daemon=True).start()
while not (folder / "output-1").exists() or "was here" not in (folder / "output-1").read_text():
    pass
print(processes._server._process.pid, flush=True)
os._exit(0)  # as pytest's limit ends it
"""


def test_a_caller_that_dies_takes_the_ranks_along(tmp_path: Path) -> None:
    (tmp_path / "action").write_text("hang")
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run([sys.executable, "-c", CALLER, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    while has_processes(int(done.stdout)):
        time.sleep(0.01)


def test_a_fork_leaves_the_server_alone(tmp_path: Path) -> None:
    run(tmp_path, "nothing")
    if (fork := os.fork()) == 0:
        processes._server.kill()
        os._exit(0)
    os.waitpid(fork, 0)
    group = pid_of_server()
    run(tmp_path, "nothing")
    assert pid_of_server() == group


def test_a_server_that_died_is_replaced(tmp_path: Path) -> None:
    run(tmp_path, "nothing")
    os.kill(pid_of_server(), signal.SIGKILL)
    os.waitid(os.P_PID, pid_of_server(), os.WEXITED | os.WNOWAIT)  # it is over; its status is left to who asks
    run(tmp_path, "nothing")


def test_a_server_that_dies_says_so(tmp_path: Path) -> None:
    run(tmp_path, "nothing")
    said, server = tmp_path / "output-1", pid_of_server()
    said.unlink()

    def kill_when_ranks_run() -> None:
        wait_until(lambda: said.exists() and "was here" in said.read_text())
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill_when_ranks_run)
    killer.start()
    with pytest.raises(AssertionError, match="the process that forks ranks ended, with status -9"):
        run(tmp_path, "hang")
    killer.join()


def test_a_rank_that_is_to_be_killed(tmp_path: Path) -> None:
    run(tmp_path, "die", killed=frozenset({1}))
    with pytest.raises(AssertionError, match=r"\[0, -9\]"):
        run(tmp_path, "die")
    with pytest.raises(AssertionError, match=r"\[0, 0\]"):
        run(tmp_path, "nothing", killed=frozenset({1}))
