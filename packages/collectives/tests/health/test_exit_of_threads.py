"""A program that ends leaves no thread of ours behind: one inside torch, when the interpreter goes, aborts the process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from test_support.jobs import LIMIT_S

WATCHED = """
import threading
import torch
from syncline.collectives.health import monitor

looked, dropped, freed = threading.Event(), threading.Event(), threading.Event()

class Group:
    def __init__(self):
        self.tensors = [torch.frombuffer(bytearray(8), dtype=torch.uint8) for _ in range(100_000)]

    @property
    def running(self):
        looked.set()
        dropped.wait()

    def __del__(self):
        freed.set()  # but for its tensors

group = Group()
monitor.watch(group)
looked.wait()
del group
dropped.set()
freed.wait()
"""

EVERY_THREAD = """
import atexit, sys, threading

@atexit.register  # the first one, hence called last
def tell():
    print([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])

import torch
from syncline import collectives as sc

sc.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1, timeout=20.0)
group = sc.get_default_group()
works = [group.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
print(sorted({thread.name.split()[0] for thread in threading.enumerate()}))
"""

WATCHED_LATE = """
import atexit, threading

@atexit.register  # before the monitor's, hence called after it
def late():
    monitor.watch(group)
    print([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])

from syncline.collectives.health import monitor

class Group:
    running = None

group = Group()
monitor.watch(group)
"""

FORKED = """
import os
from syncline.collectives.health import monitor
from syncline.collectives.health.recorder import Recorder
from syncline.collectives.health.stalls import StallWatch

def watched():
    watch = StallWatch(Recorder("default", 1, [0, 1]), None, 1000.0)
    monitor.call_now_and_then(watch)
    return watch

def look():
    return [monitor._monitor._thread.is_alive(), len(monitor._monitor._looked)]

watch = watched()
with monitor._monitor._lock:  # another thread may just have it
    if os.fork() == 0:
        mine = watched()
        print(look(), flush=True)
        os._exit(0)
os.wait()
print(look())
"""

FORKED_WHILE_ANOTHER_THREAD_STARTS = """
import os, sys
from syncline.collectives.health import monitor

class Group:
    running = None

group = Group()
with monitor._starting:
    if os.fork() == 0:
        monitor.watch(group)
        print(len(monitor._monitor._groups), flush=True)
        sys.exit(0)
os.wait()
"""


@pytest.fixture
def run(python: list[str]) -> Callable[..., list[str]]:
    """Run a program; the lines that it prints."""

    def run(program: str, *words: str) -> list[str]:
        done = subprocess.run([*python, "-c", program, *words], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 has its Gloo print

    return run


def test_a_group_that_the_monitor_is_the_last_to_hold(run) -> None:
    assert run(WATCHED) == []


def test_every_thread_is_ended(run, tmp_path: Path) -> None:
    during, at_the_end = run(EVERY_THREAD, str(tmp_path))
    assert "syncline-monitor" in during, during
    assert at_the_end == "[]"


def test_nobody_is_watched_from_the_end_on(run) -> None:
    assert run(WATCHED_LATE) == ["[]"]


def test_a_fork_watches_for_its_own_stalls(run) -> None:
    assert run(FORKED) == ["[True, 1]", "[True, 1]"]


def test_a_fork_has_a_monitor_of_its_own(run) -> None:
    assert run(FORKED_WHILE_ANOTHER_THREAD_STARTS) == ["1"]


def test_a_call_while_the_interpreter_ends_is_an_error_and_no_hang(python: list[str], tmp_path: Path) -> None:
    """An object that lives until then may issue a call in `__del__`."""
    program = """
import sys
from syncline.collectives.engine.queue import Queue
from syncline.collectives.health.report import Reporter

class Late:
    queue, reporter = Queue("late"), Reporter("job", 0, 1, sys.argv[1])

    def __del__(self):
        assert sys.is_finalizing()
        try:
            self.queue.enqueue(lambda: None)
        except RuntimeError as error:
            print(error)
        self.reporter.write_within("a reason", 60)
        print("no hang")

late = Late()
"""
    done = subprocess.run([*python, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "no thread can start while the interpreter ends\nno hang\n", done.stderr
