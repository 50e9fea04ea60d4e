"""Uneven inputs: what native DDP cannot be asked (see test_native_features for the rest)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, Join, Joinable, JoinHook, convert_sync_batchnorm
from syncline.reducer import GradBucket

pytestmark = pytest.mark.ranks


def linear() -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.constant_(layer.weight, 1.0)
    return layer


def inputs_of(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([[rank + 1.0, 10.0 * step + rank]], dtype=torch.float64)


def steps(model: Any, rank: int, count: int) -> list[torch.Tensor]:
    """The gradient of each step; the weights stay."""
    found = []
    for step in range(count):
        model.zero_grad()
        model(inputs_of(rank, step)).sum().backward()
        found.append(model.module.weight.grad.clone())
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("by_all", [True, False])
def test_gradients_are_those_of_the_ranks_that_have_inputs(world_size: int, by_all: bool) -> None:
    """Rank r has r inputs."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join(divide_by_initial_world_size=by_all):
            found = steps(model, group.rank, group.rank)
        # Afterwards all is as before: divided by all.
        (after,) = steps(model, group.rank, 1)
        assert torch.equal(after, torch.stack([inputs_of(rank, 0) for rank in range(world_size)]).mean(0))
        return found

    for rank, found in enumerate(run_ranks(world_size, body)):
        assert len(found) == rank
        for step, gradient in enumerate(found):
            present = range(step + 1, world_size)
            total = torch.stack([inputs_of(other, step) for other in present]).sum(0)
            torch.testing.assert_close(gradient, total / (world_size if by_all else len(present)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("last_rank", [0, 1, 2])
def test_all_end_with_the_state_of_a_rank_that_was_last(last_rank: int) -> None:
    def body(group: ProcessGroup) -> list[float]:
        module = torch.nn.BatchNorm1d(2, affine=True).double()
        model = DistributedDataParallel(module, process_group=group)
        with model.join():
            for step in range(3 if group.rank == last_rank else 1):
                model(torch.arange(8.0).double().view(4, 2) * (group.rank + 1) + step).sum().backward()
            with torch.no_grad():
                module.weight.fill_(group.rank + 0.5)
        assert module.num_batches_tracked is not None
        return [*module.weight.tolist(), module.num_batches_tracked.item()]

    assert run_ranks(3, body) == [[last_rank + 0.5] * 2 + [3]] * 3


def test_ranks_without_inputs_take_part_in_no_backward_of_a_frozen_model() -> None:
    """Rank r has 1 + r inputs. The model is frozen in the second iteration."""

    def body(group: ProcessGroup) -> torch.Tensor:
        module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), linear()).double()
        model = DistributedDataParallel(module, process_group=group)
        inputs = (torch.arange(8.0).double().view(4, 2) * (group.rank + 1)).requires_grad_()
        with model.join():
            for step in range(1 + group.rank):
                model.requires_grad_(step != 1)
                model(inputs).sum().backward()
        # Afterwards all ranks synchronise buffers again, and average.
        model.requires_grad_(True)
        model.zero_grad()
        model(inputs).square().sum().backward()
        return module[1].weight.grad.clone()

    first, *others = run_ranks(3, body)
    assert first.count_nonzero() > 0
    assert all(torch.equal(first, other) for other in others)


def test_the_forward_after_the_context_broadcasts_what_rank_0_has_changed() -> None:
    """Between the context and the forward, rank 0 loads other statistics, as from a checkpoint."""

    def body(group: ProcessGroup) -> list[float]:
        norm = torch.nn.BatchNorm1d(2).double()
        model = DistributedDataParallel(torch.nn.Sequential(norm, linear()), process_group=group)
        with model.join():
            for step in range(1 + group.rank):
                model(torch.arange(8.0).double().view(4, 2) * (group.rank + 1 + step)).sum().backward()
        assert norm.running_mean is not None
        if group.rank == 0:
            norm.running_mean.fill_(5.0)
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 2, dtype=torch.float64))
        return norm.running_mean.tolist()

    assert run_ranks(3, body) == [[5.0, 5.0]] * 3


def test_after_the_context_buffers_are_due_on_all_ranks_alike() -> None:
    """Rank 1 has one more forward than rank 0, inside `no_sync`. So its latest forward does not make buffers due."""

    def body(group: ProcessGroup) -> list[float]:
        norm = torch.nn.BatchNorm1d(2).double()
        model = DistributedDataParallel(torch.nn.Sequential(norm, linear()), process_group=group)
        inputs = torch.arange(8.0).double().view(4, 2) * (1 + group.rank)
        with model.join():
            model(inputs).sum().backward()
            if group.rank == 1:
                with model.no_sync():
                    model(inputs).sum().backward()
        model.eval()
        with torch.no_grad():
            model(inputs)
        assert norm.running_mean is not None
        return norm.running_mean.tolist()

    first, second = run_ranks(2, body, timeout_s=20)
    assert first == second


def test_a_buffer_hook_runs_in_the_forward_after_the_context() -> None:
    def body(group: ProcessGroup) -> list[int]:
        calls: list[object] = []
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(2), linear()).double(), process_group=group)
        model._register_buffer_comm_hook(None, lambda state, buffers: calls.append(state))
        inputs = torch.arange(8.0).double().view(4, 2)
        with model.join(throw_on_early_termination=True):
            model(inputs).sum().backward()
        before = len(calls)
        model(inputs).sum().backward()
        return [before, len(calls)]

    assert run_ranks(2, body) == [[1, 2]] * 2


def test_early_termination_names_the_ranks_on_every_rank() -> None:
    def body(group: ProcessGroup) -> str:
        model = DistributedDataParallel(linear(), process_group=group)
        with pytest.raises(DisagreementError) as caught, model.join(throw_on_early_termination=True):
            steps(model, group.rank, 3 if group.rank == 1 else 2)
        steps(model, group.rank, 1)  # the context is left, and no backward is open
        return str(caught.value)

    for rank, text in enumerate(run_ranks(3, body)):
        torchs = "Detected at least one rank that exhausted inputs" if rank == 1 else f"Rank {rank} exhausted all inputs"
        assert text.startswith(f"{torchs}. Out of inputs is rank 0, 2 (rank {rank} of 3")


def test_where_nobody_goes_on_without_inputs_the_layers_may_communicate() -> None:
    def body(group: ProcessGroup) -> int:
        model = DistributedDataParallel(convert_sync_batchnorm(torch.nn.BatchNorm1d(2), group), process_group=group)
        with pytest.raises(MisuseError, match=r"SyncBatchNorm.*or pass throw_on_early_termination=True"):
            model.join().__enter__()
        taken = []

        def train() -> None:
            for number in range(2 + group.rank):
                model(torch.arange(4.0).view(2, 2) + group.rank).sum().backward()
                taken.append(number)

        with pytest.raises(DisagreementError, match="exhausted"), model.join(throw_on_early_termination=True):
            train()
        return len(taken)

    assert run_ranks(2, body) == [2, 2]


def test_where_nobody_goes_on_without_inputs_a_buffer_hook_may_be_there() -> None:
    def body(group: ProcessGroup) -> tuple[int, list[float]]:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(1), process_group=group)
        calls: list[str] = []
        model._register_buffer_comm_hook(calls, lambda state, buffers: state.extend(buffers))
        with pytest.raises(MisuseError, match="buffer hook"):
            model.join().__enter__()
        with model.join(throw_on_early_termination=True):
            for _ in range(2):
                model(torch.tensor([[0.0], [1.0]]) + 10 * group.rank).sum().backward()
            mean: list[float] = model.module.running_mean.tolist()  # type: ignore[union-attr, operator]
        return len(calls), mean

    # Within the context each rank keeps what it has seen: the hook does nothing to the buffers, and nothing else does.
    assert run_ranks(2, body) == [(6, pytest.approx([0.095])), (6, pytest.approx([1.995]))]


def test_even_inputs_terminate_nobody() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join(throw_on_early_termination=True):
            steps(model, group.rank, 2)

    run_ranks(2, body)


def test_an_error_leaves_the_context_at_once() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), model.join():
            model(torch.ones(1, 3, dtype=torch.float64) * steps(model, group.rank, 1)[0].sum())
        steps(model, group.rank, 2)
        with model.join():
            steps(model, group.rank, 1 + group.rank)

    run_ranks(2, body)


def test_the_error_of_a_backward_is_not_hidden_by_the_end_of_the_context() -> None:
    def body(group: ProcessGroup) -> None:
        two = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
        two.forward = lambda inputs, both: two[0](inputs) + (two[1](inputs) if both else 0.0)  # type: ignore[assignment]
        model = DistributedDataParallel(two, process_group=group, static_graph=True)
        inputs = torch.ones(1, 1)
        model(inputs, False).sum().backward()
        with pytest.raises(MisuseError, match="The graph is not static"), model.join():
            model(inputs, True).sum().backward()
        assert model._join is None

    run_ranks(2, body)


def test_disabled_it_changes_nothing() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join(enable=False):
            assert Join.notify_join_context(model) is None
            steps(model, group.rank, 1)

    run_ranks(2, body)


class Averager(Joinable):
    """Communicates once in each iteration: adds up how many ranks have inputs."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.seen: list[float] = []
        self.log: list[str] = []

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup:
        return self.group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.log.append(f"hook {kwargs}")
        return AveragerHook(self)

    def step(self, value: float) -> float:
        Join.notify_join_context(self)
        total = torch.tensor([value])
        self.group.all_reduce(total)
        return total.item()


class AveragerHook(JoinHook):
    def __init__(self, averager: Averager) -> None:
        self.averager = averager

    def main_hook(self, present: Sequence[int]) -> None:
        total = torch.tensor([0.0])
        self.averager.group.all_reduce(total)
        self.averager.log.append(f"without {list(present)}")

    def post_hook(self, last_rank: int) -> None:
        self.averager.log.append(f"post {last_rank}")

    def leave(self) -> None:
        self.averager.log.append("leave")


@pytest.mark.parametrize("model_first", [True, False])
def test_several_joinables_in_one_context(model_first: bool) -> None:
    def body(group: ProcessGroup) -> tuple[list[float], list[str]]:
        model, averager = DistributedDataParallel(linear(), process_group=group), Averager(group)
        joinables: list[Joinable] = [model, averager] if model_first else [averager, model]
        found = []
        with Join(joinables, divide_by_initial_world_size=False):
            for step in range(1 + group.rank):
                if not model_first:
                    found.append(averager.step(group.rank + 1.0))
                model.zero_grad()
                model(inputs_of(group.rank, step)).sum().backward()
                present = range(step, 3)
                expected = torch.stack([inputs_of(rank, step) for rank in present]).sum(0) / len(present)
                torch.testing.assert_close(model.module.weight.grad, expected)
                if model_first:
                    found.append(averager.step(group.rank + 1.0))
        return found, averager.log

    hook = "hook {'divide_by_initial_world_size': False}"
    for rank, (found, log) in enumerate(run_ranks(3, body)):
        assert found == [6.0, 5.0, 3.0][: rank + 1]
        assert log == [hook, *["without [1, 2]", "without [2]"][rank:], "post 2", "leave"]


# ---- what is refused ----


def test_what_cannot_be_joined() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with pytest.raises(InvalidArgumentError, match="at least one joinable"):
            Join([])
        other = group.split(0)
        assert other is not None
        with pytest.raises(InvalidArgumentError, match="joinables of one process group"):
            Join([model, Averager(other)])
        with model.join(), pytest.raises(MisuseError, match="DistributedDataParallel is within a join context already"):
            model.join().__enter__()

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            raise AssertionError("never called")

        model.register_comm_hook(None, hook)
        with pytest.raises(
            MisuseError, match=r"False means nothing to a communication hook.*\(mixed_precision uses one, too\)"
        ):
            model.join(divide_by_initial_world_size=False).__enter__()
        other.close()

    def plain(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(2), process_group=group)
        model._register_buffer_comm_hook(None, lambda state, buffers: None)
        with pytest.raises(MisuseError, match=r"join\(\) cannot say what a buffer hook shall do"):
            model.join().__enter__()
        converted = convert_sync_batchnorm(torch.nn.BatchNorm1d(2), group)
        with pytest.raises(MisuseError, match=r"join\(\) cannot run the forward of SyncBatchNorm"):
            DistributedDataParallel(converted, process_group=group).join().__enter__()

    run_ranks(1, plain)
    run_ranks(1, body)


def test_two_forwards_before_a_backward_are_an_error_that_names_the_collectives_of_join() -> None:
    """A rank without inputs takes part in the backward of the first forward at once."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join():
            for _ in range(group.rank):
                (model(inputs_of(1, 0)) + model(inputs_of(1, 1))).sum().backward()

    with pytest.raises(DisagreementError, match="which ranks have inputs"):
        run_ranks(2, body)


def test_a_static_graph_must_be_learnt_by_all() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group, static_graph=True)
        with (
            pytest.raises(MisuseError, match=r"in the first backward all ranks learn the graph, but only 1 of 2"),
            model.join(),
        ):
            steps(model, group.rank, group.rank)

    run_ranks(2, body)


def test_one_object_may_be_entered_again_also_in_another_group() -> None:
    """In the second context, rank 0 has no inputs at all."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(linear(), process_group=group)
        join = Join([model])
        for count in (2, group.rank):
            with join:
                found = steps(model, group.rank, count)
        other = group.split(0, key=-group.rank)
        assert other is not None
        model.update_process_group(other)
        with join:
            (after,) = steps(model, other.rank, 1) if other.rank > 0 else [torch.zeros(1, 2)]
        if other.rank > 0:
            assert torch.equal(after, inputs_of(1, 0) / 2)
        return found

    assert [len(found) for found in run_ranks(2, body)] == [0, 1]


def test_the_group_cannot_change_within_the_context() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(linear(), process_group=group)
        with model.join():
            with pytest.raises(MisuseError, match="within join"):
                model.update_process_group(group)
            steps(model, group.rank, 1)
        model.update_process_group(group)

    run_ranks(2, body)
