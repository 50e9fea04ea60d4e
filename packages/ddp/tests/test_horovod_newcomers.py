"""`hvd.elastic.run` with newcomers whose first sync fails: they do not train from a state of their own. Ranks are processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.testing.processes import run_processes
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.launch

JOB = Path(__file__).with_name("horovod_newcomers_job.py")


def results(folder: Path, processes: int, moment: str) -> list[str]:
    """Of all processes but process 0, which is killed."""
    (folder / "moment").write_text(moment)
    run_processes(JOB, processes, folder, killed=frozenset({0}), timeout_s=LIMIT_S)
    return [(folder / f"result-{number}").read_text() for number in range(1, processes)]


@pytest.mark.parametrize("moment", ["before the reset", "before the sync"])
def test_a_newcomer_alone_ends_if_it_never_got_the_state(tmp_path: Path, moment: str) -> None:
    assert results(tmp_path, 2, moment) == [
        "all ranks that had the state of the training are lost; start it again from a checkpoint"
    ]


def test_a_rank_0_without_the_state_gets_it_from_another_newcomer(tmp_path: Path) -> None:
    assert results(tmp_path, 3, "in the training") == ["7", "7"]
