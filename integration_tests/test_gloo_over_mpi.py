"""Backend "gloo" with ranks that meet over MPI: it behaves the same over every MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from syncline.collectives import ProcessGroup
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.launch import detect_launch
from syncline.collectives.startup.registry import load_backend
from syncline.collectives.testing import CHECKS, Check

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def gloo_group() -> Iterator[ProcessGroup]:
    request = ConnectRequest(detect_launch(os.environ), None, None, None, timeout_s=30.0, group_name="gloo over MPI")
    group = load_backend("gloo").connect(request)
    yield group
    group.close()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_gloo_over_mpi_conforms(gloo_group: ProcessGroup, check: Check) -> None:
    check(gloo_group)
