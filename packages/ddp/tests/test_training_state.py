"""What a newcomer gets of a training that others have begun."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from syncline.collectives.backends.in_process import create_groups
from syncline.ddp import DistributedDataParallel, ElasticSampler
from syncline.ddp.training_state import TrainingState


class HookState:
    """Remembers as PowerSGD's does, and averages."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {"iter": 0, "rank": 1, "world_size": 2, "errors": {"weight": torch.zeros(2)}}

    def state_dict(self) -> dict[str, Any]:
        return self.saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


def average(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Rank:
    """A model with all that a training has, and the steps that it has taken."""

    def __init__(self, seed: int, hook: HookState | None) -> None:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module.register_buffer("scale", torch.rand(4), persistent=False)
        self.model = DistributedDataParallel(module, process_group=create_groups(1)[0])
        if hook is not None:
            self.model.register_comm_hook(hook, average)
        self.optimizer = torch.optim.Adam(module.parameters())
        self.sampler = ElasticSampler(20, 5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.sampler.advance()

    def state(self) -> TrainingState:
        return TrainingState(self.model, [self.optimizer], self.sampler)


@pytest.mark.parametrize("hooked", [False, True])
def test_both_go_on_with_the_same_bits(hooked: bool) -> None:
    hook, its = (HookState(), HookState()) if hooked else (None, None)
    old, new = Rank(1, hook), Rank(2, its)
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
    assert new.sampler.state_dict() == {"epoch": 0, "applied": 4}


def test_the_random_state_is_that_of_the_other() -> None:
    old, new = Rank(1, None), Rank(2, None)
    torch.manual_seed(7)
    state = old.state().collect()
    expected = torch.rand(3)
    new.state().load(state)
    assert torch.equal(torch.rand(3), expected)


def test_what_error_feedback_has_kept_begins_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="syncline.ddp")
    hook, its = HookState(), HookState()
    hook.saved = {"iter": 5, "rank": 0, "world_size": 2, "errors": {"weight": torch.ones(2)}}
    old, new = Rank(1, hook), Rank(2, its)
    new.state().load(pickle.loads(pickle.dumps(old.state().collect())))
    assert its.saved["iter"] == 5
    assert its.saved["rank"] is its.saved["world_size"] is None
    assert torch.equal(its.saved["errors"]["weight"], torch.zeros(2))
    assert torch.equal(hook.saved["errors"]["weight"], torch.ones(2))  # the other keeps its own
    assert "begins at zero" in caplog.text
