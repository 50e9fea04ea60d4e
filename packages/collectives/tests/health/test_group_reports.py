"""A group that fails leaves a report of each rank, and its error says where."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.engine import engine_group
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.report import Reporter, merged, read_reports
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState, create_groups

pytestmark = pytest.mark.ranks


class Interrupted(InProcessTransport):
    """Somebody presses Ctrl-C while a barrier is under way."""

    def barrier(self, *_: object) -> None:
        raise KeyboardInterrupt


def on_ranks(size: int, folder: Path, body, transport: type[InProcessTransport] = InProcessTransport) -> None:
    shared_state = SharedState(size)

    def rank_body(outer: ProcessGroup) -> None:
        group = HostGroup(transport(shared_state, outer.rank), outer.rank, size, timeout_s=10)
        group.report_to(Reporter("today", outer.rank, size, str(folder)))
        body(group)

    run_ranks(size, rank_body)


def test_every_rank_reports_and_the_merged_report_says_who_was_wrong(tmp_path: Path) -> None:
    def body(group: HostGroup) -> None:
        group.all_reduce(torch.ones(3))
        with pytest.raises(DisagreementError) as caught:
            group.broadcast(torch.ones(3)) if group.rank != 2 else group.all_gather_into_tensor(torch.ones(9), torch.ones(3))
        assert str(tmp_path / "syncline-report-today") in str(caught.value)

    on_ranks(3, tmp_path, body)
    said = merged(read_reports(tmp_path / "syncline-report-today"))
    assert said.startswith("3 of 3 rank(s) have reported")
    assert "rank 2 called all_gather_into_tensor(" in said
    assert "; ranks 0, 1 called broadcast(float32[3], root=0) #1 at test_group_reports.py:" in said


def test_a_part_of_a_group_reports_too(tmp_path: Path) -> None:
    def body(group: HostGroup) -> None:
        part = group.split(0)
        assert part is not None
        with pytest.raises(DisagreementError, match="syncline-report-today"):
            part.all_reduce(torch.ones(3 + group.rank))

    on_ranks(2, tmp_path, body)
    assert "group 'default/0.0' of ranks 0, 1" in merged(read_reports(tmp_path / "syncline-report-today"))


def test_the_groups_after_a_loss_are_reported_with_the_ranks_of_the_job(tmp_path: Path) -> None:
    groups = create_groups(3, timeout_s=10)
    for rank, group in enumerate(groups):
        group.report_to(Reporter("today", rank, 3, str(tmp_path)))
    groups[1].lose()

    def body(rank: int) -> None:
        smaller = groups[rank].shrink(silence_timeout_s=20)
        part = smaller.split(0)
        assert part is not None
        for each in (smaller, part):
            each.all_reduce(torch.ones(2))
        assert smaller.reporter is not None
        smaller.reporter.write("a test")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(body, (0, 2)))
    said = merged(read_reports(tmp_path / "syncline-report-today"))
    for name in ("default", "default/0.0"):
        lines = said.partition(f"group '{name}' of ranks 0, 2\n")[2].splitlines()
        assert lines[3] == "all made the same calls, and finished them"


def test_whoever_interrupts_the_program_finds_no_folder(tmp_path: Path) -> None:
    def body(group: HostGroup) -> None:
        with pytest.raises(KeyboardInterrupt):
            group.barrier()

    on_ranks(1, tmp_path, body, Interrupted)
    assert not list(tmp_path.iterdir())


def test_an_error_does_not_wait_for_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(engine_group, "LONGEST_REPORT_S", 0.1)
    monkeypatch.setattr(Reporter, "write", lambda *_: answers.wait(60))

    def body(group: HostGroup) -> None:
        with pytest.raises(DisagreementError):
            group.all_reduce(torch.ones(3 + group.rank))
        assert not answers.is_set()

    try:
        on_ranks(2, tmp_path, body)
    finally:
        answers.set()
