"""Groups that lose ranks: those that are left agree on who they are, and go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from syncline.collectives import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    LaunchError,
    ProcessGroup,
    RankGivenUpError,
    RankLostError,
    TransportError,
    init_process_group,
)
from syncline.collectives.health.stalls import StatusPost
from syncline.collectives.membership import store_reconnector
from syncline.collectives.membership.store_reconnector import MembershipVote
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.stores import InMemoryStore
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.gloo import GlooBackend
from syncline.collectives.transports.gloo_reconnector import store_lack
from syncline.collectives.transports.threads import InProcessGroup, InProcessTransport, create_groups
from test_support.waiting import wait_until

JOB = Path(__file__).with_name("shrinking_job.py")


def in_threads(count: int, body: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(body, range(count)))


# ---- the agreement ----


def answer(call: MembershipVote, silence_timeout_s: float) -> object:
    try:
        return call.agree(silence_timeout_s)
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
    calls = [MembershipVote(store, members, me, lambda member: member in ended) for me in callers]
    answers = in_threads(len(calls), lambda number: answer(calls[number], 30))
    assert set(answers) == {survivors}


def test_who_is_silent_for_too_long_is_given_up_and_hears_it() -> None:
    store = InMemoryStore()
    assert MembershipVote(store, (0, 1), 0, lambda _: False).agree(0.05) == (0,)
    with pytest.raises(RankGivenUpError, match=r"members \[0\] have gone on without it"):
        MembershipVote(store, (0, 1), 1, lambda _: False).agree(30)


def test_the_first_decision_holds_for_those_who_come_later() -> None:
    store = InMemoryStore()
    store.set("here/2", b"")  # it calls, and dies
    assert MembershipVote(store, (0, 1, 2), 0, lambda _: False).agree(0.05) == (0, 2)
    with pytest.raises(RankGivenUpError):
        MembershipVote(store, (0, 1, 2), 1, lambda _: True).agree(30)


@pytest.mark.parametrize(
    ("present", "running", "gives_up"),
    [
        ({0}, {1, 2}, True),  # its own connections may be all that broke
        ({0}, {1}, False),  # half are enough
        ({0, 1}, {2, 3}, False),
        ({0}, set(), False),  # the others are stopped, or on other hosts: nobody knows
    ],
)
def test_few_do_not_give_up_many_that_run(present: set[int], running: set[int], gives_up: bool) -> None:
    store = InMemoryStore()
    for member in present - {0}:
        store.set(f"here/{member}", b"")
    call = MembershipVote(store, (0, 1, 2, 3), 0, lambda _: False, lambda member: member in running)
    if not gives_up:
        assert call.agree(0.05) == tuple(sorted(present))
        return
    with pytest.raises(RankGivenUpError, match=r"but \[1, 2\] still run"):
        call.agree(0.05)
    assert MembershipVote(store, (0, 1, 2, 3), 1, lambda member: member != 2).agree(0.05) == (1,)  # 0 is not waited for


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
    first._reconnector.raise_alarm(first._reconnector.generation, "rank 0 had enough")
    second._reconnector.raise_alarm(second._reconnector.generation, "rank 1 as well")
    for group in (first, second):
        assert str(group._alarm()).endswith("this collective will not finish: rank 0 had enough")
        group.abort()


def test_the_alarm_after_ctrl_c_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    first, second = create_groups(2)
    monkeypatch.setattr(first._transport, "all_reduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.all_reduce(torch.ones(1))
    assert str(second._alarm()).endswith("this collective will not finish: KeyboardInterrupt")
    with pytest.raises(TransportError, match=r"had failed before:\n  KeyboardInterrupt"):
        first.all_reduce(torch.ones(1))
    for group in (first, second):
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
        group = group.shrink(silence_timeout_s=30)
        survivors = [other for other in range(4) if other not in lost]
        assert (group.rank, group.size, group.name) == (survivors.index(rank), len(survivors), "default")
        assert total(group) == sum(10**number for number in range(len(survivors)))
        for call in (lambda: groups[rank].all_reduce(torch.ones(1)), groups[rank].shrink):
            with pytest.raises(GroupClosedError, match="there is a newer group already; use the one that shrink") as caught:
                call()
            assert len(str(caught.value).splitlines()[0]) <= 200
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
            reconnector = groups[1]._reconnector
            MembershipVote(reconnector._keys(reconnector.generation), (0, 1, 2), 1, reconnector.has_ended).agree(30)
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
        groups[rank]._reconnector.connect = refuse  # type: ignore[method-assign]
        with pytest.raises(TransportError, match=r"members \[0, 1\] live, and could not connect: a firewall") as raised:
            groups[rank].shrink()
        return str(raised.value)

    assert len(set(in_threads(2, body))) == 1


def _shrink_in_vain_of_1(group: InProcessGroup, may_go_on: threading.Event) -> ProcessGroup:
    connect = group._reconnector.connect

    def connect_soon(generation, timeout_s):  # type: ignore[no-untyped-def]
        may_go_on.wait(30)
        if 1 in generation.members:
            raise TransportError("rank 1 has ended")
        return connect(generation, timeout_s)

    group._reconnector.connect = connect_soon  # type: ignore[method-assign]
    return group.shrink(silence_timeout_s=30)


@pytest.mark.parametrize("call", ["shrink", "admit"])
def test_the_new_group_has_the_time_limit_that_was_set_last(call: str) -> None:
    groups = create_groups(2, timeout_s=30)

    def body(rank: int) -> float:
        groups[rank].set_timeout(7)
        return getattr(groups[rank], call)().timeout_s  # type: ignore[no-any-return]

    assert in_threads(2, body) == [7, 7]


def test_a_newcomer_keeps_its_own_time_limit() -> None:
    groups = create_groups(1, timeout_s=30)
    newcomer = groups[0].newcomer()
    newcomer.set_timeout(8)

    def body(number: int) -> float:
        if number == 0:
            wait_until(lambda: groups[0].newcomers() == 1)
        return (groups[0], newcomer)[number].admit().timeout_s

    assert in_threads(2, body) == [30, 8]


class Lines(StatusPost):
    """The latest status line of each rank."""

    def __init__(self, rank: int, lines: dict[int, str]) -> None:
        self._rank = rank
        self._lines = lines

    def post(self, line: str) -> None:
        self._lines[self._rank] = line

    def posted(self) -> dict[int, str]:
        return dict(self._lines)


@pytest.mark.parametrize("call", ["shrink", "admit"])
def test_the_new_group_warns_of_stalls(call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lines: dict[int, str] = {}
    monkeypatch.setattr(InProcessTransport, "status_post", lambda self: Lines(self._rank, lines))
    groups = create_groups(2, timeout_s=30)

    def body(rank: int) -> None:
        groups[rank].warn_of_stalls(0.3)
        group = getattr(groups[rank], call)()
        if rank == 1:
            wait_until(lambda: "a call has run for 0.3 s and more: rank 0 in all_reduce" in caplog.text)
        total(group)
        group.close()

    in_threads(2, body)


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


# ---- newcomers ----


def met_and_summed(group: ProcessGroup) -> tuple[tuple[int, ...], int, float]:
    tensor = torch.tensor([float(group.members[group.rank])])
    group.all_reduce(tensor)
    return group.members, group.rank, tensor.item()


def test_newcomers_are_let_in_behind_the_members() -> None:
    groups = create_groups(2)
    newcomers = [groups[0].newcomer(), groups[1].newcomer()]
    assert all(newcomer.is_waiting and newcomer.size == 1 for newcomer in newcomers)
    assert groups[0].newcomers() == 0  # they have not called yet

    def play(number: int) -> object:
        if number < 2:
            wait_until(lambda: groups[number].newcomers() == 2)
            return met_and_summed(groups[number].admit())
        return met_and_summed(newcomers[number - 2].admit())

    assert in_threads(4, play) == [((0, 1, 2, 3), rank, 6.0) for rank in range(4)]


def test_no_more_newcomers_than_the_limit_are_let_in_and_the_others_wait_on() -> None:
    groups = create_groups(1)
    newcomers = [groups[0].newcomer(), groups[0].newcomer()]
    first = min(newcomers, key=lambda newcomer: newcomer.members)

    def play(number: int) -> object:
        if number == 0:
            wait_until(lambda: groups[0].newcomers() == 2)
            one_more = groups[0].admit(limit=1)
            waiting = one_more.newcomers()
            return one_more.members, waiting, one_more.admit().members
        admitted = newcomers[number - 1].admit()
        if newcomers[number - 1] is first:
            admitted = admitted.admit()
        return admitted.members

    assert in_threads(3, play) == [((0, 1), 1, (0, 1, 2)), (0, 1, 2), (0, 1, 2)]


def test_the_limit_counts_the_newcomers_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer dies after the members have chosen it, so the members vote again."""
    monkeypatch.setattr(store_reconnector, "CONNECT_S", 1.0)
    groups = create_groups(2, timeout_s=30)
    newcomers = [groups[0].newcomer() for _ in range(5)]
    store, dead = groups[0]._reconnector.store, newcomers[0]._reconnector.generation.me
    store.set(f"waiting/{dead}", b"")
    have_met = threading.Barrier(3)

    def play(number: int) -> object:
        if number == 6:
            wait_until(lambda: store.check(["generation0/members"]))
            store.set(f"ended/{dead}", b"")
            return None
        if number < 2:
            wait_until(lambda: groups[number].newcomers() == 5)
            group = groups[number].admit(silence_timeout_s=20, limit=2)
        else:
            try:
                group = newcomers[number - 1].admit(silence_timeout_s=60)
            except RankLostError:
                return None  # it was not let in before the job had ended
        have_met.wait(60)
        assert isinstance(group, InProcessGroup)
        group.lose()
        return group.members

    ends = in_threads(7, play)
    let_in = {end for end in ends if end is not None}
    assert let_in == {(0, 1, dead + 1)}
    assert ends.count(None) == 4


WRONG_LIMITS = [
    *[
        (call, {"silence_timeout_s": timeout}, "a timeout must be a positive number of seconds")
        for call in ("shrink", "admit")
        for timeout in ("5", float("nan"), -1, 0, [1])
    ],
    *[("admit", {"limit": limit}, "expected a limit of 0 or above, or None") for limit in (-1, 1.5, "1")],
]


@pytest.mark.parametrize(("call", "arguments", "found"), WRONG_LIMITS)
def test_a_wrong_limit_is_refused_and_the_group_stays(call: str, arguments: dict[str, object], found: str) -> None:
    (group,) = create_groups(1)
    newcomers = [group.newcomer(), group.newcomer()]
    for newcomer in newcomers:
        group._reconnector.store.set(f"waiting/{newcomer.members[0]}", b"")
    with pytest.raises(InvalidArgumentError, match=found):
        getattr(group, call)(**arguments)
    assert (group.newcomers(), met_and_summed(group)) == (2, ((0,), 0, 0.0))


def test_a_limit_of_0_lets_nobody_in() -> None:
    (group,) = create_groups(1)
    newcomer = group.newcomer()
    group._reconnector.store.set(f"waiting/{newcomer.members[0]}", b"")
    admitted = group.admit(limit=0)
    assert (admitted.members, admitted.newcomers()) == ((0,), 1)


def test_admit_without_newcomers_gives_the_same_members() -> None:
    groups = create_groups(2)
    assert in_threads(2, lambda rank: met_and_summed(groups[rank].admit())) == [((0, 1), rank, 1.0) for rank in range(2)]


def test_members_that_shrink_agree_with_those_that_admit() -> None:
    groups = create_groups(3)
    newcomer = groups[0].newcomer()

    def play(number: int) -> object:
        if number == 1:
            groups[1].lose()
            return None
        if number == 3:
            return met_and_summed(newcomer.admit())
        wait_until(lambda: groups[number].newcomers() == 1)
        met = groups[number].admit() if number == 0 else groups[number].shrink()
        if met.size == 2:  # the proposal of who shrinks was first
            wait_until(lambda: met.newcomers() == 1)
            met = met.admit()
        return met_and_summed(met)

    assert in_threads(4, play) == [((0, 2, 3), 0, 5.0), None, ((0, 2, 3), 1, 5.0), ((0, 2, 3), 2, 5.0)]


def test_a_newcomer_that_is_lost_is_not_let_in_again() -> None:
    groups = create_groups(2)
    newcomer = groups[0].newcomer()
    store = newcomer._reconnector.store
    store.set("waiting/2", b"")
    assert groups[0].newcomers() == 1
    store.set("ended/2", b"")
    assert groups[0].newcomers() == 0
    assert in_threads(2, lambda rank: met_and_summed(groups[rank].admit())) == [((0, 1), rank, 1.0) for rank in range(2)]


def test_a_newcomer_that_nobody_lets_in_hears_so_and_waits_no_more() -> None:
    groups = create_groups(2)
    newcomer = groups[0].newcomer()
    with pytest.raises(CollectiveTimeout, match=r"members \[0, 1\] of the job did not let this process in within 0.05 s"):
        newcomer.admit(silence_timeout_s=0.05)
    assert groups[0].newcomers() == 0


def test_a_newcomer_hears_that_the_job_has_ended() -> None:
    groups = create_groups(2)
    newcomer = groups[0].newcomer()
    for group in groups:
        group.lose()
    with pytest.raises(RankLostError, match=r"has ended: all its processes \[0, 1\] are gone"):
        newcomer.admit()


def test_a_newcomer_with_other_options_is_refused() -> None:
    store = HashStore()
    made = GlooBackend().connect(ConnectRequest(None, 0, 1, None, 5, store=dist.PrefixStore("job", store)))
    assert made.missing_for_admit() is None
    with pytest.raises(DisagreementError, match="check_calls"):
        GlooBackend().connect(
            ConnectRequest(None, None, None, None, 5, store=dist.PrefixStore("job", store), check_calls=True, joins=True)
        )
    made.close()


def test_a_newcomer_needs_no_interface_although_the_job_has_chosen_one() -> None:
    store = dist.PrefixStore("job", HashStore())
    made = GlooBackend().connect(ConnectRequest(None, 0, 1, None, 30, store=store, interfaces=("lo",)))
    newcomer = GlooBackend().connect(ConnectRequest(None, None, None, None, 30, store=store, joins=True))

    def play(number: int) -> object:
        if number == 0:
            wait_until(lambda: made.newcomers() == 1)
        return met_and_summed((made, newcomer)[number].admit())

    assert in_threads(2, play) == [((0, 1), rank, 1.0) for rank in range(2)]


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_the_variable_must_be_one_or_zero(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SYNCLINE_JOIN", value)
    with pytest.raises(InvalidArgumentError, match="SYNCLINE_JOIN"):
        init_process_group()


def test_a_backend_without_newcomers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_JOIN", "1")
    with pytest.raises(BackendUnavailableError, match="'in_process' cannot let it in; use backend 'gloo'"):
        init_process_group("in_process")


def test_a_job_that_met_elsewhere_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_JOIN", "1")
    with pytest.raises(LaunchError, match="file:///shared/folder"):
        init_process_group("gloo", "tcp://127.0.0.1:29999")
