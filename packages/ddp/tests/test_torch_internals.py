"""What ddp uses of torch without a promise: each with what happens in a torch that does not have it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import MisuseError
from syncline.ddp import DistributedDataParallel, SyncBatchNorm, torch_internals
from syncline.ddp.low_precision import LowPrecision
from syncline.ddp.module_state import ModuleState
from syncline.ddp.torch_internals import IN_BACKWARD_OPTIMIZERS, check_low_precision, own_modules


def low_precision(module: torch.nn.Module) -> LowPrecision:
    return LowPrecision(ModuleState(module), torch.bfloat16)


def test_this_torch_has_all_of_it() -> None:
    """Were one missing, the tests of what it is for would test what happens without it."""
    check_low_precision([torch.nn.LSTM(2, 2), torch.nn.Linear(2, 2)])
    assert own_modules(torch.nn.Sequential(torch.nn.ReLU())).keys() == {"0"}


def test_torch_marks_parameters_with_that_name() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = torch.nn.Parameter(torch.ones(2))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert hasattr(parameter, IN_BACKWARD_OPTIMIZERS)


def test_torch_tells_the_threads_of_its_gloo_and_of_no_other_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
        assert ddp.logging_data()["gloo_num_threads"] == torch_internals.gloo_threads(dist.group.WORLD) == 2
    finally:
        dist.destroy_process_group()
    assert torch_internals.gloo_threads(object()) is None


@pytest.mark.parametrize(
    ("private", "name"), [("_queue_callback", "queue_callback"), ("_cast_forward_inputs", "_cast_forward_inputs")]
)
def test_without_it_low_precision_is_an_error(private: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, private, None)
    with pytest.raises(MisuseError, match=rf"which lacks {name}; use torch.autocast"):
        low_precision(torch.nn.Linear(2, 2))


def test_without_flat_weights_recurrent_layers_in_low_precision_are_an_error() -> None:
    layer = torch.nn.LSTM(2, 2)
    del layer._flat_weights_names
    with pytest.raises(MisuseError, match=r"which lacks RNNBase\._flat_weights"):
        low_precision(torch.nn.Sequential(layer))


def test_without_modules_layers_cannot_be_replaced() -> None:
    with pytest.raises(MisuseError, match=r"which lacks Module\._modules"):
        own_modules(object())  # type: ignore[arg-type]
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2)), SyncBatchNorm)


class OneAtATime:
    """torch 2.6's: it takes one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._context = torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


@pytest.mark.parametrize("at_once", [True, False])
def test_changes_of_all_tensors_stay_unseen(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(torch_internals, "_preserve", OneAtATime)
        monkeypatch.setattr(torch_internals, "_PRESERVES_SEVERAL", False)
    tensors = [torch.zeros(2), torch.zeros(3)]
    with torch_internals.preserve_versions(tensors):
        for tensor in tensors:
            tensor.add_(1)
    assert [tensor._version for tensor in tensors] == [0, 0]


def test_without_it_autograd_sees_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_preserve", None)
    tensor = torch.zeros(2)
    with torch_internals.preserve_versions([tensor]):
        tensor.add_(1)
    assert tensor._version == 1


def test_inputs_are_moved_unless_this_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, kwargs = (torch.ones(2), 3), {"mask": torch.ones(1)}
    moved, moved_kwargs = torch_internals.moved_to(torch.device("meta"), inputs, kwargs)
    assert moved[0].is_meta
    assert moved[1] == 3
    assert moved_kwargs["mask"].is_meta
    monkeypatch.setattr(torch_internals, "_to_kwargs", None)
    assert torch_internals.moved_to(torch.device("meta"), inputs, kwargs) == (inputs, kwargs)


def test_tensors_of_functional_call_are_found_unless_this_torch_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found.append(torch_internals.given_to_functional_call())
            return super().forward(inputs)

    found: list[set[int]] = []
    layer, bias = Asking(2, 1), torch.zeros(1)
    torch.func.functional_call(layer, {"bias": bias}, (torch.ones(2),))
    layer(torch.ones(2))
    monkeypatch.setattr(torch_internals, "_functional_call", None)
    torch.func.functional_call(layer, {"bias": bias}, (torch.ones(2),))
    assert found == [{id(bias)}, set(), set()]
