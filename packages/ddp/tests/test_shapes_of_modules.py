"""Modules, inputs, outputs and states of all shapes, against local training on the whole batch."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import MisuseError, ProcessGroup, destroy_process_group, init_process_group
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel

pytestmark = pytest.mark.ranks
GRAPHS: dict[str, dict[str, bool]] = {
    "complete": {},
    "unused allowed": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class Named(NamedTuple):
    first: torch.Tensor
    rest: dict[str, Any]


@dataclass
class Fields:
    first: torch.Tensor
    note: str
    rest: list[torch.Tensor]


class Heads(torch.nn.Module):
    """Takes nested inputs, and returns what it is told to make of two heads' outputs."""

    def __init__(self, shape: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(4, 5).double()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(5, 2).double() for _ in range(2))
        self.shape = shape

    def forward(self, inputs: dict[str, list[torch.Tensor]], *, scale: tuple[float, None] = (1.0, None)) -> Any:
        hidden = torch.tanh(self.trunk(inputs["inputs"][0])) * scale[0]
        return self.shape(self.heads[0](hidden), self.heads[1](hidden))


SHAPES: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda a, b: (a, (b, None)), lambda out: out[0].sum() + out[1][0].square().sum()),
    "named tuple": (lambda a, b: Named(a, {"b": [b]}), lambda out: out.first.sum() + out.rest["b"][0].square().sum()),
    "dataclass": (lambda a, b: Fields(a, "x", [b, b]), lambda out: out.first.sum() + out.rest[1].square().sum()),
    "mapping": (lambda a, b: {"a": {"b": b}, "c": [a, 3]}, lambda out: out["c"][0].sum() + out["a"]["b"].square().sum()),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_inputs_may_be_nested(shape: str, graph: str) -> None:
    make, loss_of = SHAPES[shape]
    torch.manual_seed(0)
    initial = Heads(make)

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = DistributedDataParallel(copy.deepcopy(initial), process_group=group, **GRAPHS[graph])
        for _ in range(2):
            model.zero_grad()
            output = model({"inputs": [batch(group.rank)]}, scale=(2.0, None))
            assert type(output) is type(make(batch(0), batch(0)))
            loss_of(output).backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    whole = copy.deepcopy(initial)
    loss_of(whole({"inputs": [torch.cat([batch(0), batch(1)])]}, scale=(2.0, None))).div(2).backward()
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, [parameter.grad for parameter in whole.parameters()])


class Tied(torch.nn.Module):
    """A weight in two layers, a frozen layer between them, and parameters that each rank keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.frozen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        self.decode, self.own = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.decode.weight = self.encode.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.decode(self.own(self.frozen(torch.tanh(self.encode(inputs)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("graph", GRAPHS)
def test_shared_frozen_and_ignored_parameters(graph: str) -> None:
    torch.manual_seed(0)
    initial = Tied().double()
    averaged = ["encode.weight", "encode.bias", "decode.bias"]

    def body(group: ProcessGroup) -> dict[str, torch.Tensor | None]:
        module = copy.deepcopy(initial)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "own.bias"])
        model = DistributedDataParallel(module, process_group=group, **GRAPHS[graph])
        assert list(model._reducer.names) == averaged
        for _ in range(2):
            model.zero_grad()
            model(batch(group.rank)).square().sum().backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    whole, alone = copy.deepcopy(initial), [copy.deepcopy(initial) for _ in range(2)]
    whole(torch.cat([batch(0), batch(1)])).square().sum().div(2).backward()
    for rank, found in enumerate(run_ranks(2, body)):
        alone[rank](batch(rank)).square().sum().backward()
        for name, gradient in found.items():
            oracle = whole if name in averaged else alone[rank]
            expected = oracle.get_parameter(name).grad
            assert (gradient is None) == (expected is None) == name.startswith("frozen")
            if gradient is not None:
                torch.testing.assert_close(gradient, expected)


def test_a_shared_parameter_is_averaged_if_one_of_its_names_is_not_ignored() -> None:
    """As torch does."""
    torch.manual_seed(0)
    initial = Tied().double()

    def body(group: ProcessGroup) -> list[torch.Tensor | None]:
        module = copy.deepcopy(initial)
        with torch.no_grad():
            module.encode.weight.add_(group.rank)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["encode.weight", "own.weight", "own.bias"])
        model = DistributedDataParallel(module, process_group=group)
        assert list(model._reducer.names) == ["encode.bias", "decode.weight", "decode.bias"]
        torch.testing.assert_close(module.encode.weight, initial.encode.weight)
        model(batch(group.rank)).square().sum().backward()
        return [module.encode.weight.grad, module.own.weight.grad]

    whole = copy.deepcopy(initial)
    whole(torch.cat([batch(0), batch(1)])).square().sum().div(2).backward()
    (shared, own), (shared_1, own_1) = run_ranks(2, body)
    torch.testing.assert_close(shared, whole.encode.weight.grad)
    torch.testing.assert_close(shared_1, whole.encode.weight.grad)
    assert not torch.equal(own, own_1)


def test_a_module_of_which_everything_is_ignored_has_nothing_to_average() -> None:
    def body(group: ProcessGroup) -> None:
        module = torch.nn.Linear(2, 2)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
        with pytest.raises(MisuseError, match="no parameter of the module requires a gradient"):
            DistributedDataParallel(module, process_group=group)

    run_ranks(1, body)


# ---- states ----


def test_a_state_dict_travels_with_and_without_the_prefix() -> None:
    def body(group: ProcessGroup) -> None:
        torch_names = list(torch.nn.Linear(4, 2).state_dict())
        source, target = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        model = DistributedDataParallel(source, process_group=group)
        assert list(model.state_dict()) == [f"module.{name}" for name in torch_names]
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        saved.seek(0)
        loaded = torch.load(saved)
        target.load_state_dict(model.module.state_dict())  # without: the wrapped module's own
        wrapped = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
        wrapped.load_state_dict(loaded)
        torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(loaded, "module.")
        bare = torch.nn.Linear(4, 2)
        bare.load_state_dict(loaded)
        for other in (target, wrapped.module, bare):
            assert torch.equal(other.weight, source.weight)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"Missing key.*module\.weight"):
            wrapped.load_state_dict(source.state_dict())

    run_ranks(2, body)


def test_the_names_in_a_state_are_native_ddps() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        native, ours = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(module)), DistributedDataParallel(module)
        assert list(native.state_dict()) == list(ours.state_dict())
        assert [name for name, _ in native.named_parameters()] == [name for name, _ in ours.named_parameters()]
        assert [name for name, _ in native.named_buffers()] == [name for name, _ in ours.named_buffers()]
        ours.load_state_dict(native.state_dict())
    finally:
        dist.destroy_process_group()


def test_what_a_copy_takes_along() -> None:
    """Arguments, fused optimizers' state and buffers' staleness; not a hook, and not a join context."""
    init_process_group("in_process", world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(4).double(), forward_sync_buffers=False, static_graph=True)
        model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        output = model(batch(0))  # its graph is open while the model is copied
        model._buffer_sync.note_modes(object(), 0)  # nor does a copy remember a forward with unknown outputs
        with model.join():
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert not twin._buffer_sync._open_forwards
            assert not twin._buffer_sync._modes_without_graph
            assert (twin.forward_sync_buffers, twin.static_graph) == (False, True)
            twin.require_backward_grad_sync = True
            with twin.join():
                twin(batch(0)).sum().backward()
            assert twin.module.bias.grad.tolist() == [3.0] * 4
            assert model.module.bias.grad is None  # type: ignore[union-attr]
        assert output.requires_grad
    finally:
        destroy_process_group()


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_copy_on_a_group_of_ones_own_is_refused(how: Callable[[Any], object]) -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        with pytest.raises(MisuseError, match=r"cannot be copied or pickled.*save ddp\.module \(or its state_dict\)"):
            how(model)

    run_ranks(1, body)
