"""What a process can know of another's end, and how it says who it is."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from syncline.collectives.health.liveness import ProcessIdentity, has_ended, own_identity

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only /proc tells of other processes")

# The module alone: the package would load torch.
SAY_AND_WAIT = """
from syncline.collectives.health.liveness import own_identity
print(own_identity().to_text(), flush=True)
input()
"""
# The name of a process is bytes that its own program chooses.
NAME_THAT_IS_NO_TEXT = "open('/proc/self/comm', 'wb').write(b'\\xff) R (')\n"


def own() -> ProcessIdentity:
    found = own_identity()
    assert found is not None
    return found


def test_this_process_lives() -> None:
    assert not has_ended(own())


@pytest.mark.parametrize("before", ["", NAME_THAT_IS_NO_TEXT])
def test_a_process_lives_until_it_is_killed_also_before_its_parent_has_looked(before: str) -> None:
    program = [sys.executable, "-c", before + SAY_AND_WAIT]
    other = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    said = ProcessIdentity.parse(other.stdout.readline())
    assert said is not None
    assert said.pid == other.pid
    assert not has_ended(said)
    other.kill()
    end_s = time.monotonic() + 20
    while not has_ended(said) and time.monotonic() < end_s:
        time.sleep(0.001)
    assert has_ended(said)  # a zombie
    other.communicate()
    assert has_ended(said)


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    assert has_ended(replace(own(), started=own().started + 1))


def test_a_process_without_file_descriptors_takes_no_other_process_for_lost() -> None:
    other = own()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[0]), limits[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert other.state() is None
        assert not has_ended(other)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


def test_a_process_whose_proc_shows_another_namespace_says_nothing_of_itself() -> None:
    in_namespace = ("unshare", "--pid", "--fork")  # without `--mount-proc`, process 1 in /proc is another process
    if shutil.which("unshare") is None or subprocess.run((*in_namespace, "true"), capture_output=True).returncode:
        pytest.skip("this user cannot make a namespace of processes")
    program = "from syncline.collectives.health.liveness import own_identity; print(own_identity())"
    said = subprocess.run((*in_namespace, sys.executable, "-c", program), stdout=subprocess.PIPE, text=True, check=True)
    assert said.stdout == "None\n"


def test_a_text_of_it_is_read_again() -> None:
    assert ProcessIdentity.parse(own().to_text()) == own()


@pytest.mark.parametrize("text", ["", "process 123 on node7", "null", "[1]", '{"node": "n"}'])
def test_what_is_no_process_has_not_ended(text: str) -> None:
    assert ProcessIdentity.parse(text) is None
    assert not has_ended(ProcessIdentity.parse(text))


@pytest.mark.parametrize("pid", [1, 999999999])
def test_what_runs_elsewhere_is_not_known(pid: int) -> None:
    assert not has_ended(ProcessIdentity("elsewhere/boot/pid:[1]", "elsewhere", pid, 1))
