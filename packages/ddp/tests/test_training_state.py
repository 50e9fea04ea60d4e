"""What a newcomer gets of a training that others have begun."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from syncline.collectives.transports.threads import create_groups
from syncline.ddp import DistributedDataParallel, ElasticSampler
from syncline.ddp.training_state import HookState, TrainingState, load_optimizer_state


class Rank:
    """A model with all that a training has, and the steps that it has taken."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module.register_buffer("scale", torch.rand(4), persistent=False)
        module.register_buffer("mask", torch.rand(1, 4).expand(2, 4), persistent=False)
        self.model = DistributedDataParallel(module, process_group=create_groups(1)[0])
        self.optimizer = torch.optim.Adam(module.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.sampler = ElasticSampler(20, 5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.sampler.advance()

    def state(self) -> TrainingState:
        return TrainingState(self.model, [self.optimizer], self.sampler, [self.scheduler])


def test_both_go_on_with_the_same_bits() -> None:
    old, new = Rank(1), Rank(2)
    for _ in range(3):
        old.step()
    new.state().load(pickle.loads(pickle.dumps(old.state().collect())))
    drawn = torch.get_rng_state()
    old.step()
    torch.set_rng_state(drawn)
    new.step()
    for mine, others in zip(old.model.state_dict().values(), new.model.state_dict().values(), strict=True):
        assert torch.equal(mine, others)
    assert torch.equal(old.model.module.scale, new.model.module.scale)  # type: ignore[arg-type]
    assert torch.equal(old.model.module.mask, new.model.module.mask)  # type: ignore[arg-type]
    assert (new.sampler.epoch, new.sampler.applied) == (0, 4)
    assert old.scheduler.get_last_lr() == new.scheduler.get_last_lr() == [0.001 * 0.5**4]


@pytest.mark.parametrize(
    ("kind", "dtype"), [(torch.optim.NAdam, torch.float64), (torch.optim.ASGD, torch.bfloat16), (torch.optim.Adam, torch.half)]
)
def test_an_optimizers_state_keeps_its_dtypes_and_bits(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(4)]
    old = kind([{"params": parameters[:1]}, {"params": parameters[1:2]}])
    new = kind([{"params": parameters[2:3]}, {"params": parameters[3:]}])
    for step in range(2):
        for index, parameter in enumerate(parameters[:2]):
            parameter.grad = torch.full_like(parameter, 1.0 + index + step)
        old.step()
    saved = old.state_dict()
    load_optimizer_state(new, pickle.loads(pickle.dumps(saved)))
    loaded = new.state_dict()
    assert loaded["state"].keys() == saved["state"].keys() == {0, 1}
    for number, its in saved["state"].items():
        for key, value in its.items():
            found = loaded["state"][number][key]
            if isinstance(value, torch.Tensor):
                assert found.dtype is value.dtype, key
                assert torch.equal(found, value), key
            else:
                assert found == value, key


class Nested(torch.optim.Optimizer):
    """Keeps its state in a dict and a list, in other dtypes than the parameters."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            sums = torch.full((3,), 0.3001)
            self.state[parameter] = {
                "kron": {"sums": sums, "steps": torch.tensor(257), "more": [sums * 3, (sums.double(),)]},
                "same": parameter.detach() + 1,
            }


def test_an_optimizers_nested_state_keeps_its_dtypes_and_bits() -> None:
    old, new = (Nested(torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) for _ in range(2))
    old.step()
    load_optimizer_state(new, pickle.loads(pickle.dumps(old.state_dict())))
    torch.testing.assert_close(new.state_dict()["state"], old.state_dict()["state"], rtol=0, atol=0)


class Expanded(torch.nn.Module):
    """The elements of each tensor are all the same, in one place of memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.BatchNorm1d(2)
        self.frozen = torch.nn.Parameter(self.filled(value), requires_grad=False)
        self.register_buffer("kept", self.filled(value + 1))
        self.register_buffer("temporary", self.filled(value + 2), persistent=False)

    @staticmethod
    def filled(value: float) -> torch.Tensor:
        return torch.full((2, 1), value).expand(2, 4)


def stateful_of(module: torch.nn.Module) -> TrainingState:
    return TrainingState(DistributedDataParallel(module, process_group=create_groups(1)[0]), [], ElasticSampler(20, 5))


@pytest.mark.parametrize("full_on", [set(), {"old"}, {"new"}])
def test_expanded_tensors_are_taken_over_with_their_strides(full_on: set[str]) -> None:
    """A rank may have put full buffers in the place of expanded buffers."""
    old, new = Expanded(1.0), Expanded(5.0)
    for name, module in (("old", old), ("new", new)):
        if name in full_on:
            module.kept, module.temporary = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4) + 1
    stateful_of(new).load(pickle.loads(pickle.dumps(stateful_of(old).collect())))
    for name in ("frozen", "kept", "temporary"):
        mine, others = getattr(new, name), getattr(old, name)
        assert torch.equal(mine, others), name
        assert mine.stride() == others.stride(), name
    assert new.state_dict().keys() == old.state_dict().keys()


def test_buffers_that_a_forward_has_made_or_made_larger_are_taken_over() -> None:
    old, new = Rank(1), Rank(2)
    for rank in (old, new):
        rank.model.module.register_buffer("late", None)
        rank.model.module.register_buffer("largest", torch.zeros(1))
    old.model.module.late = torch.tensor([7.0])
    old.model.module.largest = torch.tensor([1.0, 2.0])
    old.model.module.register_buffer("scale", torch.arange(9, dtype=torch.int64), persistent=False)
    old.model.module[1].register_buffer("cache", torch.tensor([3.0]), persistent=False)
    new.state().load(pickle.loads(pickle.dumps(old.state().collect())))
    assert new.model.state_dict().keys() == old.model.state_dict().keys()
    for name, buffer in old.model.module.named_buffers():
        found = new.model.module.get_buffer(name)
        assert found.dtype is buffer.dtype
        assert torch.equal(found, buffer)


def test_the_random_state_is_that_of_the_other() -> None:
    old, new = Rank(1), Rank(2)
    torch.manual_seed(7)
    state = old.state().collect()
    expected = torch.rand(3)
    new.state().load(state)
    assert torch.equal(torch.rand(3), expected)


class Remembering:
    """A hook's state; `saved` is all of it."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.saved = saved

    def state_dict(self) -> dict[str, Any]:
        return self.saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


def compressing(steps: int, rank: int, *errors: float) -> dict[str, Any]:
    kept = {"weight": torch.tensor(errors)} if errors else {}
    return {"kind": "x", "iter": steps, "rank": rank, "world_size": 2, "errors": kept}


def test_what_a_hook_remembers_is_that_of_the_other_and_errors_stay() -> None:
    old, new = Remembering(compressing(5, 0, 1.0, 2.0)), Remembering(compressing(4, 1, 3.0, 4.0))
    HookState(new).load(pickle.loads(pickle.dumps(HookState(old).collect())))
    assert new.saved["iter"] == 5
    assert new.saved["rank"] is new.saved["world_size"] is None
    assert new.saved["errors"]["weight"].tolist() == [3.0, 4.0]
    assert old.saved["errors"]["weight"].tolist() == [1.0, 2.0]


def test_errors_of_the_hooks_of_a_schedule_stay_and_begin_at_zero_where_there_are_none() -> None:
    old = Remembering({"kind": "schedule", "iter": 7, "states": {"1": compressing(5, 0, 1.0)}})
    new = Remembering({"kind": "schedule", "iter": 6, "states": {"1": compressing(4, 1, 3.0)}})
    newcomer = Remembering({"kind": "schedule", "iter": 0, "states": {"1": compressing(0, 0)}})
    for state, errors in ((new, {"weight": torch.tensor([3.0])}), (newcomer, {})):
        HookState(state).load(HookState(old).collect())
        assert state.saved["iter"] == 7
        its = state.saved["states"]["1"]
        assert (its["iter"], its["rank"], its["world_size"], its["errors"]) == (5, None, None, errors)


def test_a_state_that_cannot_be_saved_is_left_alone() -> None:
    assert not HookState(None).can_be_saved
    assert not HookState([1]).can_be_saved
    assert HookState(Remembering({})).can_be_saved
