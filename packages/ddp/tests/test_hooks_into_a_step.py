"""Buffer hooks, optimizers that step in backward, delayed parameters, another group: what native DDP cannot be asked."""

from __future__ import annotations

import copy
import math
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHookLocation

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    exchange_objects,
)
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import create_groups
from syncline.ddp import DistributedDataParallel, torch_internals
from syncline.reducer import GradBucket
from test_support.waiting import wait_until

pytestmark = pytest.mark.ranks
BEFORE, AFTER = _BufferCommHookLocation.PRE_FORWARD, _BufferCommHookLocation.POST_FORWARD


# Made once, because all ranks share torch's random numbers.
torch.manual_seed(3)
INITIAL = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def mlp() -> torch.nn.Sequential:
    return copy.deepcopy(INITIAL)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def loss_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()  # type: ignore[no-any-return]


def whole_batch(world_size: int, step: int = 0) -> torch.Tensor:
    return torch.cat([batch(rank, step) for rank in range(world_size)])


# ---- buffers ----


@pytest.mark.parametrize("location", [BEFORE, AFTER])
def test_a_buffer_hook_sees_the_buffers_before_or_after_the_forward(location: _BufferCommHookLocation) -> None:
    def body(group: ProcessGroup) -> None:
        norm = torch.nn.BatchNorm1d(4).double()
        model = DistributedDataParallel(norm, process_group=group)
        seen: list[float] = []
        model._register_buffer_comm_hook(seen, lambda log, buffers: log.append(buffers["num_batches_tracked"].item()), location)
        for step in range(2):
            model(batch(group.rank, step)).sum().backward()
        with model.no_sync():
            model(batch(group.rank, 2)).sum().backward()
        model(batch(group.rank, 3)).sum().backward()  # nothing to synchronise: no forward before it was reduced
        first = 0 if location is BEFORE else 1
        assert seen == [first, first + 1, first + 2]

    run_ranks(2, body)


@pytest.mark.parametrize("location", [None, BEFORE, AFTER])
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_buffers_are_due_on_the_same_ranks_after_a_forward_that_fails(
    location: _BufferCommHookLocation | None, in_no_sync: bool
) -> None:
    """A rank that ran a forward in `no_sync` before has synchronised its buffers earlier than the other rank."""

    class Failing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4).double()

        def forward(self, inputs: torch.Tensor, fails: bool = False) -> torch.Tensor:
            if fails:
                raise KeyError("planned")
            return self.norm(inputs)  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Failing(), process_group=group)
        seen: list[int] = []

        def count_on_all_ranks(_: object, buffers: dict[str, torch.Tensor]) -> None:
            group.all_reduce(buffers["norm.num_batches_tracked"].clone())
            seen.append(1)

        if location is not None:
            model._register_buffer_comm_hook(None, count_on_all_ranks, location)
        for step in range(2):  # now all buckets are built, so only the buffers need collectives in a forward
            model(batch(group.rank, step)).sum().backward()
        for step in range(2, 5):
            if group.rank == 1:
                with model.no_sync():
                    model(batch(1, step)).sum().backward()
            with model.no_sync() if in_no_sync else nullcontext(), pytest.raises(KeyError, match="planned"):
                model(batch(group.rank, step), fails=True)
            model(batch(group.rank, step)).sum().backward()
        assert len(set(exchange_objects(len(seen), group=group))) == 1

    run_ranks(2, body)


def test_backward_ends_when_the_futures_of_a_buffer_hook_have() -> None:
    def body(group: ProcessGroup) -> None:
        norm = torch.nn.BatchNorm1d(4).double()
        model = DistributedDataParallel(norm, process_group=group)
        log: list[str] = []

        def hook(_: object, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
            future: torch.futures.Future[Any] = torch.futures.Future()

            def finish() -> None:
                log.append("buffers")
                future.set_result(None)

            norm.weight.register_post_accumulate_grad_hook(lambda _: threading.Timer(0.05, finish).start())
            return [future]

        model._register_buffer_comm_hook(None, hook)
        model(batch(group.rank)).sum().backward()
        assert log == ["buffers"]

    run_ranks(1, body)


def test_a_buffer_hook_that_cannot_be_called_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(4), process_group=group)
        with pytest.raises(TypeError, match=r"expected a function hook\(state, buffers\), found int"):
            model._register_buffer_comm_hook(None, 3)

    run_ranks(1, body)


def test_a_second_forward_before_the_backward_leaves_the_first_ones_graph_alive() -> None:
    """Batch normalisation saves its statistics, which the second forward's broadcast overwrites."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(4).double(), process_group=group)
        first = model(batch(group.rank)).sum()
        (first + model(batch(group.rank, 1)).sum()).backward()

    run_ranks(2, body)


class Scaled(torch.nn.Module):
    """Its backward computes with the buffer, which each rank changes in its own way where `delta` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2).double()
        self.register_buffer("scale", torch.tensor([2.0, math.nan], dtype=torch.float64))

    def forward(self, x: torch.Tensor, delta: float = 0.0) -> torch.Tensor:
        if delta:
            self.scale.add_(delta)
        return (self.linear(x) * self.scale)[:, 0]


@pytest.mark.parametrize("by_hook", [False, True])
def test_a_buffer_that_the_first_forwards_backward_reads_is_not_overwritten_in_silence(by_hook: bool) -> None:
    """The second forward's broadcast gives rank 1 other values than its first forward has computed with."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Scaled(), process_group=group)
        if by_hook:
            model._register_buffer_comm_hook(
                None, lambda _, buffers: [group.broadcast(b, 0).wait() for b in buffers.values()][:0]
            )
        first = model(batch(group.rank), delta=1.0 + group.rank).sum()
        (first + model(batch(group.rank, 1)).sum()).backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        run_ranks(2, body)
    # Before Python 3.11 an error has no notes: there the rank is in the cause.
    assert "rank 1" in " ".join([*getattr(raised.value, "__notes__", []), str(raised.value.__cause__)])


def test_a_buffer_that_the_broadcast_leaves_as_it_was_may_be_read_in_the_first_forwards_backward() -> None:
    def body(group: ProcessGroup) -> list[float]:
        module = Scaled()
        model = DistributedDataParallel(module, process_group=group)
        first = model(batch(group.rank), delta=1.0).sum()
        (first + model(batch(group.rank, 1)).sum()).backward()
        assert module.linear.weight.grad is not None
        return module.linear.weight.grad[0].tolist()

    expected = 3.0 * torch.cat([batch(rank, step) for rank in range(2) for step in range(2)]).sum(0) / 2
    for found in run_ranks(2, body):
        assert found == pytest.approx(expected.tolist())


class Frozen(torch.nn.Module):
    """Batch normalisation in evaluation, whose backward reads the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).double()

    def forward(self, x: torch.Tensor, delta: float = 0.0) -> torch.Tensor:
        self.norm.eval()
        if delta:
            self.norm.running_var.add_(delta)
        return self.norm(x).sum()  # type: ignore[no-any-return]


def test_statistics_that_a_frozen_batch_normalisation_reads_are_not_overwritten_in_silence() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Frozen(), process_group=group)
        first = model(batch(group.rank), delta=1.0 + group.rank)
        model(batch(group.rank, 1))
        first.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(2, body)


class Skipping(torch.nn.Module):
    """Batch normalisation that a forward may leave out, so that only the broadcast writes the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).double()
        self.linear = torch.nn.Linear(4, 1).double()
        for parameter in self.parameters():
            torch.nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, normalizes: bool = True, delta: float = 0.0) -> torch.Tensor:
        if delta:
            self.norm.running_var.add_(delta)  # type: ignore[union-attr]
        return self.linear(self.norm(x) if normalizes else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("first_trains", [True, False])
def test_the_mode_of_a_forward_decides_whether_its_backward_reads_statistics(first_trains: bool) -> None:
    """Between a forward and its backward, the other mode is set, and a second forward broadcasts the statistics."""

    def body(group: ProcessGroup) -> list[float]:
        module = Skipping()
        model = DistributedDataParallel(module, process_group=group)
        model.train(first_trains)
        # In training, the forward itself changes the statistics.
        first = model(batch(group.rank), delta=0.0 if first_trains else 1.0 + group.rank).square().sum()
        model.train(not first_trains)
        with torch.no_grad():
            model(batch(group.rank, 1), normalizes=False)
        first.backward()
        assert module.linear.weight.grad is not None
        return module.linear.weight.grad[0].tolist()

    if first_trains:
        one, other = run_ranks(2, body)
        assert one == other
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run_ranks(2, body)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_forward_in_evaluation_is_forgotten_when_its_graph_is_gone(keeps_graph: bool) -> None:
    """Validation without `no_grad`, then a step with two forwards in training mode and one backward."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Skipping(), process_group=group)
        loss_of(model, batch(group.rank)).backward()  # the ranks' statistics differ now, so the next forward broadcasts
        model.eval()
        validation = {"loss": model(batch(group.rank, 1)).mean()}
        if not keeps_graph:
            validation["loss"] = validation["loss"].detach()
        model.train()
        (loss_of(model, batch(group.rank, 2)) + loss_of(model, batch(group.rank, 3))).backward()
        if keeps_graph:
            validation["loss"].backward()

    if keeps_graph:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run_ranks(2, body)
    else:
        run_ranks(2, body)


class Hidden:
    """An output in which nobody looks for tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Wrapped(Skipping):
    """Returns its output in the way that `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, normalizes: bool = True, delta: float = 0.0) -> Any:
        output = super().forward(x, normalizes, delta)
        if self.kind == "hidden":
            return Hidden(output)
        if self.kind == "partly hidden":
            return [Hidden(output), output.argmax(), None, "text"]
        if self.kind == "broken view":
            base = output * 1
            views = base.unbind(0)
            base.mul_(2)  # autograd refuses to tell the nodes of these views
            return [Hidden(output), views]
        return output.argmax() if self.kind == "predictions" else [output]


@pytest.mark.parametrize(
    ("kind", "reduces_between"),
    [("hidden", False), ("partly hidden", False), ("broken view", False), ("list", False), ("list", True)],
)
def test_a_living_graph_of_a_forward_in_evaluation_is_remembered(kind: str, reduces_between: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Wrapped(kind), process_group=group, find_unused_parameters=True)
        model.eval()
        first = model(batch(group.rank), delta=1.0 + group.rank)  # the statistics differ now
        model.train()
        if reduces_between:
            model(batch(group.rank), normalizes=False)[0].sum().backward()
            with model.no_sync():
                model(batch(group.rank), normalizes=False)
            model._buffer_sync.are_stale = True
        with torch.no_grad():
            model(batch(group.rank, 1), normalizes=False)
        output = first if kind == "hidden" else first[0]
        (output if kind == "list" else output.tensor).square().sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(2, body)


@pytest.mark.parametrize("reduces", [False, True])
def test_forwards_whose_graph_nobody_sees_are_open_until_a_reduced_backward(reduces: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Wrapped("hidden"), process_group=group, find_unused_parameters=True)
        model.eval()
        with model.no_sync():
            first = model(batch(group.rank), delta=1.0 + group.rank)
            model.train()
            later = model(batch(group.rank), normalizes=False)  # in the other mode, which does not close the first
        if reduces:
            model(batch(group.rank), normalizes=False).tensor.sum().backward()
            model._buffer_sync.are_stale = False
            with model.no_sync():
                later = model(batch(group.rank), normalizes=False)
        model._buffer_sync.are_stale = True
        with torch.no_grad():
            model(batch(group.rank, 1), normalizes=False)
        first.tensor.square().sum().backward()
        del later

    with nullcontext() if reduces else pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(2, body)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_forward_is_over_when_a_backward_has_freed_its_graph(keeps_graph: bool) -> None:
    """Even if the script keeps the loss, such as a generator's loss through a discriminator in evaluation mode."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Skipping(), process_group=group)
        model.eval()
        kept = loss_of(model, batch(group.rank))
        kept.backward(retain_graph=keeps_graph)
        model.module.norm.running_var.fill_(1.0 + group.rank)  # type: ignore[union-attr,operator]
        model.train()
        (loss_of(model, batch(group.rank, 2)) + loss_of(model, batch(group.rank, 3))).backward()
        assert kept.grad_fn is not None

    with pytest.raises(RuntimeError, match="modified by") if keeps_graph else nullcontext():
        run_ranks(2, body)


def test_a_node_in_which_several_forwards_end_has_one_mark_and_one_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4).double()

        def forward(self, x: torch.Tensor, passed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x), passed

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(First(), process_group=group)
        passed = torch.ones(1, requires_grad=True) + 1  # its node saves nothing, so it may run in many backwards
        sizes, asked = [], []
        monkeypatch.setattr(torch_internals, "backward_keeps_graph", lambda: asked.append(1))
        for _ in range(3):
            output, same = model(batch(0), passed)
            (output.sum() + same.sum()).backward()
            sizes.append((len(passed.grad_fn.metadata), len(asked)))  # type: ignore[union-attr,arg-type]
            asked.clear()
        assert sizes == sizes[:1] * 3

    run_ranks(1, body)


def test_the_present_mode_decides_if_only_the_bare_module_has_run() -> None:
    def body(group: ProcessGroup) -> None:
        module = Skipping()
        model = DistributedDataParallel(module, process_group=group)
        module.eval()
        first = module(batch(group.rank), delta=1.0 + group.rank).square().sum()
        with torch.no_grad():
            model(batch(group.rank, 1), normalizes=False)
        first.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(2, body)


def test_forwards_that_are_over_need_no_memory() -> None:
    def body(group: ProcessGroup) -> None:
        for kind in ("list", "predictions", "hidden"):
            model = DistributedDataParallel(Wrapped(kind), process_group=group)
            for _ in range(3):
                model(batch(0))
            assert len(model._buffer_sync._open_forwards) <= 1
        model = DistributedDataParallel(Wrapped("list"), process_group=group)
        losses = []  # a script may keep the losses of its steps, with their graphs
        for _ in range(3):
            losses.append(model(batch(0))[0].sum())
            losses[-1].backward()
        assert len(model._buffer_sync._open_forwards) == 1

    run_ranks(1, body)


def test_buffers_that_differ_are_an_error_that_names_buffers() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(3), process_group=group)
        if group.rank == 1:
            model.module.running_mean = torch.zeros(3, dtype=torch.float64)
        model(torch.ones(2, 3))

    with pytest.raises(DisagreementError, match=r"rank 0: broadcast\(.*, buffers of the model\)"):
        run_ranks(2, body)


def test_a_buffer_that_only_forwards_fill_is_each_ranks_own() -> None:
    """As in torch, if the module has no other buffer: some ranks may not fill it, or with another shape."""

    class Caching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", None)
            self.scale = torch.nn.Parameter(torch.ones(1).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 3:
                self.cache = x.detach().sum(1)
            return self.scale * x

    def body(group: ProcessGroup) -> int:
        module = Caching()
        model = DistributedDataParallel(module, process_group=group)
        for _ in range(2):
            model(torch.ones(2 + group.rank, 2, dtype=torch.float64)).sum().backward()
        return 0 if module.cache is None else len(module.cache)

    assert run_ranks(4, body) == [0, 0, 4, 5]


# ---- optimizers ----


@pytest.mark.parametrize("as_view", [False, True])
def test_a_fused_optimizer_equals_one_after_backward(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        module = mlp()
        model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-5)
        model._register_fused_optim(torch.optim.Adam, lr=0.1)
        assert len(model.fused_optimizer.optimizers) == 4
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, batch(group.rank, 7)).backward()  # adds up, and steps nothing
            loss_of(model, batch(group.rank, step)).backward()
        return [parameter.detach() for parameter in module.parameters()]

    whole = mlp()
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(whole, whole_batch(2, 7)) + loss_of(whole, whole_batch(2, step))).backward()
        optimizer.step()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, [parameter.detach() for parameter in whole.parameters()], rtol=1e-9, atol=1e-11)


def test_early_buckets_step_while_late_ones_are_in_flight() -> None:
    def body(group: ProcessGroup) -> None:
        module = mlp()
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-6)
        before = module[2].bias.detach().clone()
        model._register_fused_optim(torch.optim.SGD, lr=0.1)
        last: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            if not bucket.is_last():
                future.set_result(bucket.buffer())
                return future

            def finish() -> None:
                try:
                    wait_until(lambda: not torch.equal(module[2].bias, before))
                finally:
                    last.set_result(bucket.buffer())

            following = last.then(lambda done: seen.append(not torch.equal(module[2].bias, before)) or done.value())  # type: ignore[func-returns-value]
            threading.Thread(target=finish).start()
            return following

        seen: list[bool] = []
        model.register_comm_hook(None, hook)
        loss_of(model, batch(0)).backward()
        assert seen == [True]

    run_ranks(1, body)


def test_what_cannot_be_fused_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(mlp(), process_group=group)
        with pytest.raises(InvalidArgumentError, match=r"expected a class of torch.optim.Optimizer, found <class 'int'>"):
            model._register_fused_optim(int)  # type: ignore[arg-type]
        model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=[model.module[0].weight])  # type: ignore[index]
        stranger = torch.nn.Parameter(torch.ones(1))
        with pytest.raises(InvalidArgumentError, match="found another one, which would never be stepped"):
            model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=[stranger])
        with pytest.raises(MisuseError, match="has a fused optimizer already"):
            model._register_fused_optim(torch.optim.SGD, 0.1)

    run_ranks(1, body)


# ---- delayed parameters ----


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("as_view", [False, True])
def test_delayed_parameters_are_averaged_in_buckets_of_their_own(everything: bool, as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        module = mlp()
        named = dict(module.named_parameters())
        delayed = list(named.items()) if everything else [("2.weight", named["2.weight"]), ("2.bias", named["2.bias"])]
        model = DistributedDataParallel(
            module,
            process_group=group,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=named["0.weight"],
            gradient_as_bucket_view=as_view,
        )
        sizes = []
        for step in range(3):
            model.zero_grad()
            loss_of(model, batch(group.rank, step)).backward()
            sizes.append([times.nbytes for times in model.iteration_statistics().buckets])
        assert sizes == [[(20 + 5 + 10 + 2) * 8] if everything else [25 * 8, 12 * 8]] * 3
        return [parameter.grad for parameter in module.parameters()]  # type: ignore[misc]

    whole = mlp()
    loss_of(whole, whole_batch(2, 2)).backward()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, [parameter.grad for parameter in whole.parameters()])


def test_delayed_parameters_must_be_the_modules() -> None:
    def body(group: ProcessGroup) -> None:
        module = mlp()
        stranger = torch.nn.Parameter(torch.ones(1))
        for arguments, complaint in (
            ({"param_to_hook_all_reduce": module[0].weight}, "found one without the other"),
            ({"delay_all_reduce_named_params": [("0.weight", module[0].weight)]}, "found one without the other"),
            (
                {"delay_all_reduce_named_params": [("odd", stranger)], "param_to_hook_all_reduce": module[0].weight},
                "trainable parameters of the module, found 'odd'",
            ),
        ):
            with pytest.raises(InvalidArgumentError, match=complaint):
                DistributedDataParallel(module, process_group=group, **arguments)  # type: ignore[arg-type]

    run_ranks(1, body)


# ---- another group ----


@pytest.mark.parametrize("as_view", [False, True])
def test_training_goes_on_over_another_group(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor] | None:
        module = mlp()
        model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=as_view)
        calls: list[int] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append(bucket.process_group().size)
            work = bucket.process_group().all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / bucket.process_group().size)

        model.register_comm_hook(None, hook)
        loss_of(model, batch(group.rank)).backward()
        smaller = group.split(0 if group.rank else None)
        if smaller is None:
            return None
        model.update_process_group(smaller)
        assert model.process_group is smaller
        loss_of(model, batch(group.rank, 1)).backward()  # adds to what was averaged over three
        assert calls == [3, 2]
        found = [parameter.grad.clone() for parameter in module.parameters()]  # type: ignore[union-attr]
        smaller.close()
        return found

    whole = mlp()
    loss_of(whole, whole_batch(3)).backward()
    loss_of(whole, torch.cat([batch(1, 1), batch(2, 1)])).backward()
    none, *others = run_ranks(3, body)
    assert none is None
    for found in others:
        torch.testing.assert_close(found, [parameter.grad for parameter in whole.parameters()])


def test_the_first_forward_with_a_new_group_synchronises_the_buffers() -> None:
    """A forward in `no_sync` has synchronised them, but only a rank of the old group knows that."""

    def body(group: ProcessGroup) -> None:
        alone = group.split(group.rank)
        assert alone is not None
        norm = torch.nn.BatchNorm1d(4).double()
        model = DistributedDataParallel(norm, process_group=alone)
        if group.rank == 0:
            with model.no_sync():
                model(batch(0)).sum().backward()
        model.update_process_group(group)
        with model.no_sync():
            model(batch(group.rank)).sum().backward()
        assert norm.num_batches_tracked == 2  # rank 0's one, and this forward
        alone.close()

    run_ranks(2, body)


def test_a_group_with_another_model_on_it_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        alone = group.split(group.rank)
        assert alone is not None
        model = DistributedDataParallel(torch.nn.Linear(2, 2 + group.rank), process_group=alone)
        with pytest.raises(DisagreementError, match=r"parameter 'weight' is float32\[2, 2\].*float32\[3, 2\]"):
            model.update_process_group(group)
        model(torch.ones(1, 2)).sum().backward()  # it stays with the old one
        alone.close()

    run_ranks(2, body)


# ---- built-in hooks ----


def test_the_built_in_hook_sends_halves() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), process_group=group)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        model(torch.tensor([[1.0 + 2.0**-13, 3.0]]) * (group.rank + 1)).sum().backward()
        assert model.module.weight.grad.dtype is torch.float32  # type: ignore[union-attr]
        assert model.module.weight.grad.tolist() == [[1.5, 4.5]]  # type: ignore[union-attr]
        with pytest.raises(InvalidArgumentError, match=r"expected a BuiltinCommHookType \(ALLREDUCE, FP16_COMPRESS\)"):
            model._register_builtin_comm_hook("sum")  # type: ignore[arg-type]

    run_ranks(2, body)


# ---- options that differ between ranks ----


@pytest.mark.filterwarnings("ignore:broadcast_buffers is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        ({}, {"bucket_cap_mb": 1}, ["bucket_cap_mb", "[1048576, 26214400] on rank 0", "[1048576] on rank 1"]),
        ({}, {"bucket_cap_mb_list": [1, 2]}, ["bucket_cap_mb_list", "26214400] on rank 0", "[1048576, 2097152] on rank 1"]),
        ({}, {"find_unused_parameters": True}, ["find_unused_parameters=False on rank 0", "True on rank 1"]),
        ({}, {"static_graph": True}, ["static_graph=False on rank 0", "True on rank 1"]),
        ({"gradient_as_bucket_view": True}, {}, ["gradient_as_bucket_view=True on rank 0", "False on rank 1"]),
        ({}, {"forward_sync_buffers": False}, ["forward_sync_buffers=True on rank 0", "False on rank 1"]),
        ({}, {"broadcast_buffers": False}, ["broadcast_buffers (at construction)=True on rank 0", "False on rank 1"]),
    ],
)
def test_options_that_differ_are_named_on_every_rank(mine: Any, other: Any, words: list[str]) -> None:
    def body(group: ProcessGroup) -> str:
        with pytest.raises(DisagreementError) as caught:
            DistributedDataParallel(mlp(), process_group=group, **(other if group.rank == 1 else mine))
        return str(caught.value)

    for rank, text in enumerate(run_ranks(3, body)):
        for word in [*words, f"rank {rank} of 3", "Pass the same on every rank"]:
            assert word in text


def test_sparse_flags_that_differ_are_named() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(DisagreementError, match=r"sparse=True \(in embeddings\)=\[\] on rank 0 and \['weight'\] on rank 1"):
            DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=group.rank == 1), process_group=group)

    run_ranks(2, body)


# ---- transport errors ----


def wrapped_twice(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Each `then` turns the error into a RuntimeError."""
    future = bucket.process_group().all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0]).then(lambda done: done.value() / 2)


@pytest.mark.parametrize("hook", [None, wrapped_twice])
def test_a_time_out_in_backward_names_the_parameters(hook: Any) -> None:
    # Rank 1 never comes. The wait for the hook's future ends half a second after the collective, which says more.
    groups = create_groups(2, name="silent", timeout_s=1)
    try:
        model = DistributedDataParallel(mlp(), process_group=groups[0], init_sync=False)
        if hook is not None:
            model.register_comm_hook(None, hook)
        with pytest.raises(CollectiveTimeout) as caught:
            loss_of(model, batch(0)).backward()
    finally:
        for group in groups:
            group.abort()
    assert str(caught.value).startswith("all_reduce(float64[37]")
    assert str(caught.value).endswith("It was the reduction of the gradients of '2.bias', '2.weight', '0.bias', '0.weight'")
