"""The public suite over the group's own logic: NCCL and the GPU are stood in for by threads.

Through the real CuPy `test_fakes` runs it on 2 and 3 ranks.
"""

from __future__ import annotations

import pytest

from syncline.collectives.testing import CHECKS, Check
from syncline.collectives.testing.conformance.endings import ENDINGS
from test_support.fake_nccl_group import run_on_fakes

pytestmark = pytest.mark.ranks

HAS_TAGS = (
    "point_to_point_tags",
    "point_to_point_any_source",
    "point_to_point_futures",
    "point_to_point_apart_from_other_calls",
)
ROUNDS_HALVES_ONCE = "all_reduce_halves_round_once"
THE_SUITE = [name for name in CHECKS if name not in HAS_TAGS]
each_size = pytest.mark.parametrize("size", [1, 3])


@each_size
@pytest.mark.parametrize("name", THE_SUITE)
def test_the_suite(size: int, name: str) -> None:
    run_on_fakes(size, CHECKS[name], reproducible=name == ROUNDS_HALVES_ONCE)


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith(("all_reduce", "reduce"))])
def test_reproducible(name: str) -> None:
    """Met over a host group, too."""
    run_on_fakes(3, CHECKS[name], reproducible=True, over_host_group=True)


# Over NCCL, `wait` does not block, so a later call raises the error of the time limit (`test_failures`).
ENDS = {name: check for name, check in ENDINGS.items() if "time limit" not in name}


@each_size
@pytest.mark.parametrize("check", ENDS.values(), ids=ENDS)
def test_endings(size: int, check: Check) -> None:
    run_on_fakes(size, check)
