"""`hvd.elastic.run` with newcomers whose first sync fails: they do not train from a state of their own. Ranks are processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from syncline.collectives import StoreError
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.threads import create_groups
from syncline.horovod import elastic
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


def test_a_look_at_the_store_that_fails_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (group,) = create_groups(1)
    monkeypatch.setattr(elastic, "world", lambda: SimpleNamespace(group=group))
    monkeypatch.setattr(elastic, "broadcast_object", lambda number: number)
    answers: Iterator[StoreError | int] = iter([StoreError("too many open files"), 0, 1])

    def newcomers() -> int:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    monkeypatch.setattr(group, "newcomers", newcomers)
    state = elastic.ObjectState(step=0)
    state.commit()
    assert "whether somebody waits to be let in: too many open files" in caplog.text
    state.commit()
    with pytest.raises(elastic.HostsUpdatedInterrupt):
        state.commit()
    group.close()
