"""SIGUSR1 writes a report, in a process of its own: handlers are for the whole process."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.collectives.health.report import _report_when_told
from test_support.jobs import LIMIT_S

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from syncline.collectives.health.report import Reporter, report_on_signal

def files(folder):
    return [path.name for path in Path(folder).glob("*/rank-*")]  # a report has another name until it is complete

def reported(folder, job, count):
    end_s = time.monotonic() + 20
    while len(files(folder)) < count and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0.1)  # for one too many
    return files(folder) == [f"rank-0.{number}.json" for number in range(1, count + 1)]

"""


@pytest.fixture
def run(python: list[str], tmp_path: Path) -> Callable[[str], str]:
    """Run a program; its errors."""

    def run(program: str) -> str:
        words = [*python, "-c", PROGRAM + program, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr
        return done.stderr

    return run


def test_one_signal_one_report_and_the_earlier_handler_is_called(run) -> None:
    run(
        """
heard = []
signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
assert report_on_signal(Reporter("first", 0, 1, sys.argv[1]))
assert report_on_signal(Reporter("second", 0, 1, sys.argv[1]))
os.kill(os.getpid(), signal.SIGUSR1)
assert reported(sys.argv[1], "second", 1), files(sys.argv[1])
assert heard == [signal.SIGUSR1]
print("passed")
""",
    )


def test_a_handler_that_is_set_later_takes_the_signal_over_for_good(run) -> None:
    run(
        """
heard = []
assert report_on_signal(Reporter("first", 0, 1, sys.argv[1]))
signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
assert not report_on_signal(Reporter("second", 0, 1, sys.argv[1]))
os.kill(os.getpid(), signal.SIGUSR1)
end_s = time.monotonic() + 20
while not heard and time.monotonic() < end_s:
    time.sleep(0.01)
time.sleep(0.2)  # for the thread that hears signals, too
assert (heard, files(sys.argv[1])) == ([signal.SIGUSR1], [])
print("passed")
""",
    )


def test_a_main_thread_inside_a_library_is_no_obstacle(run) -> None:
    run(
        """
assert report_on_signal(Reporter("today", 0, 1, sys.argv[1]))
read, write = os.pipe()
said = []
inside = threading.Event()
def elsewhere():
    inside.wait()
    os.kill(os.getpid(), signal.SIGUSR1)
    said.append(reported(sys.argv[1], "today", 1))
    os.write(write, b"x")
thread = threading.Thread(target=elsewhere)
buffer = ctypes.create_string_buffer(1)
thread.start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # so that the signal does not interrupt the call
inside.set()
assert ctypes.CDLL(None).read(read, buffer, 1) == 1
thread.join()
assert said == [True], files(sys.argv[1])
print("passed")
""",
    )


def test_a_program_that_is_woken_by_signals_itself_is_left_alone(run) -> None:
    run(
        """
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
assert report_on_signal(Reporter("today", 0, 1, sys.argv[1]))
os.kill(os.getpid(), signal.SIGUSR1)
assert reported(sys.argv[1], "today", 1), files(sys.argv[1])
assert signal.set_wakeup_fd(-1) == write
print("passed")
""",
    )


def test_the_program_goes_on_if_its_working_directory_was_removed(run) -> None:
    said = run(
        """
gone = Path(sys.argv[1]) / "gone"
gone.mkdir()
os.chdir(gone)
gone.rmdir()
assert report_on_signal(Reporter("today", 0, 1, "."))
signal.raise_signal(signal.SIGUSR1)
print("passed")
""",
    )
    assert "rank 0 cannot write its report to syncline-report-today: [Errno 2]" in said


def test_the_program_goes_on_if_nobody_reads_standard_error(run) -> None:
    run(
        """
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
assert report_on_signal(Reporter("today", 0, 1, sys.argv[1]))
signal.raise_signal(signal.SIGUSR1)
assert reported(sys.argv[1], "today", 1), files(sys.argv[1])
print("passed")
""",
    )


def test_a_program_that_closes_all_files_ends_without_a_word(run) -> None:
    said = run(
        """
assert report_on_signal(Reporter("today", 0, 1, sys.argv[1]))
os.closerange(3, 100)
print("passed")
""",
    )
    assert said == ""


def test_a_signal_at_the_end_of_the_process_is_ignored(run) -> None:
    """Python has restored the default actions by then, but MPI_Finalize may still wait for other ranks."""
    run(
        """
class Last:
    def __del__(self, send=os.kill, process=os.getpid(), number=signal.SIGUSR1, write=os.write):
        send(process, number)
        write(1, b"passed\\n")
last = Last()
assert report_on_signal(Reporter("today", 0, 1, sys.argv[1]))
""",
    )


def test_nobody_listens_to_a_pipe_that_is_closed() -> None:
    heard, told = os.pipe()
    os.close(told)
    thread = threading.Thread(target=_report_when_told, args=(heard, None), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    os.close(heard)
