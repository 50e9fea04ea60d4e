"""The Python that runs these tests' jobs behaves as a newly started one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from test_support.full_run import FULL
from test_support.jobs import LIMIT_S
from test_support.waiting import wait_until

pytestmark = pytest.mark.launch


@contextmanager
def started(command: list[str], folder: Path, program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program, with a file in place of mpiexec's socket; `read` returns what the program writes to it."""
    (folder / "program.py").write_text(program)
    read, write = os.pipe()
    with subprocess.Popen(
        [*command, "program.py", *words],
        cwd=folder,
        env={**os.environ, "PMI_FD": str(write), "GIVEN": "here"},
        pass_fds=[write],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        os.close(write)
        try:
            yield process
        finally:
            process.kill()
            os.close(read)


def test_it_has_the_arguments_the_environment_the_folder_and_the_files(preloaded: list[str], tmp_path: Path) -> None:
    program = """
import os, sys
assert __name__ == "__main__" and sys.argv == ["program.py", "a", "b c"], sys.argv
assert sys.path[0] == os.getcwd() and os.environ["GIVEN"] == "here"
os.write(int(os.environ["PMI_FD"]), b"to mpiexec")
print("said", len(os.listdir("/proc/self/fd")), flush=True)
print("wrong", file=sys.stderr)
sys.exit(3)
"""
    with started(preloaded, tmp_path, program, "a", "b c") as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (3, "said 5\nwrong\n")  # 0, 1, 2, PMI_FD, and the folder that is listed


def test_an_exception_is_printed_and_code_at_exit_runs(preloaded: list[str], tmp_path: Path) -> None:
    program = "import atexit\natexit.register(print, 'at exit')\nraise ValueError('not this')\n"
    with started(preloaded, tmp_path, program) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "ValueError: not this" in said
    assert said.endswith("at exit\n")


def test_it_dies_of_the_signal_of_its_program(preloaded: list[str], tmp_path: Path) -> None:
    with started(preloaded, tmp_path, "import os\nos.kill(os.getpid(), 9)\n") as process:
        assert process.wait(60) == -signal.SIGKILL


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
for _ in range(5000):  # a signal that comes just before a sleep is handled only after this sleep
    time.sleep(0.02)
"""


def test_a_signal_reaches_the_program(preloaded: list[str], tmp_path: Path) -> None:
    with started(preloaded, tmp_path, WAITS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 5


ENDS = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = {None if FULL else "os.getppid()"}
if server:
    os.kill(server, signal.SIGSTOP)  # more signals come than the client can send on
print(flush=True)
time.sleep(0.3)
if server:
    os.kill(server, signal.SIGCONT)
os._exit(5)
"""


def test_signals_at_the_end_of_the_program_do_not_change_its_status(preloaded: list[str], tmp_path: Path) -> None:
    with started(preloaded, tmp_path, ENDS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None:
            process.terminate()
        assert process.returncode == 5


def test_who_is_killed_takes_the_program_along(preloaded: list[str], tmp_path: Path) -> None:
    with started(preloaded, tmp_path, WAITS) as process:
        assert process.stdout is not None
        program = int(process.stdout.readline())
        process.kill()
        process.wait(60)  # in a full run this process is the program itself
        wait_until(lambda: not Path(f"/proc/{program}").exists())


def test_alone_it_needs_no_mpiexec_and_runs_a_text(python: list[str], tmp_path: Path) -> None:
    program = "import sys; print(__name__, sys.argv, sys.stdin.read(), 'torch._dynamo' in sys.modules); sys.exit(4)"
    done = subprocess.run(
        [*python, "-c", program, "a"], cwd=tmp_path, input="read", capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (4, f"__main__ ['-c', 'a'] read {not FULL}\n"), done.stderr


def test_under_another_launcher_it_is_python_itself(preloaded: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nprint('torch' in sys.modules)\n")
    environ = {name: value for name, value in os.environ.items() if name != "PMI_FD"}
    done = subprocess.run(
        [*preloaded, "program.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, sys.executable in preloaded) == (0, "False\n", True)
