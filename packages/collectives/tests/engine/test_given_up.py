"""What a group does about a collective that failed."""

from __future__ import annotations

import logging

import pytest
import torch

from syncline.collectives import CollectiveTimeout
from syncline.collectives.engine import host_group
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.transports.threads import InProcessTransport, SharedState


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
