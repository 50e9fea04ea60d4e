"""Groups that lose ranks: those that are left agree on who they are, and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from syncline.collectives import (
    BackendUnavailableError,
    GroupClosedError,
    ProcessGroup,
    RankGivenUpError,
    TransportError,
)
from syncline.collectives.backends.gloo_reunion import store_lack
from syncline.collectives.backends.in_process import InProcessGroup, create_groups
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.stores import InMemoryStore
from syncline.collectives.survivors.roll_call import RollCall
from syncline.collectives.testing.processes import run_processes

JOB = Path(__file__).with_name("shrinking_job.py")


def in_threads(count: int, body: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(body, range(count)))


# ---- the agreement ----


def answer(call: RollCall, patience_s: float) -> object:
    try:
        return call.survivors(patience_s)
    except RankGivenUpError:
        return "given up"


@pytest.mark.parametrize(
    ("members", "callers", "ended", "survivors"),
    [
        ((0, 1, 2, 3), (0, 1, 3), {2}, (0, 1, 3)),
        ((0, 1, 2, 3), (3,), {0, 1, 2}, (3,)),
        ((4, 0, 2), (2, 4), {0}, (4, 2)),  # in the order of the members
        ((0, 1, 2), (0, 1, 2), set(), (0, 1, 2)),  # the connection broke, and nobody died
    ],
)
def test_all_agree_on_those_that_call(
    members: tuple[int, ...], callers: tuple[int, ...], ended: set[int], survivors: tuple[int, ...]
) -> None:
    store = InMemoryStore()
    calls = [RollCall(store, members, me, lambda member: member in ended) for me in callers]
    answers = in_threads(len(calls), lambda number: answer(calls[number], 30))
    assert set(answers) == {survivors}


def test_who_is_silent_for_too_long_is_given_up_and_hears_it() -> None:
    store = InMemoryStore()
    assert RollCall(store, (0, 1), 0, lambda _: False).survivors(0.05) == (0,)
    with pytest.raises(RankGivenUpError, match=r"members \[0\] have gone on without it"):
        RollCall(store, (0, 1), 1, lambda _: False).survivors(30)


def test_the_first_decision_holds_for_those_who_come_later() -> None:
    store = InMemoryStore()
    store.set("here/2", b"")  # it calls, and dies
    assert RollCall(store, (0, 1, 2), 0, lambda _: False).survivors(0.05) == (0, 2)
    with pytest.raises(RankGivenUpError):
        RollCall(store, (0, 1, 2), 1, lambda _: True).survivors(30)


# ---- which stores outlive each rank ----


@pytest.mark.parametrize(
    ("init_method", "store", "size", "agent", "survives"),
    [
        ("file:///shared", None, 2, False, True),
        ("tcp://host:1", None, 2, False, False),
        ("tcp://host:1", None, 1, False, True),
        ("env://", None, 2, True, True),
        ("env://", None, 2, False, False),
        (None, None, 2, True, True),
        (None, None, 2, False, False),  # MPI launched it, or MASTER_ADDR
        (None, HashStore(), 2, False, True),  # the caller's
    ],
)
def test_which_stores_outlive_each_rank(
    init_method: str | None, store: HashStore | None, size: int, agent: bool, survives: bool
) -> None:
    request = ConnectRequest(None, 0, size, init_method, 60, store=store)
    lack = store_lack(request, size, {"TORCHELASTIC_USE_AGENT_STORE": str(agent)})
    assert (lack is None) == survives
    assert lack is None or "file:///shared/folder" in lack


def test_a_group_that_cannot_says_so() -> None:
    def body(group: ProcessGroup) -> None:
        half = group.split(0)
        assert half is not None
        lack = half.missing_for_shrink()
        assert lack is not None
        with pytest.raises(BackendUnavailableError, match="cannot connect the ranks that are left"):
            half.shrink()

    groups = create_groups(2)
    in_threads(2, lambda rank: body(groups[rank]))


# ---- ranks as threads ----


def total(group: ProcessGroup) -> float:
    tensor = torch.tensor([float(10**group.rank)])
    group.all_reduce(tensor)
    return tensor.item()


def total_for_ever(group: ProcessGroup) -> None:
    while True:
        total(group)


def test_the_first_alarm_tells_the_others_what_failed() -> None:
    first, second = create_groups(2)
    first._reunion.raise_alarm(first._reunion.generation, "rank 0 had enough")
    second._reunion.raise_alarm(second._reunion.generation, "rank 1 as well")
    for group in (first, second):
        assert str(group._alarm()).endswith("this collective will not finish: rank 0 had enough")
        group.abort()


@pytest.mark.parametrize("lost", [{1}, {0}, {0, 3}, {0, 1, 2}])
def test_threads_that_are_left_go_on(lost: set[int]) -> None:
    groups = create_groups(4, timeout_s=30)

    def body(rank: int) -> object:
        group: ProcessGroup = groups[rank]
        assert total(group) == 1111
        if rank in lost:
            groups[rank].lose()
            return None
        with pytest.raises(TransportError):
            total_for_ever(group)
        group = group.shrink(patience_s=30)
        survivors = [other for other in range(4) if other not in lost]
        assert (group.rank, group.size, group.name) == (survivors.index(rank), len(survivors), "default")
        assert total(group) == sum(10**number for number in range(len(survivors)))
        with pytest.raises(GroupClosedError):
            groups[rank].all_reduce(torch.ones(1))
        with pytest.raises(GroupClosedError, match="there is a newer group already"):
            groups[rank].shrink()
        return group.size

    assert in_threads(4, body) == [None if rank in lost else 4 - len(lost) for rank in range(4)]


def test_a_thread_that_is_lost_during_the_shrink_is_left_out_of_the_next_generation() -> None:
    groups = create_groups(3, timeout_s=30)
    may_go_on = threading.Event()

    def body(rank: int) -> object:
        group: ProcessGroup = groups[rank]
        total(group)
        if rank == 0:
            groups[0].lose()
            return None
        if rank == 1:
            reunion = groups[1]._reunion
            RollCall(reunion._keys(reunion.generation), (0, 1, 2), 1, reunion.has_ended).survivors(30)
            groups[1].lose()  # after it was counted, before it connects
            may_go_on.set()
            return None
        shrunk = _shrink_in_vain_of_1(groups[2], may_go_on)
        return shrunk.size

    assert in_threads(3, body) == [None, None, 1]


def test_members_that_live_and_cannot_connect_give_up() -> None:
    groups = create_groups(2, timeout_s=30)

    def refuse(generation, timeout_s):  # type: ignore[no-untyped-def]
        raise TransportError("a firewall")

    def body(rank: int) -> str:
        groups[rank]._reunion.connect = refuse  # type: ignore[method-assign]
        with pytest.raises(TransportError, match=r"members \[0, 1\] live, and could not connect: a firewall") as raised:
            groups[rank].shrink()
        return str(raised.value)

    assert len(set(in_threads(2, body))) == 1


def _shrink_in_vain_of_1(group: InProcessGroup, may_go_on: threading.Event) -> ProcessGroup:
    connect = group._reunion.connect

    def connect_soon(generation, timeout_s):  # type: ignore[no-untyped-def]
        may_go_on.wait(30)
        if 1 in generation.members:
            raise TransportError("rank 1 has ended")
        return connect(generation, timeout_s)

    group._reunion.connect = connect_soon  # type: ignore[method-assign]
    return group.shrink(patience_s=30)


# ---- processes over Gloo ----


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [{1}, {0, 2}])
def test_processes_that_are_left_go_on(tmp_path: Path, killed: set[int]) -> None:
    (tmp_path / "plan").write_text("kill " + " ".join(map(str, killed)))
    run_processes(JOB, 4, tmp_path, killed=frozenset(killed))


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_a_stopped_process_that_was_given_up_ends_with_a_clear_error_and_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("stop 2")
    run_processes(JOB, 4, tmp_path)
    assert "members [0, 1, 3] have gone on without it" in (tmp_path / "given-up").read_text()
