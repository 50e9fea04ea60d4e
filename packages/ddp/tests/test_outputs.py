"""The tensors in a forward's outputs, and backwards from whatever a forward returns or keeps."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.outputs import tensors_in

pytestmark = pytest.mark.ranks

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    """As models return it."""

    first: object
    second: object = None


class Opaque:
    """Nobody can see into it."""

    def __init__(self, first: object, second: object) -> None:
        self.first, self.second = first, second


SHAPES: dict[str, Callable[[object, object], Any]] = {
    "tuple": lambda a, b: (a, b),
    "named tuple": Pair,
    "list": lambda a, b: [a, [b]],
    "dictionary": lambda a, b: {"a": a, 1: b},
    "ordered dictionary": lambda a, b: OrderedDict(a=a, b=b),
    "set": lambda a, b: {a, b},
    "dataclass": Record,
    "nested": lambda a, b: {"deep": [(Record({"a": a}, None), "text", 3)], "b": frozenset([b])},
}


# ---- what is found ----


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_tensors_are_found_in_containers(shape: Callable[[object, object], object]) -> None:
    a, b = torch.ones(1), torch.ones(1)
    assert sorted(map(id, tensors_in(shape(a, b)))) == sorted([id(a), id(b)])


def test_one_tensor_is_found_as_it_is() -> None:
    tensor = torch.ones(1)
    assert [id(found) for found in tensors_in(tensor)] == [id(tensor)]


@pytest.mark.parametrize(
    "outputs", [None, 3, 2.5, True, "text", b"", (), {}, [torch.float32, torch.device("cpu"), torch.Size([1])]]
)
def test_plain_values_hold_no_tensors(outputs: object) -> None:
    assert tensors_in(outputs) == []


@pytest.mark.parametrize("outputs", [Record, Opaque(torch.ones(1), None), iter([torch.ones(1)]), torch.nn.Linear(1, 1)])
def test_other_objects_are_not_looked_into(outputs: object) -> None:
    assert tensors_in(outputs) == []
    tensor = torch.ones(1)
    assert [id(found) for found in tensors_in([tensor, {"other": outputs}])] == [id(tensor)]


class Derived(dict[str, object]):
    """With an attribute besides."""


def test_tensors_are_found_in_attributes_of_derived_containers() -> None:
    a, b = torch.ones(1), torch.ones(1)
    outputs = Derived(a=a)
    outputs.other = [b]  # type: ignore[attr-defined]
    assert {id(found) for found in tensors_in(outputs)} == {id(a), id(b)}


def test_tensors_are_found_in_attributes_of_tensors() -> None:
    a, b = torch.ones(1), torch.ones(1)
    a.other = b  # type: ignore[attr-defined]
    assert {id(found) for found in tensors_in((a,))} == {id(a), id(b)}


@dataclasses.dataclass
class Unfinished:
    """The training loop adds the loss."""

    first: torch.Tensor
    loss: torch.Tensor = dataclasses.field(init=False)


def test_a_dataclass_may_have_a_field_that_is_not_set_yet() -> None:
    tensor = torch.ones(1)
    assert [id(found) for found in tensors_in(Unfinished(tensor))] == [id(tensor)]


def test_generators_are_not_used_up() -> None:
    """A generator stays as it is for its user."""
    outputs = iter([torch.ones(1)])
    list(tensors_in([outputs]))
    assert len(list(outputs)) == 1


def test_containers_may_hold_themselves() -> None:
    a = torch.ones(1)
    outputs: list[object] = [a]
    outputs.append(outputs)
    record = Record(outputs)
    record.second = record
    assert [id(found) for found in tensors_in(record)] == [id(a)]


# ---- backwards from them ----


class TwoHeads(torch.nn.Module):
    """Two outputs in a container; each head has three layers, and they share one."""

    def __init__(self, shape: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.shape = shape
        self.trunk = torch.nn.Linear(2, 3, dtype=torch.float64)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(3, 2, dtype=torch.float64) for _ in range(2))
        for seed, parameter in enumerate(self.parameters()):
            torch.nn.init.uniform_(parameter, -1, 1, generator=torch.Generator().manual_seed(seed))

    def forward(self, inputs: torch.Tensor) -> object:
        features = self.trunk(inputs).tanh()
        return self.shape(*(head(features) for head in self.heads))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def losses(outputs: object) -> Iterator[torch.Tensor]:
    """Of each head, whatever the container."""
    if isinstance(outputs, Opaque):
        outputs = (outputs.first, outputs.second)
    return (tensor.square().sum() for tensor in tensors_in(outputs))


def averages(
    make: Callable[[], torch.nn.Module], step: int, loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
) -> Any:
    """What two ranks should have."""
    model = make()
    for rank in range(2):
        (loss(model, batch(rank, step)) / 2).backward()
    return [parameter.grad for parameter in model.parameters()]


def check(
    make: Callable[[], torch.nn.Module],
    loss: Loss,
    *,
    steps: int = 4,
    **options: Any,
) -> None:
    """Train on two ranks, and compare gradients with those of one process."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(make(), process_group=group, bucket_cap_mb=1e-4, **options)
        for step in range(steps):
            model.zero_grad()
            loss(model, batch(group.rank, step)).backward()  # type: ignore[no-untyped-call]
            for parameter, wanted in zip(model.parameters(), averages(make, step, loss), strict=True):
                torch.testing.assert_close(parameter.grad, wanted)

    run_ranks(2, body)


KINDS = {"complete": {}, "find-unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_backwards_from_outputs_in_containers_are_averaged(
    shape: Callable[[object, object], object], options: dict[str, bool]
) -> None:
    check(lambda: TwoHeads(shape), lambda model, inputs: torch.stack(list(losses(model(inputs)))).sum(), **options)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_backwards_from_outputs_in_other_objects_are_averaged(options: dict[str, bool]) -> None:
    check(
        lambda: TwoHeads(Opaque),
        lambda model, inputs: torch.stack(list(losses(model(inputs)))).sum(),
        **options,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_loss_of_one_output_is_averaged_after_the_rebuild(shape: Callable[[object, object], object]) -> None:
    """Of another output on each rank."""

    def body(group: ProcessGroup) -> None:
        def loss(model: torch.nn.Module, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
            first, second = sorted(tensors_in(model(inputs)), key=lambda tensor: tensor.sum().item())
            if step < 3:
                return first.square().sum() + second.square().sum()
            return (first if (step + rank) % 2 else second).square().sum()

        model = DistributedDataParallel(TwoHeads(shape), process_group=group, find_unused_parameters=True)
        for step in range(6):
            model.zero_grad()
            loss(model, batch(group.rank, step), group.rank, step).backward()  # type: ignore[no-untyped-call]
            local = TwoHeads(shape)
            for rank in range(2):
                (loss(local, batch(rank, step), rank, step) / 2).backward()  # type: ignore[no-untyped-call]
            for parameter, wanted in zip(model.parameters(), local.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, wanted.grad)

    run_ranks(2, body)


def test_a_loss_of_a_tensor_in_another_object_is_averaged() -> None:
    """It goes through no tensor that can be found in the outputs."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(
            TwoHeads(lambda a, b: (b, Opaque(a, None))), process_group=group, find_unused_parameters=True
        )
        for step in range(5):
            model.zero_grad()
            first, other = model(batch(group.rank, step))
            if step < 3:
                (first.sum() + other.first.sum()).backward()
                continue
            (other.first.sum() * (group.rank + 1)).backward()
            bias = model.module.heads[0].bias
            assert bias.grad.tolist() == [4.5, 4.5]

    run_ranks(2, body)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("first", [0, 3], ids=["always", "later"])
def test_a_checkpoint_around_the_model_is_averaged(first: int, options: dict[str, bool]) -> None:
    """Its backward runs forward again, before any gradient is there."""

    def loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        model.calls = getattr(model, "calls", 0) + 1  # type: ignore[assignment]
        outputs = checkpoint(model, inputs, use_reentrant=False) if model.calls > first else model(inputs)  # type: ignore[operator]
        return torch.stack(list(losses(outputs))).sum()

    check(lambda: TwoHeads(lambda a, b: (a, b)), loss, steps=6, **options)


class SometimesOpaque(TwoHeads):
    """Most of its forwards return tensors."""

    def __init__(self) -> None:
        super().__init__(lambda a, b: (a, b))

    def forward(self, inputs: torch.Tensor, hides: bool = False) -> object:
        if not hides:
            return super().forward(inputs)
        features = self.trunk(inputs).tanh()
        return self.heads[1](features), Opaque(self.heads[0](features.detach()), None)


def test_a_forward_may_return_other_objects_after_the_first_steps() -> None:
    """A backward goes neither through the tensor that is returned nor to the parameters that others end with."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(SometimesOpaque(), process_group=group, find_unused_parameters=True)
        for step in range(3):
            model.zero_grad()
            torch.stack(list(losses(model(batch(group.rank, step))))).sum().backward()
        model.zero_grad()
        _, hidden = model(batch(group.rank, 3), hides=True)
        (hidden.first.sum() * (group.rank + 1)).backward()
        assert model.module.heads[0].bias.grad.tolist() == [4.5, 4.5]

    run_ranks(2, body)


class ReturnsAParameter(TwoHeads):
    """It returns a parameter as it is; a backward from there goes through no node of the graph."""

    def __init__(self) -> None:
        super().__init__(lambda a, b: (a, b))
        self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> object:
        first, second = super().forward(inputs)  # type: ignore[misc]
        return first * self.scale + self.bias, second, self.scale


def test_a_parameter_may_be_among_the_outputs() -> None:
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(ReturnsAParameter(), process_group=group, find_unused_parameters=True)
        for step in range(6):
            model.zero_grad()
            first, second, scale = model(batch(group.rank, step))
            if step < 3:
                (first.square().sum() + second.square().sum() + scale.sum()).backward()
                continue
            (scale.sum() * (group.rank + 1)).backward()
            assert model.module.scale.grad.tolist() == [1.5, 1.5]
            assert model.module.bias.grad is None

    run_ranks(2, body)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("as_view", [False, True])
def test_a_penalty_on_the_gradients_of_inputs_is_averaged(as_view: bool, options: dict[str, bool]) -> None:
    """`torch.autograd.grad` goes through the outputs, and accumulates nothing."""

    def loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        inputs.requires_grad_()
        total = torch.stack(list(losses(model(inputs)))).sum()
        (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
        return total + slope.square().sum()

    check(lambda: TwoHeads(lambda a, b: (a, b)), loss, gradient_as_bucket_view=as_view, **options)


class FailsToBeRead(dict[str, object]):
    """A container that raises an error when it is looked into."""

    def values(self) -> Any:
        raise LookupError("no values")


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_outputs_are_not_looked_into(options: dict[str, bool]) -> None:
    check(
        lambda: TwoHeads(lambda a, b: FailsToBeRead(a=a, b=b)),
        lambda model, inputs: torch.stack([tensor.square().sum() for tensor in map(model(inputs).__getitem__, "ab")]).sum(),
        **options,
    )


# ---- tensors that a forward keeps aside, gradients that users put there ----


class KeepsAside(torch.nn.Module):
    """Returns a tensor of five scales, and may keep that of one where a training loop finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(1, dtype=torch.float64) for _ in range(5))

    def forward(self, factor: float, aside: int | None = None) -> torch.Tensor:
        scaled = [scale * factor for scale in self.scales]
        self.kept_aside = None if aside is None else scaled.pop(aside)
        return torch.cat(scaled)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("aside", range(5))
def test_a_backward_from_a_tensor_that_forward_kept_aside_is_averaged(as_view: bool, steps: int, aside: int) -> None:
    """It does not go through the outputs; each rank's own gradient is 1 or 2."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(
            KeepsAside(), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=as_view
        )
        for _ in range(steps):
            model.zero_grad()
            model(group.rank + 1.0).sum().backward()
            assert [parameter.grad.tolist() for parameter in model.parameters()] == [[1.5]] * 5
        for _ in range(3):
            model.zero_grad()
            model(group.rank + 1.0, aside)
            model.module.kept_aside.sum().backward()
            found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()]
            assert found == [[1.5] if index == aside else None for index in range(5)]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("aside", range(5))
@pytest.mark.parametrize("options", [KINDS["complete"], KINDS["static"]], ids=["complete", "static"])
def test_a_gradient_that_is_put_there_by_hand_does_not_count_as_computed(
    as_view: bool, steps: int, aside: int, options: dict[str, bool]
) -> None:
    """Backward does not reach its parameter, which is an error by name."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(KeepsAside(), process_group=group, gradient_as_bucket_view=as_view, **options)
        for _ in range(steps):
            model.zero_grad()
            model(group.rank + 1.0).sum().backward()
        model.zero_grad()
        output = model(group.rank + 1.0, aside)
        model.module.scales[aside].grad = torch.full((1,), group.rank + 1.0, dtype=torch.float64)
        with pytest.raises(MisuseError, match=rf"got no gradient in it: 'scales\.{aside}'"):
            output.sum().backward()

    run_ranks(2, body)
