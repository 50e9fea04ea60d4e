"""Elastic training gives the result of one process, whoever is lost or comes. The trainings are random."""

from __future__ import annotations

import pytest

from test_support.full_run import FULL
from test_support.random_elastic import draw, play

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("seed", range(400 if FULL else 30))
def test_random_elastic_trainings_end_as_one_process_does(seed: int) -> None:
    play(draw(seed))
