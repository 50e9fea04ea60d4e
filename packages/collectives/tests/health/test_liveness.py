"""Whether processes are still there, and what a group makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from syncline.collectives import RankLostError, TransportError
from syncline.collectives.health import liveness as module
from syncline.collectives.health.liveness import Liveness, ProcessIdentity, ProcessState, own_identity
from test_support.waiting import wait_until


def own() -> ProcessIdentity:
    found = own_identity()
    assert found is not None
    return found


def gone() -> ProcessIdentity:
    """Another process, which had this one's number before."""
    return replace(own(), started=own().started - 1)


def identity_of(pid: int) -> ProcessIdentity:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return replace(own(), pid=pid, started=int(fields[19]))


def test_this_process_runs() -> None:
    assert own().pid == os.getpid()
    assert own().state() is ProcessState.RUNNING


def test_another_process_of_the_same_number_is_not_that_one() -> None:
    assert gone().state() is ProcessState.GONE


def test_nothing_is_known_of_processes_on_other_nodes() -> None:
    assert replace(own(), node="elsewhere").state() is None


def test_a_process_is_seen_to_stop_and_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = identity_of(process.pid)
    liveness = Liveness({0: own(), 1: other}, 0)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    try:
        assert (other.state(), liveness.lost(), liveness.stopped()) == (ProcessState.RUNNING, (), ())
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: liveness.stopped() == (1,))
        assert liveness.lost() == ()
    finally:
        process.kill()
    wait_until(lambda: liveness.lost() == (1,))  # also before anybody has waited for it
    process.wait()
    assert liveness.lost() == (1,)


def test_a_loss_is_a_reason_after_a_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module, "monotonic", lambda: now_s)
    liveness = Liveness({0: own(), 1: own(), 2: gone()}, 0)
    assert liveness.reason_to_give_up() is None
    assert liveness.transfer_reason_to_give_up([2]) is None
    now_s += module.GRACE_S
    reason = liveness.reason_to_give_up()
    assert reason is not None
    assert reason.ranks == (2,)
    assert f"rank(s) 2 (pid {os.getpid()} on " in str(reason)
    assert liveness.transfer_reason_to_give_up([1]) is None
    assert liveness.transfer_reason_to_give_up([1, 2]) is None  # rank 1 may still send
    assert liveness.transfer_reason_to_give_up([2]) is not None


def test_a_part_of_a_group_counts_its_own_ranks() -> None:
    assert Liveness({0: own(), 1: own(), 2: gone()}, 0).part([2, 0], 1).lost() == (0,)


def test_what_a_library_knows_counts() -> None:
    assert Liveness({}, 0, lambda: [3]).lost() == (3,)


def test_the_loss_behind_an_error_is_found() -> None:
    found = Liveness({0: own(), 1: gone()}, 0).loss_behind(TransportError("connection closed"))
    assert isinstance(found, RankLostError)
    assert found.ranks == (1,)
