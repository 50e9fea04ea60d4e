"""What a step changes before it is applied, put back."""

from __future__ import annotations

import torch

from syncline.ddp.step_snapshot import StepSnapshot, holders_of_buffers


def test_buffers_random_state_and_gradients_are_those_before() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout())
    holders = holders_of_buffers(module)
    assert holders == [module[1]]
    snapshot = StepSnapshot(module, holders)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first = module(torch.ones(4, 2))
    first.sum().backward()
    snapshot.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(module(torch.ones(4, 2)), first)  # dropout drops the same again


def test_a_buffer_that_was_replaced_is_the_one_before() -> None:
    module = torch.nn.Module()
    module.register_buffer("count", torch.zeros(1))
    kept = module.count
    snapshot = StepSnapshot(module, holders_of_buffers(module))
    module.count = module.count + 1
    snapshot.restore()
    assert module.count is kept
    assert module.count == 0


def test_a_buffer_whose_elements_are_repeated_is_put_back() -> None:
    module = torch.nn.Module()
    row = torch.arange(3.0)
    module.register_buffer("mask", row.expand(2, 3))
    snapshot = StepSnapshot(module, holders_of_buffers(module))
    row.zero_()
    snapshot.restore()
    assert module.mask.tolist() == [[0, 1, 2]] * 2
    assert module.mask.stride() == (0, 1)
