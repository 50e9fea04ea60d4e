"""Ranks that ask for different groups, or were given different options."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.api.subgroups import verify_request
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.agreement import Agreement, Carrier
from syncline.collectives.health.recorder import Recorder
from syncline.collectives.health.statements import Statements, ranks_in_words
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("size", [2, 3])
def test_other_members_are_named_on_all_ranks(size: int) -> None:
    def body(group: ProcessGroup) -> None:
        verify_request(group, "new_group([0])")
        with pytest.raises(DisagreementError) as caught:
            verify_request(group, "new_group([0, 1])" if group.rank == 1 else "new_group([0])")
        others = "rank 0" if size == 2 else "ranks 0, 2"
        assert f"{others}: new_group([0]); rank 1: new_group([0, 1])" in str(caught.value)
        group.barrier()

    run_ranks(size, body)


def test_a_request_may_name_more_ranks_than_are_gathered() -> None:
    """What is gathered of each rank, if they differ, has a bound; a difference behind it is seen all the same."""
    members = list(range(1000))

    def body(group: ProcessGroup) -> None:
        verify_request(group, f"new_group({members})")
        with pytest.raises(DisagreementError) as caught:
            verify_request(group, f"new_group({members[: 1000 - group.rank]})")
        assert len(str(caught.value)) < 2 * 1024 + 300

    run_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_other_options_are_named_on_all_ranks(size: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_REPORT_DIR", str(tmp_path))
    shared_state = SharedState(size)

    def body(outer: ProcessGroup) -> None:
        group = HostGroup(InProcessTransport(shared_state, outer.rank), outer.rank, size, timeout_s=10)
        group.start({"check_calls": False})
        if size > 1:
            others = ranks_in_words([rank for rank in range(size) if rank != 1])
            with pytest.raises(DisagreementError, match=rf"\n  {others}: check_calls=False"):
                group.start({"check_calls": outer.rank == 1})
        outer.barrier()

    run_ranks(size, body)
    assert not list(tmp_path.iterdir())


def test_all_ranks_report_to_one_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_REPORT_DIR", str(tmp_path))
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        group = HostGroup(InProcessTransport(shared_state, outer.rank), outer.rank, 2, timeout_s=10)
        group.start({})
        part = group.split(0)
        assert part is not None
        with pytest.raises(DisagreementError, match=r"writes what it knows to .*syncline-report-"):
            part.barrier() if outer.rank else part.split(0)
        outer.barrier()

    run_ranks(2, body)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.1.json", "rank-1.1.json"]


def test_who_hears_first_does_not_leave_before_the_others_have_heard() -> None:
    """By leaving it would end their connections, and they would get another error."""
    asked: list[str] = []

    class Recorded(Carrier):
        """Two ranks that were given different options."""

        def maximum(self, numbers: Sequence[int], scope: CancelScope) -> list[int]:
            asked.append(f"maximum of {len(numbers)}")
            return [number + 1 for number in numbers]

        def statements(self, text: str, scope: CancelScope) -> Statements:
            asked.append("statements")
            return Statements.of([text, "other"])

    with pytest.raises(DisagreementError, match="rank 1: other"):
        Agreement(Recorded(), 0, Recorder("default", 0, [0, 1])).on_start({"check_calls": True}, CancelScope(10))
    assert asked == ["maximum of 3", "statements", "maximum of 1"]
