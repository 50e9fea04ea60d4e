"""Random training programs give the gradients of local training; ranks are threads."""

from __future__ import annotations

import pytest

from syncline.collectives.testing import run_ranks
from test_support.full_run import FULL
from test_support.random_training import draw, play

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(200 if FULL else 25))
def test_random_programs_train_as_one_process_does(seed: int, world_size: int) -> None:
    run_ranks(world_size, play, draw(seed, world_size))
