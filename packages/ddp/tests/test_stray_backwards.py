"""Backwards that come from no forward of the wrapper: averaged on all ranks, local by `no_sync`, or an error on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, torch_internals

pytestmark = pytest.mark.ranks

OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


class Model(torch.nn.Module):
    """A model with a second way in, beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4, dtype=torch.float64)
        self.second = torch.nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.energy(inputs)

    def energy(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return result


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1) / 10 - step / 4


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def expected(first: Model, size: int, step: int) -> list[torch.Tensor]:
    """The mean of the ranks' gradients."""
    whole = copy.deepcopy(first)
    for rank in range(size):
        (whole(inputs(rank, step)).square().sum() / size).backward()
    return gradients(whole)


def saliency(module: Model, step: int) -> None:
    """A backward of the bare module, for this rank alone; its gradients of parameters are thrown away."""
    image = inputs(5, step).requires_grad_()
    module(image).sum().backward()
    assert image.grad is not None
    module.zero_grad()


def stray_and_train(ddp: DistributedDataParallel, group: ProcessGroup, step: int, odd: int) -> None:
    """A step, before which one rank looks at its model."""
    if group.rank == odd:
        saliency(ddp.module, step)
    train(ddp, group, step)


def train(ddp: DistributedDataParallel, group: ProcessGroup, step: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(inputs(group.rank, step)).square().sum().backward()
    return gradients(ddp)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_within_no_sync_it_stays_local_and_the_next_steps_are_right(options: dict[str, Any], size: int) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group, **options)
        for step in range(4):
            if step > 0 and group.rank == 0:
                with ddp.no_sync():
                    saliency(module, step)
            torch.testing.assert_close(train(ddp, group, step), expected(first, size, step))

    run_ranks(size, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("odd", [0, 1])
def test_on_one_rank_it_is_an_error_on_all_that_names_parameters_and_remedy(options: dict[str, Any], odd: int) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group, **options)
        for step in range(2):
            train(ddp, group, step)
        with pytest.raises(DisagreementError) as caught:
            stray_and_train(ddp, group, 2, odd)
        said = str(caught.value)
        headline = said.splitlines()[0]
        assert "'second.bias'" in headline
        assert "no_sync()" in headline
        assert len(headline) <= 200, len(headline)
        assert "backward 2 since forward 2" in said
        assert "backward 1 since forward 3" in said
        group.abort()

    run_ranks(2, body)


def test_one_more_on_some_ranks_is_an_error_as_well() -> None:
    """An attack that ends earlier on some ranks: those that all ranks run are averaged, the one more is found."""
    first = model()

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group)
        train(ddp, group, 0)
        for step in range(2):
            saliency(module, step)
        with pytest.raises(DisagreementError, match=r"no_sync\(\)"):
            stray_and_train(ddp, group, 2, 1)
        group.abort()

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("starts_with_forward", [False, True])
def test_training_through_a_method_is_averaged(options: dict[str, Any], starts_with_forward: bool) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group, **options)
        if starts_with_forward:
            train(ddp, group, 0)
        for step in range(3):
            ddp.zero_grad()
            module.energy(inputs(group.rank, step)).square().sum().backward()
            torch.testing.assert_close(gradients(ddp), expected(first, 2, step))

    run_ranks(2, body)


def twice_forward(ddp: DistributedDataParallel, group: ProcessGroup) -> torch.Tensor:
    """Its first half by one forward, its second half by another: as many as there are halves."""
    whole = inputs(group.rank, 0)
    return torch.cat([ddp(whole[:1]), ddp(whole[1:])])


def forward_for_a_look(ddp: DistributedDataParallel, group: ProcessGroup) -> torch.Tensor:
    """One forward more, whose backward never comes: somebody draws the graph, or forgot `torch.no_grad`."""
    ddp(inputs(7, 7))
    result: torch.Tensor = ddp(inputs(group.rank, 0))
    return result


@pytest.mark.parametrize("unusual", [twice_forward, forward_for_a_look])
def test_ranks_may_run_different_numbers_of_forwards(
    unusual: Callable[[DistributedDataParallel, ProcessGroup], torch.Tensor],
) -> None:
    """It is right without a comparison, and stays so."""
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        for _ in range(3):
            ddp.zero_grad()
            outputs = unusual(ddp, group) if group.rank == 1 else ddp(inputs(group.rank, 0))
            outputs.square().sum().backward()
            torch.testing.assert_close(gradients(ddp), expected(first, 2, 0))

    run_ranks(2, body)


def test_a_hook_that_reduces_says_to_which_forward_its_bucket_belongs() -> None:
    first = model()

    def hook(group: ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work = group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / group.size)

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group)
        ddp.register_comm_hook(group, hook)
        for step in range(2):
            torch.testing.assert_close(train(ddp, group, step), expected(first, 2, step))
        with pytest.raises(DisagreementError, match=r"'second.bias'.*no_sync\(\)"):
            stray_and_train(ddp, group, 2, 0)
        group.abort()

    run_ranks(2, body)


@pytest.mark.parametrize("problem", ["inputs", "warning"])
def test_a_forward_that_fails_before_the_module_announces_no_backward(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs do not fit into the GPU's memory, or a warning is an error."""

    def no_memory(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    def body(group: ProcessGroup) -> None:
        first = model()
        ddp = DistributedDataParallel(first, process_group=group)
        if problem == "inputs":
            ddp._input_device = torch.device("cpu")  # as on a GPU
            with monkeypatch.context() as patch:
                patch.setattr(torch_internals, "moved_to", no_memory)
                with pytest.raises(RuntimeError, match="out of memory"):
                    ddp(inputs(0, 0))
        else:
            first.second.bias.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
            ddp(inputs(0, 0)).sum().backward()  # finds the hook
            with pytest.raises(UserWarning, match="hooks on the gradient"):
                ddp(inputs(0, 0))
        with ddp.no_sync():
            ddp(inputs(0, 0)).sum().backward()
        assert ddp.has_local_gradients

    run_ranks(1, body)
