"""Torch's own tests of torch.distributed and of DDP judge ours; see `torch_suite`.

By default those that are expected to pass run over our group with our DDP. With SYNCLINE_TORCH_SUITE=all the others run, too,
and one that passes without being expected to is an error, so that the table stays true.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch's own tests need expecttest")
sys.path.insert(0, str(Path(__file__).parent))

from torch_suite.driver import run_suite, suite_names
from torch_suite.expectations import NOT, PASS

pytestmark = pytest.mark.launch
OURS = "our-group+our-ddp"
LAUNCHER = (str(Path(sys.executable).with_name("mpiexec")), "-n", "2")


@pytest.mark.timeout(600)
def test_what_passes_over_torchs_own_group_passes_over_ours() -> None:
    found = run_suite(OURS, PASS, LAUNCHER, 2)
    assert {name: verdict for name, verdict in found.items() if verdict != "pass"} == {}


@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.environ.get("SYNCLINE_TORCH_SUITE") != "all", reason="SYNCLINE_TORCH_SUITE=all runs these, too")
def test_what_is_not_expected_to_pass_does_not() -> None:
    found = run_suite(OURS, sorted(NOT), LAUNCHER, 2)
    assert [name for name, verdict in found.items() if verdict == "pass"] == []


def test_the_table_names_tests_that_there_are() -> None:
    assert sorted({*PASS, *NOT}.difference(suite_names())) == []
    assert set(PASS).isdisjoint(NOT)
