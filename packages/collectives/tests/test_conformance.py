"""The public suite on the backends that need no mpirun, and the suite itself on backends that are wrong on purpose."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, ReduceOp, TorchGroup, TransportError, premul_sum
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.engine.queue import Queue
from syncline.collectives.tensors.reduction import reduce_in_rank_order
from syncline.collectives.testing import CHECKS, Check, run_conformance, run_ranks
from syncline.collectives.testing.conformance import endings
from syncline.collectives.testing.conformance.endings import ENDINGS, LIMITED
from syncline.collectives.transports.gloo import GlooTransport
from syncline.collectives.transports.threads import InProcessTransport, SharedState, create_groups
from test_support.endings import ENDINGS_TO_RUN
from test_support.full_run import cases

pytestmark = pytest.mark.ranks

SIZES = cases([1, 4], in_full=[2, 3])
each_check = pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)


@pytest.mark.parametrize("size", SIZES)
@each_check
def test_in_process(size: int, check: Check) -> None:
    run_ranks(size, check)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", ENDINGS.values(), ids=ENDINGS)
def test_endings_in_process(size: int, check: Check) -> None:
    run_ranks(size, check)


class GlooThreads:
    """Ranks of Gloo as threads: each makes its own torch group over one store."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        # Gloo's own thread must not drop the last reference to its group, so the maker keeps it.
        self.made: list[dist.ProcessGroupGloo] = []

    def gloo(self, rank: int, name: str) -> dist.ProcessGroupGloo:
        store = dist.PrefixStore(name, self.store)
        gloo = dist.ProcessGroupGloo(store, rank, self.size, dist.default_pg_timeout)
        self.made.append(gloo)
        return gloo

    def torch_group(self, rank: int, name: str) -> TorchGroup:
        return TorchGroup(self.gloo(rank, name), name=name, timeout_s=30)

    def host_group(self, rank: int, name: str) -> HostGroup:
        gloo, store = self.gloo(rank, name), dist.PrefixStore(name, self.store)
        transport = GlooTransport(gloo, store, name=name, timeout_s=30)
        return HostGroup(transport, rank, self.size, name=name, timeout_s=30)


@pytest.fixture(scope="module", params=cases([3], in_full=[1, 2]))
def gloo_threads(request: pytest.FixtureRequest) -> Iterator[GlooThreads]:
    threads = GlooThreads(request.param)
    yield threads
    # To end hundreds of Gloo's groups takes many seconds: here, and not in whatever thread collects garbage some tests later.
    threads.made.clear()
    gc.collect()


@each_check
def test_gloo(gloo_threads: GlooThreads, check: Check, request: pytest.FixtureRequest) -> None:
    def body(outer: ProcessGroup) -> None:
        group = gloo_threads.host_group(outer.rank, request.node.nodeid)
        check(group)
        outer.barrier()
        group.close()

    run_ranks(gloo_threads.size, body)


@pytest.mark.parametrize("name", ENDINGS_TO_RUN)
def test_endings_gloo(gloo_threads: GlooThreads, name: str, request: pytest.FixtureRequest) -> None:
    run_ranks(gloo_threads.size, lambda outer: ENDINGS[name](gloo_threads.host_group(outer.rank, request.node.nodeid)))


WITHOUT_ORDER = {name: check for name, check in CHECKS.items() if not name.startswith(("total_order", "subgroups"))}


@pytest.mark.parametrize("check", WITHOUT_ORDER.values(), ids=WITHOUT_ORDER)
def test_torch_group(gloo_threads: GlooThreads, check: Check, request: pytest.FixtureRequest) -> None:
    """The bare adapter, which promises no order for what callbacks issue, and leaves it to torch to make groups."""

    def body(outer: ProcessGroup) -> None:
        check(gloo_threads.torch_group(outer.rank, request.node.nodeid))
        outer.barrier()

    run_ranks(gloo_threads.size, body)


def test_run_conformance_runs_everything_on_new_groups() -> None:
    made: list[ProcessGroup] = []

    def make() -> ProcessGroup:
        made.extend(create_groups(1))
        return made[-1]

    run_conformance(make)
    assert len(made) == len(CHECKS) + len(ENDINGS)
    assert len({id(group) for group in made}) == len(made)


def test_run_conformance_names_the_check() -> None:
    class Wrong(InProcessTransport):
        def broadcast(self, tensor, root, call) -> None:
            tensor.zero_()

    def make() -> ProcessGroup:
        return HostGroup(Wrong(SharedState(1), 0), 0, 1, timeout_s=5)

    with pytest.raises(AssertionError, match="conformance check 'broadcast_every_root_and_dtype' failed on rank 0 of 1"):
        run_conformance(make)


def test_run_conformance_names_the_check_after_which_close_fails() -> None:
    class Stuck(InProcessTransport):
        def close(self) -> None:
            raise TransportError("the library does not end")

    def make() -> ProcessGroup:
        return HostGroup(Stuck(SharedState(1), 0), 0, 1, timeout_s=5)

    with pytest.raises(AssertionError, match=r"conformance check '.*' failed on rank 0 of 1.*: the library does not end"):
        run_conformance(make)


# ---- the suite sees what is wrong ----


class NeverCommunicates(InProcessTransport):
    def all_reduce(self, tensor, op, call) -> None:
        tensor.mul_(len(self._show(tensor, call)))


class WrongRoot(InProcessTransport):
    def broadcast(self, tensor, root, call) -> None:
        tensors = [shown.clone() for shown in self._show(tensor, call)]
        self.barrier(call)
        tensor.copy_(tensors[0])


class OwnOrder(InProcessTransport):
    """Each rank adds starting with its own: the same value up to rounding, other bits."""

    def is_faulty(self, op: Any) -> bool:
        return op is ReduceOp.SUM

    def all_reduce(self, tensor, op, call) -> None:
        if not self.is_faulty(op):
            return super().all_reduce(tensor, op, call)
        shown = self._show(tensor, call)
        result = reduce_in_rank_order(op, [*shown[self._rank :], *shown[: self._rank]])
        self.barrier(call)
        tensor.copy_(result)
        return None


class BarrierThatDoesNotWait(InProcessTransport):
    def barrier(self, call) -> None:
        if call.signature.name != "barrier":
            super().barrier(call)


class OwnOrderOfFactors(OwnOrder):
    """As `OwnOrder`, in a sum with factors."""

    def is_faulty(self, op: Any) -> bool:
        return not isinstance(op, ReduceOp)


class ReversedOutputs(InProcessTransport):
    def all_gather(self, block, tensor, call) -> None:
        super().all_gather(block, tensor, call)
        block.copy_(block.view(self._size, -1).flip(0).reshape(-1))


class NarrowHalves(InProcessTransport):
    def all_reduce(self, tensor, op, call) -> None:
        if tensor.dtype is not torch.bfloat16 or op is not ReduceOp.SUM:
            return super().all_reduce(tensor, op, call)
        shown = self._show(tensor, call)
        result = shown[0].clone()
        for term in shown[1:]:
            result += term
        self.barrier(call)
        tensor.copy_(result)
        return None


def on_broken(
    transport: type[InProcessTransport],
    check: Check,
    size: int,
    *,
    timeout_s: float = 5,
    state: type[SharedState] = SharedState,
) -> None:
    shared_state = state(size)

    def body(outer: ProcessGroup) -> None:
        group = HostGroup(transport(shared_state, outer.rank), outer.rank, size, timeout_s=timeout_s)
        try:
            check(group)
        except BaseException:
            group.abort()
            raise

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("transport", "check", "size"),
    [
        (NeverCommunicates, "all_reduce_every_layout", 2),
        (NeverCommunicates, "all_reduce_every_dtype_and_reduction", 3),
        (WrongRoot, "broadcast_every_root_and_dtype", 2),
        (WrongRoot, "broadcast_every_layout", 3),
        (OwnOrder, "all_reduce_same_bits_everywhere", 3),
        (OwnOrderOfFactors, "all_reduce_same_bits_everywhere", 3),
        (BarrierThatDoesNotWait, "barrier_waits_for_all", 2),
        (ReversedOutputs, "all_gather_every_dtype", 2),
        (ReversedOutputs, "objects_gathered", 3),
        (NarrowHalves, "all_reduce_halves_round_once", 3),
    ],
)
def test_the_suite_sees(transport: type[InProcessTransport], check: str, size: int) -> None:
    with pytest.raises(AssertionError, match=r"expected|ended with other bits|left .* before"):
        on_broken(transport, CHECKS[check], size)


Fault = Callable[..., Any]


def after(change: Callable[[torch.Tensor, Any], object]) -> Fault:
    """Change the result of a reduction."""

    def fault(right: Fault, tensor: torch.Tensor, *arguments: Any) -> None:
        right(tensor, *arguments)
        change(tensor, arguments[-2])

    return fault


def other_op(choose: Callable[[torch.Tensor, Any], Any]) -> Fault:
    """Carry out another reduction, and return it."""

    def fault(right: Fault, tensor: torch.Tensor, *arguments: Any) -> None:
        *before, op, call = arguments
        right(tensor, *before, choose(tensor, op), call)

    return fault


def through(narrow: dict[torch.dtype, torch.dtype]) -> Fault:
    """Carry out a reduction in a narrower dtype."""

    def fault(right: Fault, tensor: torch.Tensor, *arguments: Any) -> None:
        copy = tensor.to(narrow.get(tensor.dtype, tensor.dtype), copy=True)
        right(copy, *arguments)
        tensor.copy_(copy)

    return fault


def halves_overflow(right: Fault, tensor: torch.Tensor, block: torch.Tensor, op: Any, call: Any) -> None:
    is_half = tensor.dtype is torch.float16 and op is ReduceOp.AVG
    right(tensor, block, ReduceOp.SUM if is_half else op, call)
    if is_half:
        tensor.div_(block.numel() // tensor.numel())


def factor_afterwards(right: Fault, tensor: torch.Tensor, op: Any, call: Any) -> None:
    right(tensor, op if isinstance(op, ReduceOp) else ReduceOp.SUM, call)
    if not isinstance(op, ReduceOp):
        tensor.mul_(op.factor)


def adds_zero(right: Fault, tensor: torch.Tensor, *arguments: Any) -> None:
    """Lose -0.0 in the tensor that comes first: the result of a gather or scatter."""
    right(tensor, *arguments)
    if tensor is not None and tensor.dtype in (torch.float32, torch.float64):
        tensor.add_(0)


def loses_the_end(right: Fault, *arguments: Any) -> Any:
    """Do nothing with elements above 2**20."""
    if right.__name__ == "start_send":
        sent = arguments[0].detach().clone()
        sent.view(-1)[2**20 :] = 0
        return right(sent, *arguments[1:])
    right(*arguments)
    output = arguments[1 if right.__name__ == "gather" else 0]
    if output is not None:  # on the root of a gather
        output.detach().view(-1)[2**20 :] = 0
    return None


def loses_nans(right: Fault, tensor: torch.Tensor, *arguments: Any) -> None:
    right(tensor, *arguments)
    if tensor.is_floating_point():
        tensor.copy_(torch.where(tensor.isnan(), 0, tensor))


def without_a_limit(right: Fault, *arguments: Any) -> None:
    *_, call = arguments
    scope, call.scope = call.scope, CancelScope(3600)
    try:
        right(*arguments)
    finally:
        call.scope = scope


def done_too_early(right: Fault, *arguments: Any) -> Any:
    request = right(*arguments)
    request.test = lambda: True
    return request


class LatestFirst(SharedState):
    """Messages with one tag overtake one another."""

    def receive(self, dst, src, tag):
        with self._condition:
            self._unreceived[dst].reverse()
        receive = super().receive(dst, src, tag)
        with self._condition:
            self._unreceived[dst].reverse()
        return receive


class Endless(SharedState):
    """Waits without a time limit."""

    def _wait_for(self, is_true, scope, lack) -> None:
        self._condition.wait_for(lambda: is_true() or self._aborted)
        if not is_true():
            raise TransportError(lack())


class BroadcastIsMessages(InProcessTransport):
    """A program's receive may take the messages."""

    def broadcast(self, tensor, root, call) -> None:
        if self._rank != root:
            self.start_recv(tensor, root, 0).wait(call.scope)
        else:
            for rank in set(range(self._size)) - {root}:
                self.start_send(tensor, rank, 0)


class EightBitsOfTags(InProcessTransport):
    def start_send(self, tensor, dst, tag):
        return super().start_send(tensor, dst, tag & 255)

    def start_recv(self, tensor, src, tag):
        return super().start_recv(tensor, src, tag & 255)


class ComparesNothing(InProcessTransport):
    def _meet(self, call, value):
        self._round += 1
        return self._shared_state.exchange(self._round, self._rank, value, call.scope)


EVERY_REDUCTION, EXTREMES = "all_reduce_every_dtype_and_reduction", "all_reduce_extremes"
EVERY_REDUCE = "reduce_every_root_dtype_and_reduction"
EVERY_SCATTER = "reduce_scatter_every_dtype_and_reduction"
#: What is wrong, in which method of the transport, and which check must see it.
FAULTS: dict[str, tuple[str, Fault, str]] = {
    "fractions lost": ("all_reduce", after(lambda t, op: t.is_floating_point() and t.round_()), EVERY_REDUCTION),
    "sign lost": ("all_reduce", after(lambda t, op: op is ReduceOp.SUM and t.dtype.is_signed and t.abs_()), EVERY_REDUCTION),
    "int64 as int32": ("all_reduce", through({torch.int64: torch.int32}), EVERY_REDUCTION),
    "float64 as float32": ("all_reduce", through({torch.float64: torch.float32}), EVERY_REDUCTION),
    "complex128 as complex64": ("all_reduce", through({torch.complex128: torch.complex64}), EVERY_REDUCTION),
    "float32 as bfloat16": ("all_reduce", through({torch.float32: torch.bfloat16}), EVERY_REDUCTION),
    "always half": (
        "all_reduce",
        other_op(lambda t, op: op if isinstance(op, ReduceOp) else premul_sum(0.5)),
        EVERY_REDUCTION,
    ),
    "factor afterwards": ("all_reduce", factor_afterwards, EXTREMES),
    "subnormals flushed": (
        "all_reduce",
        after(lambda t, op: t.dtype is torch.float32 and t.masked_fill_(t.abs() < 1e-30, 0)),
        EXTREMES,
    ),
    "infinities clamped": (
        "all_reduce",
        after(lambda t, op: t.dtype is torch.float32 and t.clamp_(-3e38, 3e38)),
        EXTREMES,
    ),
    "a large count": ("all_reduce", after(lambda t, op: t[2**20 :].zero_()), "all_reduce_large"),
    "reduce without factor": (
        "reduce",
        other_op(lambda t, op: op if isinstance(op, ReduceOp) else ReduceOp.SUM),
        EVERY_REDUCE,
    ),
    "reduce without bits": ("reduce", other_op(lambda t, op: ReduceOp.MAX if op is ReduceOp.BXOR else op), EVERY_REDUCE),
    "scatter of halves": ("reduce_scatter", halves_overflow, "all_reduce_halves_round_once"),
    "reduce_scatter without factor": (
        "reduce_scatter",
        other_op(lambda t, op: op if isinstance(op, ReduceOp) else ReduceOp.SUM),
        EVERY_SCATTER,
    ),
    "a zero's sign in all_gather": ("all_gather", adds_zero, "all_gather_every_dtype"),
    "a zero's sign in scatter": ("scatter", adds_zero, "scatter_every_root_and_dtype"),
    "a zero's sign in all_to_all": ("all_to_all", adds_zero, "all_to_all_lists"),
    "a zero's sign in broadcast": ("broadcast", adds_zero, "broadcast_every_root_and_dtype"),
    **{
        f"a large count in {name}": (name, loses_the_end, check)
        for name, check in {
            "reduce": "reduce_gather_and_scatter_large",
            "gather": "reduce_gather_and_scatter_large",
            "scatter": "reduce_gather_and_scatter_large",
            "reduce_scatter": "reduce_scatter_large",
            "all_to_all": "all_to_all_large",
            "start_send": "point_to_point_both_send_first",
        }.items()
    },
    "a nan lost in reduce": ("reduce", loses_nans, "all_reduce_infinities_and_nans"),
    "a nan lost in reduce_scatter": ("reduce_scatter", loses_nans, "all_reduce_infinities_and_nans"),
    "over too early": ("start_recv", done_too_early, "point_to_point_apart_from_other_calls"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_sees_wrong_values(fault: str) -> None:
    name, wrong, check = FAULTS[fault]

    def method(self: Any, *arguments: Any) -> Any:
        return wrong(getattr(super(Faulty, self), name), *arguments)

    Faulty = type("Faulty", (InProcessTransport,), {name: method})  # noqa: N806 - a class
    with pytest.raises(AssertionError, match=r"expected .* found"):
        on_broken(Faulty, CHECKS[check], 3, timeout_s=30)


@pytest.mark.parametrize("name", LIMITED)
def test_the_suite_sees_a_call_without_a_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_LONGER_LIMIT_S", 1.0)

    def method(self: Any, *arguments: Any) -> None:
        without_a_limit(getattr(super(Faulty, self), name), *arguments)

    Faulty = type("Faulty", (InProcessTransport,), {name: method})  # noqa: N806 - a class
    with pytest.raises(AssertionError, match=rf"expected {name} to end at its time limit"):
        on_broken(Faulty, ENDINGS[f"ends {name} at the time limit"], 2)


@pytest.mark.parametrize(
    ("transport", "state", "check", "match"),
    [
        (EightBitsOfTags, SharedState, CHECKS["point_to_point_tags"], "message 0 with tag"),
        (InProcessTransport, LatestFirst, CHECKS["point_to_point_tags"], "message 0"),
        (BroadcastIsMessages, SharedState, CHECKS["point_to_point_apart_from_other_calls"], "broadcast"),
        (InProcessTransport, Endless, ENDINGS["ends all_reduce at the time limit"], "still waits"),
        (ComparesNothing, SharedState, ENDINGS["notices different calls"], "nothing was raised"),
    ],
)
def test_the_suite_sees_wrong_waits(
    transport: type[InProcessTransport], state: type[SharedState], check: Check, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "_GRACE_S", 0.5)
    with pytest.raises(Exception, match=match):
        on_broken(transport, check, 2, timeout_s=2, state=state)


class WritesThroughGaps(HostGroup):
    """A group that takes strided tensors for dense ones."""

    def _issue(self, signature, reads, writes, async_op):
        if signature.name == "broadcast":
            writes = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in writes]
        return super()._issue(signature, reads, writes, async_op)


def test_the_suite_sees_gaps_that_are_written() -> None:
    shared_state = SharedState(2)

    def body(outer: ProcessGroup) -> None:
        group = WritesThroughGaps(InProcessTransport(shared_state, outer.rank), outer.rank, 2, timeout_s=5)
        try:
            CHECKS["broadcast_every_layout"](group)
        finally:
            group.abort()

    with pytest.raises(AssertionError, match=r"every second row|that are not part of the tensor|transposed|channels"):
        run_ranks(2, body)


class QueuedChildren(Queue):
    """Breaks rule 3: a task issued in a callback goes to the end of the queue, where other ranks may have put others."""

    def enqueue(self, task) -> bool:
        with self._changed:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def run_here(self, task, *arguments) -> bool:
        return False if self.is_running_here() else super().run_here(task, *arguments)


@pytest.mark.parametrize(
    "check",
    [
        "total_order_callbacks_while_the_main_thread_issues",
        "total_order_chains_that_do_not_wait",
        "total_order_nested_callbacks",
    ],
)
def test_the_suite_sees_another_order(check: str) -> None:
    def body(outer: ProcessGroup) -> None:
        group = HostGroup(InProcessTransport(shared_states[-1], outer.rank), outer.rank, 2, timeout_s=5)
        group._queue = QueuedChildren("broken")
        try:
            CHECKS[check](group)
        finally:
            group.abort()

    shared_states: list[SharedState] = []

    def run_it_twenty_times() -> None:  # on a busy machine the threads may happen to keep the order
        for _ in range(20):
            shared_states.append(SharedState(2))
            run_ranks(2, body, timeout_s=3)

    # In this order, a callback that waits runs the callbacks of all calls before, and each of them waits, too: maybe too deep.
    seen = r"order of collectives|met .* of the ranks|called different collectives|not called|did not return|recursion depth"
    with pytest.raises(Exception, match=seen):
        run_it_twenty_times()
