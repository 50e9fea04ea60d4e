from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from syncline.collectives import (
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    destroy_process_group,
    get_default_group,
    is_initialized,
)
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.reducer import GradBucket
from test_support.training_runs import SHARE, VIEWS, gradients, loss_of, make_data, state, train

pytestmark = pytest.mark.ranks

WORLD_SIZES = [1, 2, 3, 4]
SMALL_CAP_MB = 256 / 1024**2  # several buckets even for these models

# Models are built on the main thread, because all ranks share torch's random numbers, and copied for each rank.


def mlp(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    ).double()


def cnn(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 2, 2),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
        torch.nn.LayerNorm(3),
    ).double()
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]  # torch lacks this overload


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(5, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(inputs).unsqueeze(0)
        return self.head(self.layer(embedded.expand(2, -1, -1).transpose(0, 1))).mean(1)  # type: ignore[no-any-return]


def attention(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Attention().double()


MODELS: dict[str, tuple[Callable[[int], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn": (cnn, (1, 3, 2)),
    "attention": (attention, (5,)),
}


def rows_of(rank: int) -> slice:
    return slice(rank * SHARE, (rank + 1) * SHARE)


def all_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def closed_form_model(rank: int = 0) -> torch.nn.Linear:
    """One weight and no bias: d loss / d weight is the input."""
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, rank + 1.0)
    return model


def inputs_of(rank: int, step: int = 0) -> torch.Tensor:
    return torch.tensor([[rank + 1.0, 10.0 * (rank + 1) + 100 * step]], dtype=torch.float64)


def mean_input(world_size: int, *steps: int) -> torch.Tensor:
    """The average over ranks of the sum over steps."""
    return torch.stack([sum(inputs_of(r, s) for s in steps) for r in range(world_size)]).mean(0)  # type: ignore[misc]


def weight_gradient(model: torch.nn.Module) -> torch.Tensor:
    """Of the model with one weight."""
    (found,) = gradients(model)
    return found


# ---- training ----


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_local_training_on_the_whole_batch(world_size: int, as_view: bool, name: str) -> None:
    make_model, shape = MODELS[name]
    inputs, targets = make_data(5, world_size * SHARE, shape)
    initial = make_model(0)

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        model = DistributedDataParallel(
            copy.deepcopy(initial),
            process_group=group,
            bucket_cap_mb=SMALL_CAP_MB,
            gradient_as_bucket_view=as_view,
        )
        mine = rows_of(group.rank)
        return train(model, inputs[:, mine], targets[:, mine])

    whole_state, whole_history = train(copy.deepcopy(initial), inputs, targets)
    results = run_ranks(world_size, body)

    assert not all_equal(whole_state, state(initial)), "it learned nothing"
    for final, history in results:
        torch.testing.assert_close(final, whole_state, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(history, whole_history, rtol=1e-9, atol=1e-12)
        assert all_equal(final, results[0][0])
        assert all(all_equal(a, b) for a, b in zip(history, results[0][1], strict=True))


def test_float32_replicas_stay_bitwise_identical() -> None:
    inputs, targets = make_data(10, 4 * SHARE)
    initial = mlp().float()

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(copy.deepcopy(initial), process_group=group, bucket_cap_mb=SMALL_CAP_MB)
        mine = rows_of(group.rank)
        return train(model, inputs[:, mine].float(), targets[:, mine].float())[0]

    results = run_ranks(4, body)

    assert all(all_equal(result, results[0]) for result in results)


# ---- state ----


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_construction_gives_every_rank_rank_0s_state_in_place(world_size: int) -> None:
    def seeded(rank: int) -> torch.nn.Module:
        model = torch.nn.Sequential(mlp(seed=rank), torch.nn.BatchNorm1d(3).double())
        for index, buffer in enumerate(model.buffers()):
            buffer.fill_(10 * rank + index)
        model[0].get_parameter("2.weight").requires_grad_(False)
        return model

    models = [seeded(rank) for rank in range(world_size)]
    expected = state(models[0])
    assert world_size == 1 or not all_equal(expected, state(models[1]))

    def body(group: ProcessGroup) -> None:
        model = models[group.rank]
        storage = [tensor.data_ptr() for tensor in model.state_dict().values()]
        assert DistributedDataParallel(model, process_group=group).module is model
        assert [tensor.data_ptr() for tensor in model.state_dict().values()] == storage

    run_ranks(world_size, body)

    assert all(all_equal(state(model), expected) for model in models)


def local_running_mean(rank: int, steps: int) -> torch.Tensor:
    norm = torch.nn.BatchNorm1d(2).double()
    for step in range(steps):
        norm(batch_of(rank, step))
    assert norm.running_mean is not None
    return norm.running_mean


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(8, dtype=torch.float64).view(4, 2) * (rank + 1) + step


@pytest.mark.filterwarnings("ignore:broadcast_buffers is deprecated:FutureWarning")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("broadcast", [True, False])
def test_running_statistics_are_rank_0s_at_each_forward_or_each_ranks_own(world_size: int, broadcast: bool) -> None:
    steps = 3

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], torch.Tensor]:
        norm = torch.nn.BatchNorm1d(2).double()
        model = DistributedDataParallel(norm, process_group=group, broadcast_buffers=broadcast)
        seen = []
        norm.register_forward_pre_hook(lambda *_: seen.append(norm.running_mean.clone()))  # type: ignore[union-attr]
        for step in range(steps):
            model(batch_of(group.rank, step)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(batch_of(0, 0))
        assert norm.num_batches_tracked is not None
        assert int(norm.num_batches_tracked) == steps
        assert norm.running_mean is not None
        return seen, norm.running_mean.clone()

    for rank, (seen, last) in enumerate(run_ranks(world_size, body)):
        source = 0 if broadcast else rank
        for step in range(steps):
            assert torch.equal(seen[step], local_running_mean(source, step))
        assert torch.equal(last, local_running_mean(source, steps)), "evaluation sees what rank 0 has"


def test_state_dict_has_torchs_keys_and_loads_on_every_rank() -> None:
    saved = state(mlp(seed=5))

    def body(group: ProcessGroup) -> tuple[list[str], list[torch.Tensor]]:
        model = DistributedDataParallel(copy.deepcopy(initial), process_group=group)
        model.load_state_dict(dict(zip(model.state_dict(), saved, strict=True)))
        return list(model.state_dict()), state(model)

    initial = mlp()
    for keys, loaded in run_ranks(2, body):
        assert keys == [f"module.{key}" for key in initial.state_dict()]
        assert all_equal(loaded, saved)


# ---- accumulation ----


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
def test_accumulation_equals_one_large_batch(world_size: int, as_view: bool) -> None:
    """Two rounds of three micro-batches, of which only the third is synchronised."""
    micro, rounds = 3, 2
    inputs, targets = make_data(rounds * micro, world_size * SHARE)
    initial = mlp()

    def body(group: ProcessGroup) -> list[list[torch.Tensor]]:
        model = DistributedDataParallel(
            copy.deepcopy(initial),
            process_group=group,
            bucket_cap_mb=SMALL_CAP_MB,
            gradient_as_bucket_view=as_view,
        )
        mine, found = rows_of(group.rank), []
        for start in range(0, rounds * micro, micro):
            model.zero_grad()
            with model.no_sync():
                for step in range(start, start + micro - 1):
                    loss_of(model, inputs[step, mine], targets[step, mine]).backward()
            last = start + micro - 1
            loss_of(model, inputs[last, mine], targets[last, mine]).backward()
            found.append(gradients(model))
        return found

    for found in run_ranks(world_size, body):
        for number in range(rounds):
            local = copy.deepcopy(initial)
            for step in range(number * micro, (number + 1) * micro):
                loss_of(local, inputs[step], targets[step]).backward()
            torch.testing.assert_close(found[number], gradients(local), rtol=1e-12, atol=1e-14)


def test_no_sync_keeps_each_ranks_own_and_nests() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)

        def step(number: int) -> None:
            model(inputs_of(group.rank, number)).sum().backward()

        with model.no_sync():
            step(0)
            with model.no_sync():
                step(1)
            step(2)  # the inner one has ended, the outer has not
            assert torch.equal(weight_gradient(model), torch.stack([inputs_of(group.rank, s) for s in range(3)]).sum(0))
        step(3)
        assert torch.equal(weight_gradient(model), mean_input(3, 0, 1, 2, 3))

    run_ranks(3, body)


def test_no_sync_ends_with_an_exception() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        model(inputs_of(group.rank)).sum().backward()
        assert torch.equal(weight_gradient(model), mean_input(2, 0))

    run_ranks(2, body)


def test_a_forward_that_failed_does_not_reduce_the_next_backward() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 7, dtype=torch.float64))
        with model.no_sync():
            model(inputs_of(group.rank)).sum().backward()
        assert torch.equal(weight_gradient(model), inputs_of(group.rank))
        model(inputs_of(group.rank, 1)).sum().backward()
        assert torch.equal(weight_gradient(model), mean_input(2, 0, 1))

    run_ranks(2, body)


def test_no_sync_communicates_nothing_at_all() -> None:
    """One rank alone can go through it: nobody has to answer, not even for buffers, which that rank has just seen."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2).double(), process_group=group)
        with model.no_sync():
            model(batch_of(group.rank, 0)).sum().backward()
            if group.rank == 1:
                for step in range(1, 3):
                    model(batch_of(1, step)).sum().backward()

    run_ranks(2, body)


# ---- shapes of use ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_several_forwards_before_one_backward(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group, gradient_as_bucket_view=as_view)
        for _ in range(3):
            model.zero_grad()
            loss = sum(model(inputs_of(group.rank, step)).sum() for step in range(3))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            assert torch.equal(weight_gradient(model), mean_input(2, 0, 1, 2))

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_several_backwards_add_up(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group, gradient_as_bucket_view=as_view)
        for step in range(3):
            model(inputs_of(group.rank, step)).sum().backward()
        assert torch.equal(weight_gradient(model), mean_input(2, 0, 1, 2))

    run_ranks(2, body)


def test_evaluation_without_gradients_between_steps() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        for step in range(3):
            model.zero_grad()
            model(inputs_of(group.rank, step)).sum().backward()
            assert torch.equal(weight_gradient(model), mean_input(2, step))
            model.eval()
            with torch.no_grad():
                output = model(inputs_of(0))
            assert not output.requires_grad
            assert output.item() == 11.0, "rank 0's weights, and rank 0's input"
            model.train()

    run_ranks(2, body)


def test_a_forward_in_evaluation_is_no_collective_when_there_are_no_buffers() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        model(inputs_of(group.rank)).sum().backward()
        if group.rank == 0:
            with torch.no_grad():
                model(inputs_of(0))

    run_ranks(2, body)


def test_shared_parameters_are_reduced_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = torch.nn.Linear(2, 2, bias=False).double()
            self.decode = torch.nn.Linear(2, 2, bias=False).double()
            self.decode.weight = self.encode.weight
            torch.nn.init.eye_(self.encode.weight)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.decode(self.encode(inputs))  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(Tied(), process_group=group)
        sizes: list[int] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            sizes.append(bucket.buffer().numel())
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / group.size)

        model.register_comm_hook(None, hook)
        model(inputs_of(group.rank)).sum().backward()
        assert sizes == [4]
        return gradients(model)

    whole = Tied()
    whole(torch.cat([inputs_of(rank) for rank in range(2)])).sum().div(2).backward()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, gradients(whole))


def test_frozen_parameters_take_no_part() -> None:
    initial = mlp()
    frozen = {"0.weight", "2.bias"}
    for name, parameter in initial.named_parameters():
        parameter.requires_grad_(name not in frozen)
    inputs, targets = make_data(3, 2 * SHARE)

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        module = copy.deepcopy(initial)
        mine = rows_of(group.rank)
        final, history = train(DistributedDataParallel(module, process_group=group), inputs[:, mine], targets[:, mine])
        assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == frozen
        assert all(len(step) == 4 for step in history)
        return final

    whole, _ = train(copy.deepcopy(initial), inputs, targets)
    for final in run_ranks(2, body):
        torch.testing.assert_close(final, whole, rtol=1e-10, atol=1e-13)


def test_keyword_arguments_and_any_output_pass_through() -> None:
    class Keywords(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor, *, factor: float) -> dict[str, Any]:
            return {"output": [self.weight * inputs * factor], "factor": factor}

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Keywords(), process_group=group)
        result = model(inputs_of(group.rank), factor=2.0)
        assert result["factor"] == 2.0
        result["output"][0].sum().backward()
        assert torch.equal(weight_gradient(model), 2 * mean_input(2, 0)[0])

    run_ranks(2, body)


def test_a_non_reentrant_checkpoint_changes_nothing() -> None:
    inputs, targets = make_data(3, 2 * SHARE)
    initial = mlp()

    class Checkpointed(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, inputs, use_reentrant=False)  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(Checkpointed(copy.deepcopy(initial)), process_group=group)
        mine = rows_of(group.rank)
        return train(model, inputs[:, mine], targets[:, mine])[0]

    whole, _ = train(copy.deepcopy(initial), inputs, targets)
    for final in run_ranks(2, body):
        torch.testing.assert_close(final, whole, rtol=1e-10, atol=1e-13)


class Heads(torch.nn.Module):
    """One head for each part of the loss. With several parts, the layer before the heads is used several times."""

    def __init__(self, shares_layer: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 4) for _ in range(1 if shares_layer else 2)])
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 3) for _ in range(2)])

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        return self.heads[number](torch.tanh(self.layers[number % len(self.layers)](inputs)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use_reentrant", "options"),
    [
        (False, {}),
        (False, {"find_unused_parameters": True}),
        (False, {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
        (False, {"static_graph": True}),
        (True, {"static_graph": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("shares_layer", [False, True])
def test_a_loss_may_use_a_checkpointed_wrapper_twice(use_reentrant: bool, options: Any, shares_layer: bool) -> None:
    """The second checkpoint runs the wrapper's forward again within the backward that is averaging already."""
    inputs, targets = make_data(4, 2 * SHARE)
    torch.manual_seed(5)
    initial = Heads(shares_layer).double()

    def body(group: ProcessGroup | None) -> list[torch.Tensor]:
        model: torch.nn.Module = copy.deepcopy(initial)
        mine = slice(None) if group is None else rows_of(group.rank)
        if group is not None:
            model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=SMALL_CAP_MB, **options)

        def both(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.clone().requires_grad_()
            first, second = (checkpoint(model, rows, number, use_reentrant=use_reentrant) for number in range(2))
            return first + 2 * second  # type: ignore[no-any-return]

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(both, inputs[step, mine], targets[step, mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if isinstance(model, DistributedDataParallel):
                times = model.iteration_statistics()
                assert times.forward_ended <= times.backward_started, "the forward in the checkpoint is part of the backward"
        if isinstance(model, DistributedDataParallel):
            assert model._reducer.reductions == 4
            with model.no_sync():
                loss_of(both, inputs[0, mine], targets[0, mine]).backward()  # type: ignore[no-untyped-call]
            assert model._reducer.reductions == 4
        return state(model)

    whole = body(None)
    for final in run_ranks(2, body):
        torch.testing.assert_close(final, whole, rtol=1e-10, atol=1e-13)


def test_a_checkpointed_wrapper_may_run_again_after_the_first_gradient() -> None:
    """The script uses one layer outside of the wrapper's forward, so this layer gets the first gradient."""

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inside(inputs))

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Inner(), process_group=group)
        rows = torch.full((1, 2), group.rank + 1.0)
        for step in range(3):
            with model.no_sync():  # this forward is the latest when the next forward is announced
                model(rows).sum().backward()
            model.zero_grad()
            model.module.outside(checkpoint(model, rows, use_reentrant=False)).sum().backward()  # type: ignore[operator]
            assert model._reducer.reductions == step + 1
            # The gradient of `outside` is averaged, and also the gradients after the second run of the forward.
            for parameter in model.parameters():
                assert parameter.grad is not None
                total = parameter.grad.clone()
                group.all_reduce(total)
                torch.testing.assert_close(parameter.grad, total / 2)
            assert model._reducer._sync_policy.mark == f"backward 2 since forward {step + 1}"

    run_ranks(2, body)


def test_a_module_may_be_wrapped_anew() -> None:
    """The first wrapper leaves nothing behind that would average once more."""

    def body(group: ProcessGroup) -> None:
        module = closed_form_model()
        first = DistributedDataParallel(module, process_group=group)
        first(inputs_of(group.rank)).sum().backward()
        alive = weakref.ref(first._reducer)
        model = DistributedDataParallel(module, process_group=group)
        del first
        assert alive() is None
        calls: list[int] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append(bucket.index())
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / group.size)

        model.register_comm_hook(None, hook)
        model.zero_grad()
        model(inputs_of(group.rank, 1)).sum().backward()
        assert calls == [0]
        assert torch.equal(weight_gradient(module), mean_input(2, 1))

    run_ranks(2, body)


def test_statistics_are_those_of_the_latest_iteration() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        model(inputs_of(group.rank)).sum().backward()
        first = model.iteration_statistics()
        assert [times.nbytes for times in first.buckets] == [16]
        assert 0 < first.forward_started < first.backward_started <= first.last_gradient <= first.finished
        model(inputs_of(group.rank)).sum().backward()
        second = model.iteration_statistics()
        assert second.forward_started > first.finished
        assert len(second.buckets) == 1

    run_ranks(2, body)


# ---- communication hooks ----


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
def test_a_hook_owns_the_reduction_and_the_division(world_size: int, as_view: bool) -> None:
    inputs, targets = make_data(3, world_size * SHARE)
    initial = mlp()

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[int]]:
        model = DistributedDataParallel(
            copy.deepcopy(initial),
            process_group=group,
            bucket_cap_mb=SMALL_CAP_MB,
            gradient_as_bucket_view=as_view,
        )
        calls: list[int] = []

        def hook(state: dict[str, float], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append(bucket.index())
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] * state["factor"] / group.size)

        model.register_comm_hook({"factor": 2.0}, hook)
        mine = rows_of(group.rank)
        loss_of(model, inputs[0, mine], targets[0, mine]).backward()
        return gradients(model), calls

    local = copy.deepcopy(initial)
    (2 * loss_of(local, inputs[0], targets[0])).backward()
    for found, calls in run_ranks(world_size, body):
        assert calls == list(range(len(calls)))
        assert len(calls) > 1
        torch.testing.assert_close(found, gradients(local), rtol=1e-12, atol=1e-14)


def test_bad_hooks_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(closed_form_model(), process_group=group)
        with pytest.raises(TypeError, match=r"must be callable. Expected a function hook\(state, bucket\), found str"):
            model.register_comm_hook(None, "allreduce")  # type: ignore[arg-type]
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())  # type: ignore[arg-type, return-value]
        with pytest.raises(MisuseError, match="found Tensor"):
            model(inputs_of(group.rank)).sum().backward()
        with pytest.raises(MisuseError, match="set_hook on rank"):
            model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())

    run_ranks(2, body)


def test_a_forward_after_a_failed_backward_is_refused() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(2, 1)
            self.unused = torch.nn.Linear(2, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.used(inputs)  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(Two(), process_group=group)
        with pytest.raises(MisuseError, match=r"got no gradient in it: 'unused\.weight', 'unused\.bias'"):
            model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(MisuseError, match=rf"rank {group.rank} of 2.*never ended"):
            model(torch.ones(1, 2))

    run_ranks(2, body)


# ---- overlap ----


class WaitInBackward(torch.autograd.Function):
    """The identity; its backward goes on only after an event, and notes whether it came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: threading.Event, log: list[str]) -> torch.Tensor:
        ctx.event, ctx.log = event, log
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *found: Any) -> Any:
        ctx.log.append("bucket 0 was reduced" if ctx.event.wait(20.0) else "waited in vain for bucket 0")
        return found[0], None, None


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.filterwarnings("ignore:.*hooks on the gradient before it is averaged")
def test_bucket_0_is_reduced_before_the_last_gradient_is_ready(world_size: int, as_view: bool) -> None:
    class Waiting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).double()
            self.event, self.log = threading.Event(), list[str]()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = WaitInBackward.apply(self.early(inputs), self.event, self.log)
            return self.late(hidden)  # type: ignore[no-any-return]

    def body(group: ProcessGroup) -> list[str]:
        module = Waiting()
        module.early.weight.register_post_accumulate_grad_hook(lambda _: module.log.append("last gradient"))
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = group.all_reduce(bucket.buffer(), async_op=True).get_future()

            def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
                if bucket.index() == 0:
                    module.event.set()
                return done.value()[0] / group.size

            return future.then(finish)

        model.register_comm_hook(None, hook)
        found = []
        for _ in range(2):  # before the rebuild and after it
            module.event.clear()
            module.log.clear()
            model(inputs_of(group.rank)).sum().backward()
            found += module.log
        return found

    assert run_ranks(world_size, body) == [["bucket 0 was reduced", "last gradient"] * 2] * world_size


# ---- what cannot be wrapped ----


def no_parameter() -> torch.nn.Module:
    return torch.nn.ReLU()


def test_a_tensor_parallel_module_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        parallel = with_tensors(weight=torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()])))
        with pytest.raises(MisuseError, match=r"parameter 'weight' is a DTensor.*use torch's own DistributedDataParallel over"):
            DistributedDataParallel(parallel, device_mesh=mesh)
    finally:
        dist.destroy_process_group()


def all_frozen() -> torch.nn.Module:
    return torch.nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("make_module", "complaint"),
    [
        pytest.param(no_parameter, "no parameter of the module requires a gradient.*use the module without", id="none"),
        pytest.param(all_frozen, "no parameter of the module requires a gradient.*unfreeze", id="frozen"),
        pytest.param(
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2)),
            r"'1\.weight' is not initialised yet; run one forward",
            id="lazy",
        ),
        pytest.param(
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")),
            r"'1\.weight' is on meta, but backend 'in_process' moves tensors on cpu; move the module",
            id="device",
        ),
        pytest.param(
            lambda: with_tensors(weight=torch.nn.Parameter(torch.ones(1, 4).expand(3, 4))),
            r"parameter 'weight' has elements that share memory \(such as `expand` makes\), so no optimizer can write it",
            id="expanded",
        ),
        pytest.param(
            torch.inference_mode()(lambda: torch.nn.Linear(2, 2)),
            r"parameter 'weight' was made in torch\.inference_mode\(\), so no optimizer can write it",
            id="inference mode",
        ),
        pytest.param(
            lambda: with_tensors(torch.arange(6.0).as_strided((4, 3), (1, 1))),
            "buffer 'table' has elements that share memory, so it cannot be written",
            id="overlapping buffer",
        ),
        pytest.param(
            lambda: with_tensors(torch.eye(3).to_sparse()),
            r"buffer 'table' is sparse \(torch\.sparse_coo\)",
            id="sparse buffer",
        ),
        pytest.param(
            lambda: with_tensors(torch.ones(3, device="meta")),
            "buffer 'table' is on meta, but backend",
            id="device of a buffer",
        ),
        pytest.param(
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2)),
            r"layer '1' is torch\.nn\.SyncBatchNorm \(1 in all\).*convert_sync_batchnorm\(model\) before it is wrapped",
            id="torch's SyncBatchNorm",
        ),
    ],
)
@pytest.mark.parametrize("refusing", [[0, 1, 2], [0], [2], [1, 2]])
def test_a_module_that_cannot_be_wrapped_is_refused_on_every_rank(
    make_module: Callable[[], torch.nn.Module], complaint: str, refusing: list[int]
) -> None:
    """Also where only some ranks have it. The group lives on."""

    def body(group: ProcessGroup) -> None:
        module = make_module() if group.rank in refusing else mlp()
        with pytest.raises(MisuseError if group.rank in refusing else DisagreementError, match=complaint) as raised:
            DistributedDataParallel(module, process_group=group)
        if group.rank not in refusing:
            assert str(raised.value).startswith(f"rank {refusing[0]} has refused its model (rank {group.rank} of 3")
        total = torch.tensor([group.rank])
        group.all_reduce(total)
        assert total.item() == 3

    run_ranks(3, body)


def with_tensors(table: torch.Tensor | None = None, **parameters: torch.nn.Parameter) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("table", table)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def test_what_nobody_writes_is_not_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ignoring = with_tensors(torch.arange(6.0).as_strided((4, 3), (1, 1)))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["table"])
        DistributedDataParallel(ignoring, process_group=group)
        expanded = torch.nn.Parameter(torch.full((1, 4), float(group.rank)).expand(3, 4), requires_grad=False)
        module = DistributedDataParallel(with_tensors(frozen=expanded), process_group=group).module
        assert module.frozen.tolist() == [[0.0] * 4] * 3

    run_ranks(2, body)
    run_ranks(1, lambda group: DistributedDataParallel(torch.nn.SyncBatchNorm(2), process_group=group))


def test_buffers_and_frozen_parameters_of_inference_mode_are_those_of_rank_0() -> None:
    class Shifted(torch.nn.Linear):
        def __init__(self, rank: int) -> None:
            super().__init__(2, 2)
            with torch.inference_mode():
                self.register_buffer("table", torch.full((2,), float(rank)))
                self.shift = torch.nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) + self.shift + self.table

    def body(group: ProcessGroup) -> list[list[float]]:
        module = Shifted(group.rank)
        model = DistributedDataParallel(module, process_group=group)
        for _ in range(2):
            with torch.inference_mode():
                module.get_buffer("table").fill_(group.rank)
            model(torch.ones(1, 2)).sum().backward()
        return [module.get_buffer("table").tolist(), module.shift.tolist()]

    assert run_ranks(2, body) == [[[0.0] * 2, [0.0] * 2]] * 2


def test_buffers_whose_elements_are_repeated_are_those_of_rank_0() -> None:
    """`expand` makes them, for masks and positions."""

    def body(group: ProcessGroup) -> None:
        column = (torch.arange(3.0) + 10 * group.rank)[:, None]
        model = DistributedDataParallel(with_tensors(column.expand(3, 4)), process_group=group)
        assert model.module.table.stride() == (1, 0)
        assert model.module.table.tolist() == [[float(row)] * 4 for row in range(3)]
        column.add_(100 * group.rank)
        model(torch.ones(1, 2)).sum().backward()
        assert column.tolist() == [[0.0], [1.0], [2.0]]

    run_ranks(2, body)


@pytest.mark.parametrize("cap", [0, -1, -0.5, float("nan"), float("inf")])
def test_a_bucket_cap_that_is_not_positive_and_finite_is_refused(cap: float) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="expected a finite bucket_cap_mb above 0 MiB, found"):
            DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group, bucket_cap_mb=cap)

    run_ranks(1, body)


class Net(torch.nn.Module):
    def __init__(self, features: int = 4, *, dtype: torch.dtype = torch.float32, buffer: int = 3, frozen: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, features, dtype=dtype)
        self.head = torch.nn.Linear(features, 1).requires_grad_(not frozen)
        self.register_buffer("table", torch.zeros(buffer))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        pytest.param({"features": 5}, ["parameter 'body.weight'", "float32[4, 2]", "float32[5, 2]"], id="shape"),
        pytest.param({"dtype": torch.float64}, ["parameter 'body.weight'", "float32[4, 2]", "float64[4, 2]"], id="dtype"),
        pytest.param({"buffer": 7}, ["buffer 'table'", "float32[3]", "float32[7]"], id="buffer"),
        pytest.param({"frozen": True}, ["parameter 'head.weight'", "float32[1, 4]", "(frozen)"], id="frozen on one rank"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_modules_that_differ_are_refused_on_every_rank(other: dict[str, Any], words: list[str], world_size: int) -> None:
    def body(group: ProcessGroup) -> str:
        module = Net(**(other if group.rank == world_size - 1 else {}))
        with pytest.raises(DisagreementError) as caught:
            DistributedDataParallel(module, process_group=group)
        return str(caught.value)

    for rank, text in enumerate(run_ranks(world_size, body)):
        for word in [*words, "on rank 0", f"on rank {world_size - 1}", f"rank {rank} of {world_size}"]:
            assert word in text


# ---- the default group ----


def test_without_a_group_it_makes_and_takes_the_default_one() -> None:
    assert not is_initialized()
    try:
        model = DistributedDataParallel(closed_form_model())
        assert model.process_group is get_default_group()
        assert model.process_group.size == 1
        assert DistributedDataParallel(closed_form_model()).process_group is model.process_group
        model(inputs_of(0)).sum().backward()
        assert torch.equal(weight_gradient(model), inputs_of(0))
    finally:
        destroy_process_group()
