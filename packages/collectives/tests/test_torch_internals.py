"""What the collectives use of torch without a promise: each with what happens in a torch that does not have it."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, TransportError, torch_internals
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.reduce_op import checked_reduction, from_torch
from syncline.collectives.tensors import checks
from syncline.collectives.tensors.checks import is_simple
from syncline.collectives.torch_bridge.torch_work import TorchRequest
from syncline.collectives.torch_internals import copy_each, premul_factor, source_rank


@pytest.fixture
def probed_again() -> Iterator[Any]:
    """Runs the module in the torch that there is now, under another name."""

    def probe() -> ModuleType:
        spec = importlib.util.spec_from_file_location("syncline.collectives.probed_again", torch_internals.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return probe


# ---- what is there ----


def test_this_torch_has_all_of_it() -> None:
    """Were one missing, the tests of what it is for would test what happens without it."""
    assert torch_internals.eval_frame is not None
    assert torch_internals._foreach_copy is not None
    assert hasattr(torch.Tensor, "_is_zerotensor")
    assert not torch_internals.is_zero_tensor(torch.zeros(2))
    assert torch_internals.is_zero_tensor(torch._efficientzerotensor(2))
    assert hasattr(dist.Work, "_source_rank")
    assert premul_factor(dist._make_nccl_premul_sum(2.5)) == 2.5


def test_importing_does_not_load_torch_compile(python: list[str]) -> None:
    script = "import sys, syncline.collectives; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([*python, "-c", script], check=False).returncode == 0


# ---- what happens without it ----


@pytest.mark.parametrize("lacks", ["set_eval_frame", "set_code_exec_strategy", "everything"])
def test_without_eval_frame_torch_compiler_disables(lacks: str, probed_again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"set_eval_frame", "set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"} - {lacks}
    there = {} if lacks == "everything" else dict.fromkeys(names, None)
    asked: list[dict[str, Any]] = []

    def disable(function: Any, **options: Any) -> Any:
        asked.append(options)
        return function

    monkeypatch.setattr(torch._C, "_dynamo", SimpleNamespace(eval_frame=SimpleNamespace(**there)))
    monkeypatch.setattr(torch.compiler, "disable", disable)
    module = probed_again()
    assert module.eval_frame is None
    assert module.disable_dynamo(abs)(-3) == 3
    assert module.disable_dynamo_here(abs)(-4) == 4
    assert asked == [{}, {"recursive": False}]


def test_without_is_zerotensor_no_tensor_is_simple(probed_again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_simple(torch.ones(2))
    with monkeypatch.context() as without:
        without.setattr(torch, "Tensor", SimpleNamespace())
        probed = probed_again()
    monkeypatch.setattr(checks, "is_zero_tensor", probed.is_zero_tensor)
    assert not is_simple(torch.ones(2))


def test_without_foreach_copy_each_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_foreach_copy", None)
    sources = [torch.arange(3.0), torch.full((2, 2), 7.0)]
    destinations = [torch.zeros(3), torch.zeros(2, 2)]
    copy_each(sources, destinations)
    assert all(map(torch.equal, sources, destinations))


class Received:
    """A receive of torch.distributed that is over, in a torch that does not say who sent."""

    def wait(self, timeout: Any) -> bool:
        return timeout is not None


def test_without_source_rank_a_receive_from_any_rank_is_an_error() -> None:
    with pytest.raises(TransportError, match=r"does not say which rank a message came from; pass the sender"):
        source_rank(Received())
    request = TorchRequest(Received(), torch.empty(1), receives=True)
    with pytest.raises(TransportError, match="pass the sender"):
        request.wait(CancelScope(1.0))


def test_without_source_rank_a_receive_from_a_named_rank_works() -> None:
    request = TorchRequest(Received(), torch.empty(1), receives=True, source=3)
    request.wait(CancelScope(1.0))
    assert request.source() == 3


def test_without_the_state_of_a_premul_sum_it_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    op = dist._make_nccl_premul_sum(2.5)
    monkeypatch.delattr(dist.ReduceOp, "__getstate__")
    assert from_torch(op) is None
    with pytest.raises(InvalidArgumentError):
        checked_reduction(op, torch.float32)
