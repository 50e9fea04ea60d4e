"""A rank that closes a group waits for the others, and closes the library's objects only if all ranks close the group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    ProcessGroup,
    RoundRobinGroup,
    SynclineError,
    TransportError,
    Work,
)
from syncline.collectives.engine import host_group
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.engine.transport import Request
from syncline.collectives.health import agreement
from syncline.collectives.health.leaving import Leavers
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks

LIMIT_S = 30.0


class Together(InProcessTransport):
    """Like MPI on one node: it compares each call, and may be closed only when all ranks close the group."""

    closes_together = True
    times_closed = 0

    def close(self) -> None:
        self.times_closed += 1
        super().close()


class NeverComes(Request):
    """A receive over MPI: it looks at its scope, and the transport's `abort` does not end it."""

    def wait(self, scope: CancelScope) -> None:
        while True:
            time.sleep(1e-3)
            scope.check()

    def test(self) -> bool:
        return False

    def source(self) -> None:
        return None


class TogetherLater(Together):
    """Like MPI across nodes: it compares no call, so the group compares all calls later."""

    compares_every_call = False

    def _meet(self, call: Call, value: Any) -> list[Any]:
        return super()._meet(Call(Signature("anything"), scope=call.scope), value)


Body = Callable[[HostGroup, Together], object]
BOTH = pytest.mark.parametrize("kind", [Together, TogetherLater])


def on_ranks(size: int, kind: type[Together], body: Body) -> None:
    shared_state = SharedState(size)

    def rank_body(outer: ProcessGroup) -> None:
        transport = kind(shared_state, outer.rank)
        group = HostGroup(transport, outer.rank, size, timeout_s=LIMIT_S)
        group.all_reduce(torch.ones(1))
        body(group, transport)

    run_ranks(size, rank_body)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3])
def test_if_all_ranks_close_each_closes_the_library(kind: type[Together], size: int) -> None:
    def body(group: HostGroup, transport: Together) -> None:
        group.close()
        assert transport.times_closed == 1

    on_ranks(size, kind, body)


@BOTH
def test_if_a_rank_does_not_come_nothing_is_closed_and_nobody_fails(
    kind: type[Together], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_group, "_CLOSE_S", 0.2)
    monkeypatch.setattr(host_group, "_FREE_S", 0.2)
    have_closed = threading.Barrier(3)

    def body(group: HostGroup, transport: Together) -> None:
        if group.rank < 2:
            group.close()
            assert transport.times_closed == 0
            have_closed.wait(LIMIT_S)
        else:
            have_closed.wait(LIMIT_S)
            group.abort()

    on_ranks(3, kind, body)


def test_a_rank_that_closes_is_told_apart_from_a_rank_that_compares_calls() -> None:
    """The reducer compares calls after each backward, also after one without a collective."""

    def body(group: HostGroup, transport: Together) -> None:
        call: Callable[[], object] = group.close if group.rank == 0 else group.agree_on_calls
        with pytest.raises(DisagreementError, match=r"rank 0: close\(\)\n  rank 1: a comparison of calls"):
            call()
        group.abort()
        assert transport.times_closed == 0

    on_ranks(2, TogetherLater, body)


def never_closes(group: HostGroup, ended: threading.Event) -> None:
    """Wait until the other rank's close has ended, then abort."""
    assert ended.wait(LIMIT_S / 2), "the close has waited for its own limit"
    group.abort()


@BOTH
def test_abort_ends_a_close_that_waits(kind: type[Together], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "_CLOSE_S", LIMIT_S)
    monkeypatch.setattr(host_group, "_FREE_S", LIMIT_S)
    ended = threading.Event()

    def body(group: HostGroup, transport: Together) -> None:
        if group.rank == 1:
            never_closes(group, ended)
            return
        transport.start_recv = lambda *_: NeverComes()  # type: ignore[method-assign]
        aborting = threading.Timer(0.2, group.abort)
        aborting.start()
        try:
            group.close()
        except SynclineError as error:  # not if `abort` came before the close had begun
            assert "abort" in str(error)  # noqa: PT017 - there may be no error
        ended.set()
        aborting.join()
        assert transport.times_closed == 0

    on_ranks(2, kind, body)


@BOTH
def test_if_two_threads_close_a_group_the_second_finds_it_closed(kind: type[Together]) -> None:
    seen: list[int] = []

    def body(group: HostGroup, transport: Together) -> None:
        if group.rank == 1:
            group.close()
            return

        def close() -> None:
            group.close()
            seen.append(transport.times_closed)

        threads = [threading.Thread(target=close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    on_ranks(2, kind, body)
    assert seen == [1, 1]


END = {
    "abort": lambda group: group.abort(),
    "close": lambda group: group.close(),
    "failure": lambda group: group._fail(TransportError("a cable broke"), Call(Signature("barrier"), scope=CancelScope(1))),
}


@pytest.mark.parametrize(("end", "why"), [("abort", "aborted"), ("close", "closed"), ("failure", "a cable broke")])
@pytest.mark.parametrize("waits_for_future", [False, True])
def test_the_end_of_a_group_ends_a_receive_that_waits(end: str, why: str, waits_for_future: bool) -> None:
    def body(group: HostGroup, transport: Together) -> None:
        if group.rank == 1:
            return
        begun = threading.Event()

        class Begins(NeverComes):
            def wait(self, scope: CancelScope) -> None:
                begun.set()
                super().wait(scope)

        transport.start_recv = lambda *_: Begins()  # type: ignore[method-assign]

        def end_group() -> None:
            assert begun.wait(LIMIT_S)
            with suppress(TransportError):
                END[end](group)

        ending = threading.Thread(target=end_group)
        ending.start()
        work = group.recv(torch.ones(1), 1, async_op=True)
        with pytest.raises(TransportError, match=why) as raised:
            work.get_future().wait() if waits_for_future else work.wait()
        assert not isinstance(raised.value, CollectiveTimeout)
        ending.join()

    on_ranks(2, Alone, body)


class Alone(Together):
    """Like Gloo with `check_calls`: no meeting before the close."""

    closes_together = False


def test_abort_ends_a_close_that_waits_for_a_call_in_flight() -> None:
    ended = threading.Event()

    def body(group: HostGroup, transport: Together) -> None:
        if group.rank == 1:
            never_closes(group, ended)
            return
        work = group.all_reduce(torch.ones(1), async_op=True)
        closing = threading.Thread(target=group.close)
        closing.start()
        while not group._closed:
            time.sleep(1e-3)
        group.abort()
        closing.join()
        ended.set()
        assert transport.times_closed == 0
        with pytest.raises(SynclineError):
            work.wait()

    on_ranks(2, Alone, body)


@BOTH
def test_no_rank_frees_before_all_have_ended_their_status_lines(kind: type[Together], monkeypatch: pytest.MonkeyPatch) -> None:
    transports: dict[int, Together] = {}
    seen: list[int] = []
    stop = HostGroup._stop_watching

    def slow(group: HostGroup) -> None:
        if group.rank == 1:
            time.sleep(0.3)
            seen.append(transports[0].times_closed)
        stop(group)

    monkeypatch.setattr(HostGroup, "_stop_watching", slow)

    def body(group: HostGroup, transport: Together) -> None:
        transports[group.rank] = transport
        group.barrier()
        group.close()

    on_ranks(2, kind, body)
    assert seen[0] == 0


def test_a_signals_handler_that_closes_again_changes_nothing() -> None:
    """The handler runs on the thread that closes."""

    def body(group: HostGroup, transport: Together) -> None:
        meet = group._meet_before_close

        def meet_and_close_again() -> None:
            group.close()
            meet()

        group._meet_before_close = meet_and_close_again  # type: ignore[method-assign]
        group.close()
        assert transport.times_closed == 1

    on_ranks(2, Together, body)


def test_a_rank_that_is_interrupted_before_it_meets_the_others_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "_FREE_S", 0.2)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    def body(group: HostGroup, transport: Together) -> None:
        if group.rank == 1:
            group.close()
        else:
            group.recorder.add = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                group.close()
        assert transport.times_closed == 0

    on_ranks(2, Together, body)


def test_a_call_after_a_close_that_has_given_up_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not tell its call any more, so rank 1 does not wait for it until the group's time limit."""
    monkeypatch.setattr(host_group, "_FREE_S", 0.2)
    monkeypatch.setattr(agreement, "_TELL_S", 0.2)
    has_given_up, has_failed = threading.Event(), threading.Event()
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        group = HostGroup(TogetherLater(shared_state, outer.rank), outer.rank, 2, timeout_s=4 * LIMIT_S, check_calls=True)
        if group.rank == 0:
            group.close()
            has_given_up.set()
            assert has_failed.wait(LIMIT_S), "rank 1 waits for the text of this rank"
        else:
            assert has_given_up.wait(LIMIT_S)
            with pytest.raises(DisagreementError, match=r"rank 1: all_reduce\(float32\[1\], op=SUM\)"):
                group.all_reduce(torch.ones(1))
            has_failed.set()
        group.abort()

    run_ranks(2, body)


@pytest.mark.parametrize("all_close", [True, False])
def test_the_notice_names_a_closed_group_only_if_a_rank_may_be_in_its_call(
    all_close: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_group, "_FREE_S", LIMIT_S if all_close else 0.2)
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        leavers = Leavers(list)
        calls = leavers.group("default", [0, 1])
        group = HostGroup(Together(shared_state, outer.rank), outer.rank, 2, timeout_s=LIMIT_S, leavers=calls)
        group.all_reduce(torch.ones(1))
        if all_close or group.rank == 0:
            group.close()
            assert list(leavers.own().values()) == ([] if all_close else [1])

    run_ranks(2, body)


def differ(group: HostGroup) -> Work:
    tensor = torch.ones(1)
    return group.all_reduce(tensor, async_op=True) if group.rank == 0 else group.broadcast(tensor, 0, async_op=True)


def fail_unseen(group: HostGroup) -> Work:
    """Issue a call that fails, because the ranks call different collectives. Return its work after its end."""
    work = differ(group)
    while group.first_failure is None or not work.is_completed():
        time.sleep(1e-3)
    return work


@pytest.mark.parametrize("kind", [Together, Alone])
@pytest.mark.parametrize("fails_before", [True, False])
def test_close_raises_the_error_of_a_call_that_nobody_waited_for(kind: type[Together], fails_before: bool) -> None:
    def body(group: HostGroup, transport: Together) -> None:
        if fails_before:
            fail_unseen(group)
        else:
            differ(group)
        with pytest.raises(DisagreementError, match="the ranks called different collectives"):
            group.close()
        assert transport.times_closed == 0
        group.close()  # a second call does nothing

    on_ranks(2, kind, body)


def wait(group: HostGroup, work: Work) -> None:
    with pytest.raises(DisagreementError):
        work.wait()


def issue_another_call(group: HostGroup, work: Work) -> None:
    with pytest.raises(TransportError, match="the group had failed before"):
        group.all_reduce(torch.ones(1))


def send(group: HostGroup, work: Work) -> None:
    with pytest.raises(TransportError, match="the group had failed before"):
        group.send(torch.ones(1), 1 - group.rank)


SEEN: dict[str, Callable[[HostGroup, Work], object]] = {
    "wait": wait,
    "exception": lambda _, work: work.exception(),
    "future": lambda _, work: work.get_future(),
    "another call": issue_another_call,
    "send": send,
    "abort": lambda group, _: group.abort(),
    "expected loss": lambda group, _: None,
}


@pytest.mark.parametrize("how", SEEN)
def test_close_raises_no_error_that_the_program_has_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: HostGroup, transport: Together) -> None:
        if how == "expected loss":
            monkeypatch.setattr(transport, "plan", lost)
            group.expect_losses(True)
            work = group.all_reduce(torch.ones(2), async_op=True)
            while not work.is_completed():
                time.sleep(1e-3)
            assert isinstance(group.first_failure, TransportError)
        else:
            SEEN[how](group, fail_unseen(group))
        group.close()
        assert transport.times_closed == 0

    on_ranks(2, Together, body)


def lost(*_: object) -> None:
    raise TransportError("a cable broke")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_close_waits_for_a_call_that_is_lost_without_raising_its_error(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is expected, or Ctrl-C ends the wait of `close`, and its KeyboardInterrupt must reach the program."""
    closes = threading.Event()  # the loss comes when `close` waits for the call

    def lost_then(*_: object) -> None:
        assert closes.wait(LIMIT_S)
        lost()

    original = host_group.GroupWork.wait

    def wait(work: host_group.GroupWork, timeout: Any = None) -> bool:
        closes.set()
        if is_interrupted:
            raise KeyboardInterrupt
        return original(work, timeout)

    group = HostGroup(transport := Together(SharedState(2), 0), 0, 2, timeout_s=LIMIT_S)
    monkeypatch.setattr(transport, "plan", lost_then)
    monkeypatch.setattr(host_group.GroupWork, "wait", wait)
    group.expect_losses(not is_interrupted)
    group.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        group.close()
    assert isinstance(group.first_failure, TransportError)


@pytest.mark.parametrize("kind", [Together, Alone])
def test_ctrl_c_ends_a_close_that_waits_for_a_call_in_flight(kind: type[Together], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    group = HostGroup(kind(SharedState(2), 0), 0, 2, timeout_s=LIMIT_S)
    work = group.all_reduce(torch.ones(1), async_op=True)  # rank 1 never calls
    waits: tuple[object, str] = (group._queue, "drain") if kind is Alone else (host_group.GroupWork, "wait")
    with monkeypatch.context() as patch:
        patch.setattr(*waits, interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.close()
    assert str(work.exception()).startswith("the group was aborted"), "close has waited for the call"


@pytest.mark.parametrize("is_composed", [False, True])
def test_ctrl_c_in_the_close_of_one_group_aborts_the_groups_that_belong_to_it(
    is_composed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    group, other = (HostGroup(Alone(SharedState(2), 0), 0, 2, timeout_s=LIMIT_S) for _ in range(2))
    work = group.all_reduce(torch.ones(1), async_op=True)  # rank 1 never calls
    monkeypatch.setattr(other, "close", interrupted)
    if not is_composed:
        group.end_together(other)
    with pytest.raises(KeyboardInterrupt):
        (RoundRobinGroup([group, other]) if is_composed else group).close()
    assert str(work.exception()).startswith("the group was aborted"), "close has waited for the call"


def test_a_future_that_was_taken_before_the_failure_tells_the_program() -> None:
    def body(group: HostGroup, transport: Together) -> None:
        future = differ(group).get_future()
        with pytest.raises(SynclineError):
            future.wait()
        group.close()

    on_ranks(2, Together, body)


def test_a_close_that_gives_up_a_call_in_flight_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "LONGEST_REPORT_S", 0.1)
    may_end = threading.Event()

    def rank_body(outer: ProcessGroup) -> None:
        transport = Alone(SharedState(1), 0)
        group = HostGroup(transport, 0, 1, timeout_s=0.1)
        transport.plan = lambda _: Stuck()  # type: ignore[method-assign, assignment, return-value]
        calling = threading.Thread(target=group.all_reduce, args=(torch.ones(1),))
        calling.start()
        assert is_stuck.wait(LIMIT_S)
        with pytest.raises(
            CollectiveTimeout, match=r"close on rank 0 of 1 .* did not finish within 0\.1 s; wait for each work"
        ):
            group.close()
        may_end.set()
        calling.join()

    is_stuck = threading.Event()

    class Stuck:
        algorithm = "none"

        def run(self, *_: object) -> None:
            is_stuck.set()
            assert may_end.wait(LIMIT_S)

    run_ranks(1, rank_body)
