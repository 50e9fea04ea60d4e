"""What a step changes before it is applied, put back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.ddp.step_snapshot import StepSnapshot


def test_buffers_random_state_and_gradients_are_those_before() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout())
    snapshot = StepSnapshot(module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = module(torch.ones(4, 2))
    first.sum().backward()
    snapshot.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(module(torch.ones(4, 2)), first)  # dropout drops the same again


def test_gradients_that_an_optimizer_has_used_become_zeros_or_none_as_before() -> None:
    dense, sparse, without = torch.nn.Linear(2, 3), torch.nn.Embedding(2, 3, sparse=True), torch.nn.Linear(2, 3)
    module = torch.nn.ModuleList([dense, sparse, without])
    (dense(torch.ones(4, 2)).sum() + sparse(torch.tensor([1])).sum()).backward()
    snapshot = StepSnapshot(module, [torch.optim.SGD(module.parameters(), lr=1.0)])
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    snapshot.restore()
    assert [parameter.grad is None for parameter in module.parameters()] == [False, False, False, True, True]
    assert torch.equal(dense.weight.grad, torch.zeros(3, 2))
    assert sparse.weight.grad.is_sparse
    assert not sparse.weight.grad.to_dense().any()


def test_parameters_that_a_step_has_changed_before_the_optimizer_are_put_back() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3).requires_grad_(False)])
    earlier = StepSnapshot(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    module[0].bias.data = torch.ones(4)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    snapshot = StepSnapshot(module, earlier=earlier)
    with torch.no_grad():
        module[0].weight.add_(1)
        module[1].weight.mul_(2)
    module[1].bias.data = torch.ones(3)
    snapshot.restore()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_parameter_whose_elements_are_repeated_is_put_back() -> None:
    module = torch.nn.Module()
    row = torch.arange(3.0)
    module.table = torch.nn.Parameter(row.expand(2, 3), requires_grad=False)
    snapshot = StepSnapshot(module)
    row.zero_()
    snapshot.restore()
    assert module.table.tolist() == [[0, 1, 2]] * 2


def test_buffers_of_a_part_that_is_new_are_put_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.append(torch.nn.BatchNorm1d(1))
    snapshot = StepSnapshot(module)
    module(torch.ones(2, 1))
    snapshot.restore()
    assert module[1].num_batches_tracked == 0


def test_modes_that_a_step_has_changed_are_put_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    module[1].eval()
    other = torch.nn.Linear(1, 1)
    other.bias.requires_grad_(False)
    snapshot = StepSnapshot(module, [torch.optim.SGD([*module.parameters(), *other.parameters()])])
    module.requires_grad_(False).eval()
    other.requires_grad_(True)
    snapshot.restore()
    assert [part.training for part in module.modules()] == [True, True, False]
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert [parameter.requires_grad for parameter in other.parameters()] == [True, False]


def test_a_module_without_a_mode_may_be_a_part() -> None:
    teacher = torch.jit.freeze(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(1, 1)).eval()))
    assert not hasattr(teacher, "training")
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), teacher)
    snapshot = StepSnapshot(module)
    module[0].eval()
    snapshot.restore()
    assert module[0].training


def test_a_buffer_that_was_replaced_is_the_one_before() -> None:
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(1))
    kept = module.count
    snapshot = StepSnapshot(module)
    module.count = module.count + 1
    snapshot.restore()
    assert module.count is kept
    assert module.count == 0


def test_buffers_that_a_step_has_filled_or_made_are_as_before() -> None:
    module = torch.nn.Module()
    module.register_buffer("average", None)
    snapshot = StepSnapshot(torch.nn.Sequential(module))
    for _ in range(2):  # the repeated step may fail, too
        module.average = torch.ones(1)
        module.register_buffer("cache", torch.ones(1))
        snapshot.restore()
        assert module.average is None
        assert not hasattr(module, "cache")


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_a_step_has_deleted_is_a_buffer_again(persistent: bool) -> None:
    module = torch.nn.Module()
    module.register_buffer("table", torch.ones(1), persistent=persistent)
    module.register_buffer("average", None, persistent=persistent)
    snapshot = StepSnapshot(module)
    del module.table
    del module.average
    module.average = 3.0
    snapshot.restore()
    assert dict(module.named_buffers()) == {"table": torch.ones(1)}
    assert list(module.state_dict()) == ["table"] * persistent
    module.average = torch.ones(1)
    assert "average" in dict(module.named_buffers())


def test_a_buffer_whose_elements_are_repeated_is_put_back() -> None:
    module = torch.nn.Module()
    row = torch.arange(3.0)
    module.register_buffer("mask", row.expand(2, 3))
    snapshot = StepSnapshot(module)
    row.zero_()
    snapshot.restore()
    assert module.mask.tolist() == [[0, 1, 2]] * 2
    assert module.mask.stride() == (0, 1)


def test_only_one_copy_of_a_hooks_error_feedback_is_kept() -> None:
    class State:
        latest: Callable[[], Any] = staticmethod(lambda: None)

        def state_dict(self) -> dict[str, Any]:
            assert self.latest() is None, "the copy of the earlier step is still there"
            error = torch.ones(2, 2)
            self.latest = weakref.ref(error)
            return {"errors": {"weight": error}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("no step is repeated")

    module, state, snapshot = torch.nn.Linear(2, 2), State(), None
    for _ in range(3):
        snapshot = StepSnapshot(module, hook_state=state, earlier=snapshot)
    assert state.latest() is not None
