"""`hvd.elastic.run` with newcomers: the first sync may fail, and optimizers may be older. Ranks are processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.collectives import StoreError, TransportError
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.threads import create_groups
from syncline.horovod import elastic
from test_support.jobs import LIMIT_S

pytestmark = pytest.mark.launch

JOB = Path(__file__).with_name("horovod_newcomers_job.py")
ADMISSION_JOB = JOB.with_name("horovod_admission_job.py")


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


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("place", ["in the training function", "in a reset callback"])
def test_ranks_may_come_and_go_where_optimizers_were_made_before(tmp_path: Path, place: str, loses: bool) -> None:
    (tmp_path / "place").write_text(place)
    if loses:
        (tmp_path / "loses").touch()
    run_processes(ADMISSION_JOB, 3, tmp_path, killed=frozenset({2} if loses else ()), timeout_s=LIMIT_S)
    found = [(tmp_path / f"result-{number}").read_text() for number in range(2 if loses else 3)]
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    # Two steps with each number of ranks. Rank r's gradient of each weight is 2 (r + 1), and 2 for the bias.
    for ranks in (1, 2, 2 if loses else 3):
        for parameter, gradient in ((model.weight, 1.0 + ranks), (model.bias, 2.0)):
            for _ in range(2):
                parameter.data -= 0.01 * torch.full_like(parameter, gradient)
    assert len(set(found)) == 1, found
    weight, bias = ast.literal_eval(found[0])
    torch.testing.assert_close(torch.tensor(weight), model.weight.data)
    torch.testing.assert_close(torch.tensor(bias), model.bias.data)


def test_a_newcomer_that_waited_for_a_long_time_also_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, entered = [0.0], []
    group: Any = SimpleNamespace(is_waiting=False, shrink=lambda: "a group without the lost rank")

    def admit() -> Any:
        now_s[0] += elastic._GIVE_UP_S  # the training runs to its next commit
        return "a group with a rank that dies now"

    def go_on(made: Any) -> None:
        entered.append(made)
        if len(entered) == 1:
            now_s[0] += 1.0
            raise TransportError("a rank is lost")

    monkeypatch.setattr(elastic, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(elastic, "world", lambda: SimpleNamespace(group=group))
    monkeypatch.setattr(elastic, "_go_on", go_on)
    elastic._change_ranks(admit)
    assert entered == ["a group with a rank that dies now", "a group without the lost rank"]
