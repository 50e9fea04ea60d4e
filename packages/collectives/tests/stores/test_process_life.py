"""What a process can know of another's end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from syncline.collectives.stores.process_life import has_ended, own_process

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only /proc tells of other processes")

SAY_AND_WAIT = "from syncline.collectives.stores.process_life import own_process; print(own_process(), flush=True); input()"


def test_this_process_lives() -> None:
    assert not has_ended(own_process())


def test_a_process_lives_until_it_is_killed_also_before_its_parent_has_looked() -> None:
    other = subprocess.Popen([sys.executable, "-c", SAY_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    said = other.stdout.readline().strip()
    assert not has_ended(said)
    other.kill()
    end_s = time.monotonic() + 20
    while not has_ended(said) and time.monotonic() < end_s:
        time.sleep(0.001)
    assert has_ended(said)  # a zombie
    other.communicate()
    assert has_ended(said)


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    where, number, started = own_process().split(" ")
    assert has_ended(f"{where} {number} {int(started) + 1}")


@pytest.mark.parametrize(
    "process", ["", "process 123 on node7", "elsewhere/boot/pid:[1] 1 1", "elsewhere/boot/pid:[1] 999999999 1"]
)
def test_what_runs_elsewhere_is_not_known(process: str) -> None:
    assert not has_ended(process)
