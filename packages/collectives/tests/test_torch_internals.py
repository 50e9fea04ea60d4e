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
from syncline.collectives.tensors.checks import no_memory
from syncline.collectives.torch_bridge.torch_work import TorchRequest
from syncline.collectives.torch_internals import copy_each, premul_factor, rendezvous_handler, source_rank


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
    assert hasattr(dist.Work, "_source_rank")
    assert premul_factor(dist._make_nccl_premul_sum(2.5)) == 2.5


def test_this_torch_tells_what_a_tensor_stands_for() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    tensor, seen = torch.ones(2), []
    with FakeTensorMode():
        fake = torch.ones(2)
    torch.vmap(lambda row: seen.append(torch_internals.is_functorch_wrapped(row)) or row)(torch.ones(2, 3))
    assert seen == [True]
    assert not torch_internals.is_functorch_wrapped(tensor)
    assert torch_internals.awaited_value(AsyncCollectiveTensor(tensor)) is not None
    assert torch_internals.awaited_value(tensor) is None
    assert (torch_internals.is_fake(fake), torch_internals.is_fake(tensor)) == (True, False)


def test_this_torch_tells_who_watches() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        """Passes calls on."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    found = []

    def look() -> None:
        found.append((torch_internals.modes_active(), torch_internals.is_traced()))

    look()
    with Watching():
        look()
        with torch_internals.modes_switched_off():
            look()
    make_fx(lambda tensor: look() or tensor)(torch.ones(2))
    assert found == [(0, False), (1, False), (0, False), (1, True)]


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


def test_without_names_for_them_tensors_are_refused_as_what_they_are(
    probed_again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import _functional_collectives
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    waiting = AsyncCollectiveTensor(torch.ones(2))
    with monkeypatch.context() as without:
        without.setattr(torch._C, "_functorch", SimpleNamespace())
        without.delattr(torch._C, "_len_torch_dispatch_stack")
        without.delattr(torch.utils._python_dispatch, "_disable_current_modes")
        without.delattr(_functional_collectives, "AsyncCollectiveTensor")
        probed = probed_again()
        assert probed.awaited_value(waiting) is None
        assert not probed.is_functorch_wrapped(torch.ones(2))
        assert probed.modes_active() == 0
        with probed.modes_switched_off():
            pass
    assert "found AsyncCollectiveTensor, whose values lie elsewhere" in str(no_memory(waiting))


def test_without_foreach_copy_each_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_foreach_copy", None)
    sources = [torch.arange(3.0), torch.full((2, 2), 7.0)]
    destinations = [torch.zeros(3), torch.zeros(2, 2)]
    copy_each(sources, destinations)
    assert all(map(torch.equal, sources, destinations))


def test_copies_of_unusual_types_are_not_left_to_foreach_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it refuses them."""

    def as_on_cuda(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if any(tensor.dtype == torch.uint16 for tensor in destinations):
            raise NotImplementedError("\"foreach_tensor_copy\" not implemented for 'UInt16'")
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source)

    monkeypatch.setattr(torch_internals, "_foreach_copy", as_on_cuda)
    for dtype in (torch.float32, torch.uint16):
        sources = [torch.full((3,), 7, dtype=dtype), torch.full((2, 2), 9, dtype=dtype)]
        destinations = [torch.zeros(3, dtype=dtype), torch.zeros(2, 2, dtype=dtype)]
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


def test_without_them_a_store_of_torchs_is_its_own_clone() -> None:
    """The stores of torch 2.6."""
    old = SimpleNamespace()
    assert torch_internals.clone_of_store(old) is old


def test_without_its_table_no_rendezvous_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous_handler("env") is not None
    assert rendezvous_handler("unknown") is None
    monkeypatch.delattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers")
    assert rendezvous_handler("env") is None
