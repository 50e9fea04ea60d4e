from __future__ import annotations

import threading
import time

import pytest
import torch

from syncline.collectives import CollectiveTimeout, DisagreementError, InvalidArgumentError, ProcessGroup, TransportError
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def notes_of(error: BaseException) -> str:
    """What the error says beside its message: notes, or, before Python 3.11, its cause."""
    return " ".join([*getattr(error, "__notes__", []), str(error.__cause__)])


def test_results_by_rank_and_arguments() -> None:
    assert run_ranks(3, lambda group, a, b: (group.rank, group.size, a, b), "x", 2) == [(r, 3, "x", 2) for r in range(3)]


def test_each_rank_has_its_thread() -> None:
    def body(group: ProcessGroup) -> int:
        group.barrier()  # all are alive at once, so the idents differ
        return threading.get_ident()

    assert len({*run_ranks(4, body), threading.get_ident()}) == 5


def test_the_first_error_is_raised_not_what_follows_from_it() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            raise KeyError("the original")
        group.all_reduce(torch.ones(1))

    start_s = time.monotonic()
    with pytest.raises(KeyError, match="the original") as info:
        run_ranks(3, body)
    assert "rank 1 of 3" in notes_of(info.value)
    assert time.monotonic() - start_s < 5


def test_the_others_are_woken() -> None:
    woken: list[BaseException] = []

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            raise RuntimeError("first")
        try:
            group.barrier()
        except BaseException as error:
            woken.append(error)
            raise

    with pytest.raises(RuntimeError, match="first"):
        run_ranks(3, body)
    assert len(woken) == 2
    assert all(isinstance(error, TransportError) or "closed" in str(error) for error in woken)


def test_a_skip_is_passed_on() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(2, lambda group: pytest.skip("not here"))


def test_a_rank_that_hangs_is_shown() -> None:
    leave = threading.Event()

    def where_it_hangs() -> None:
        leave.wait(30)

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            where_it_hangs()

    with pytest.raises(TimeoutError) as info:
        run_ranks(2, body, timeout_s=0.3)
    leave.set()
    assert "rank 1 of 2 did not return within 0.3 s" in str(info.value)
    assert "where_it_hangs" in str(info.value)
    assert "rank 0" not in str(info.value)


def test_ranks_that_miss_one_another_are_shown() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.set_timeout(0.3)
            group.all_reduce(torch.ones(1))

    with pytest.raises(CollectiveTimeout, match=r"all_reduce\(float32\[1\], op=SUM\).*\n  rank\(s\) 1 have not called"):
        run_ranks(2, body)


def test_a_collective_fails_before_the_run_does() -> None:
    assert run_ranks(2, lambda group: group.timeout_s, timeout_s=20.0) == [18.0] * 2


def test_a_rank_that_hangs_after_another_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.collectives.testing.ranks._GRACE_S", 0.2)
    leave = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            raise ValueError("the original")
        leave.wait(30)

    with pytest.raises(ValueError, match="the original") as info:
        run_ranks(2, body)
    leave.set()
    assert "rank 1 of 2 did not end within 0.2 s" in notes_of(info.value)


def test_groups_are_closed_at_the_end() -> None:
    groups = run_ranks(2, lambda group: group)
    with pytest.raises(Exception, match="closed"):
        groups[0].barrier()


def test_at_least_one_rank() -> None:
    with pytest.raises(InvalidArgumentError):
        run_ranks(0, lambda group: None)


def test_a_collective_that_fails_unseen_fails_the_run() -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(1), async_op=True)
        else:
            group.broadcast(torch.ones(1), 0, async_op=True)

    with pytest.raises(DisagreementError, match="the ranks called different collectives") as info:
        run_ranks(2, body)
    assert "(run_ranks)" in notes_of(info.value)


def test_a_collective_that_never_ends_fails_the_run() -> None:
    def body(group: ProcessGroup) -> None:
        group.set_timeout(0.5)
        if group.rank == 0:
            group.all_reduce(torch.ones(1), async_op=True)

    with pytest.raises(CollectiveTimeout, match=r"rank\(s\) 1 have not called"):
        run_ranks(2, body)
