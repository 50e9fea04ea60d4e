"""What a group does about a collective that failed."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from syncline.collectives import CollectiveTimeout
from syncline.collectives.engine import host_group
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.transports.threads import InProcessTransport, SharedState, create_groups


def fail_once() -> None:
    group = HostGroup(InProcessTransport(SharedState(2), 0), 0, 2, timeout_s=0.001)
    with pytest.raises(CollectiveTimeout):
        group.all_reduce(torch.ones(4))
    group.abort()


def test_only_the_latest_given_up_calls_are_kept() -> None:
    for _ in range(host_group.GIVEN_UP_KEPT + 3):
        fail_once()
    assert len(host_group._given_up) == host_group.GIVEN_UP_KEPT
    first = host_group._given_up[0]
    fail_once()
    assert first is not host_group._given_up[0]


def test_the_first_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="syncline.collectives"):
        fail_once()
    assert "all_reduce on rank 0 of 2 in group 'default' failed" in caplog.text
    assert "runs no other call" in caplog.text


def test_the_words_at_the_end_of_a_process_name_the_call() -> None:
    first, second = create_groups(2, timeout_s=30)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(first.all_reduce, torch.ones(3))
        end_s = time.monotonic() + 20
        while first.running is None and time.monotonic() < end_s:
            time.sleep(0.005)
        words = first.missing_in_words()
        second.all_reduce(torch.ones(3))
        running.result()
    assert words.startswith("all_reduce(float32[3], op=SUM), number 0 on rank 0 of 2 in group 'default' did not end: ")
    assert first.missing_in_words().startswith("a collective on rank 0")
