"""Modules that change after they were wrapped: the next forward averages what they have then, or says what differs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

from syncline.collectives import (
    DisagreementError,
    MisuseError,
    ProcessGroup,
    destroy_process_group,
    exchange_objects,
    init_process_group,
)
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel, MixedPrecision, distributed_data_parallel
from syncline.ddp.model_watch import ModelWatch
from syncline.reducer import Reducer

pytestmark = pytest.mark.ranks

LOOK_EVERY = 32

OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]
Change = Callable[[nn.Module, int], None]
"""Changes a module, or its wrapper; new parameters have other values on each rank."""


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def inner(module: nn.Module) -> Any:
    return module.module if isinstance(module, DistributedDataParallel) else module


def linear(inputs: int, outputs: int, rank: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter) / 7 - rank - number
    return layer


_of_torch = threading.Lock()


@contextmanager
def replacing_parameters() -> Iterator[None]:
    """One rank after the other: torch has one switch for all threads."""
    with _of_torch:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)


def assigned_state(module: nn.Module, rank: int) -> None:
    state = {name: tensor * (1 + rank) for name, tensor in inner(module).state_dict().items()}
    inner(module).load_state_dict(state, assign=True)


def one_parameter(module: nn.Module, rank: int) -> None:
    inner(module)[2].weight = nn.Parameter(linear(4, 2, rank).weight.detach().clone())


def another_head(module: nn.Module, rank: int) -> None:
    inner(module)[2] = linear(4, 3, rank)


def one_layer_more(module: nn.Module, rank: int) -> None:
    inner(module).append(linear(2, 2, rank))


class Adapter(nn.Module):
    """A low-rank term beside a frozen layer, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = linear(layer.in_features, 1, rank), linear(1, layer.out_features, rank)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return result


def inserted(module: nn.Module, rank: int) -> None:
    """torch reports no registration of it."""
    inner(module).insert(1, linear(4, 4, rank))


def an_adapter(module: nn.Module, rank: int) -> None:
    inner(module)[0] = Adapter(inner(module)[0], rank)


def weight_norm(module: nn.Module, rank: int) -> None:
    parametrizations.weight_norm(inner(module)[2])


def pruned(module: nn.Module, rank: int) -> None:
    prune.l1_unstructured(inner(module)[2], "weight", amount=0.3)  # type: ignore[no-untyped-call]


def there_and_back(module: nn.Module, rank: int) -> None:
    module.float().double()


def there_and_back_anew(module: nn.Module, rank: int) -> None:
    with replacing_parameters():
        module.float().double()


def another_dtype(module: nn.Module, rank: int) -> None:
    module.float()


def another_module(module: nn.Module, rank: int) -> None:
    if isinstance(module, DistributedDataParallel):
        module.module = nn.Sequential(linear(3, 5, rank), nn.Tanh(), linear(5, 2, rank))


CHANGES: list[Change] = [
    assigned_state,
    one_parameter,
    another_head,
    one_layer_more,
    inserted,
    an_adapter,
    weight_norm,
    pruned,
    there_and_back,
    there_and_back_anew,
    another_dtype,
]


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1) / 10 - step / 4).to(dtype)


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    result: torch.Tensor = module(batch(rank, step, dtype)).square().sum()
    return result


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in inner(module).parameters()]


def averages(whole: nn.Module, size: int, step: int) -> list[torch.Tensor | None]:
    whole.zero_grad()
    for rank in range(size):
        (loss(whole, rank, step) / size).backward()  # type: ignore[no-untyped-call]
    return gradients(whole)


def step_of(ddp: DistributedDataParallel, rank: int, step: int) -> list[torch.Tensor | None]:
    ddp.zero_grad()
    loss(ddp, rank, step).backward()  # type: ignore[no-untyped-call]
    return gradients(ddp)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [0, 2])
def test_what_the_module_has_now_is_averaged_and_new_parameters_are_rank_0s(
    options: dict[str, Any], change: Change, after: int
) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        whole = copy.deepcopy(first)
        change(whole, 0)
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        for step in range(after):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))
        change(ddp, group.rank)
        for step in range(after, after + 3):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))
        for mine, expected in zip(inner(ddp).parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_module_in_the_wrapper(options: dict[str, Any]) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group, **options)
        step_of(ddp, group.rank, 0)
        another_module(ddp, group.rank)
        whole = nn.Sequential(linear(3, 5, 0), nn.Tanh(), linear(5, 2, 0))
        for step in range(1, 3):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_frozen_part_that_is_thawed_is_averaged_from_the_next_backward_on(options: dict[str, Any]) -> None:
    first = model()
    first[0].requires_grad_(False)

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        for step in range(3):
            assert step_of(ddp, group.rank, step)[:2] == [None, None]
        with torch.no_grad():
            inner(ddp)[0].weight.add_(group.rank)  # whoever trains a frozen part on one rank gets rank 0's values again
        inner(ddp)[0].requires_grad_(True)
        whole = copy.deepcopy(first).requires_grad_(True)
        for step in range(3, 6):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


OF_SECOND = r"parameter 'second\.(weight|bias)' was added or unfrozen within forward on rank"


class ChangesItself(nn.Module):
    """Its forward makes a layer, or unfreezes one."""

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.first, self.second = linear(3, 2, 0), None if makes else linear(3, 2, 1).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> Any:
        if self.second is None:
            self.second = linear(3, 2, 1)
        self.second.requires_grad_(True)
        return self.first(inputs) + self.second(inputs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("makes", [True, False], ids=["makes", "unfreezes"])
def test_a_gradient_of_a_parameter_that_forward_adds_or_unfreezes_is_refused(options: dict[str, Any], makes: bool) -> None:
    """It would stay the rank's own."""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(ChangesItself(makes=makes), process_group=group, **options)
        with pytest.raises(MisuseError, match=OF_SECOND):
            step_of(ddp, group.rank, 0)
        inner(ddp).zero_grad()
        again = DistributedDataParallel(inner(ddp), process_group=group, **options)
        del ddp
        for step in range(2):
            torch.testing.assert_close(step_of(again, group.rank, step), averages(ChangesItself(makes=makes), 2, step))

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("makes", [True, False], ids=["makes", "unfreezes"])
def test_a_gradient_of_new_parameters_alone_is_refused_in_the_next_forward(options: dict[str, Any], makes: bool) -> None:
    """Its backward averages nothing, so nobody looks at its end."""

    class UsesOnlyTheNew(ChangesItself):
        def forward(self, inputs: torch.Tensor) -> Any:
            super().forward(inputs)
            return self.second(inputs)  # type: ignore[misc]  # the forward above has made it

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(UsesOnlyTheNew(makes=makes), process_group=group, **options)
        ddp(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        inner(ddp).zero_grad()
        inner(ddp).second.requires_grad_(False)
        with pytest.raises(MisuseError, match=OF_SECOND):
            ddp(torch.ones(1, 3, dtype=torch.float64))

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_that_a_forward_without_backward_makes_are_averaged(options: dict[str, Any]) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(ChangesItself(makes=True), process_group=group, **options)
        ddp(torch.ones(1, 3, dtype=torch.float64))
        for step in range(2):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(ChangesItself(makes=True), 2, step))

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_layers_that_a_forward_without_backward_makes_are_accumulated(options: dict[str, Any]) -> None:
    """The forward inside `no_sync` follows the change."""

    def body(group: ProcessGroup) -> None:
        inputs = torch.full((1, 3), group.rank + 1.0, dtype=torch.float64)
        ddp = DistributedDataParallel(ChangesItself(makes=True), process_group=group, **options)
        ddp(inputs)
        with ddp.no_sync():
            ddp(inputs).sum().backward()
        ddp(inputs).sum().backward()
        mean = torch.full((2, 3), 2 * 1.5, dtype=torch.float64)
        torch.testing.assert_close([part.weight.grad for part in (inner(ddp).first, inner(ddp).second)], [mean, mean])

    run_ranks(2, body)


def test_a_functional_call_does_not_hide_that_a_forward_has_added_parameters() -> None:
    def body(group: ProcessGroup) -> None:
        inputs = torch.ones(1, 3, dtype=torch.float64)
        ddp = DistributedDataParallel(ChangesItself(makes=True), process_group=group)
        outputs = ddp(inputs)
        functional_call(ddp, {name: p.detach().requires_grad_() for name, p in ddp.named_parameters()}, (inputs,))
        with pytest.raises(MisuseError, match=OF_SECOND):
            outputs.sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("after", [0, 3])
def test_a_part_that_is_frozen_is_left_out_until_it_is_thawed(options: dict[str, Any], after: int) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options), copy.deepcopy(first)
        for step in range(after):
            step_of(ddp, group.rank, step)
        for frozen in (True, False, True):
            for module in (inner(ddp), whole):
                module[0].requires_grad_(not frozen)
            for step in range(3):
                torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_other_parameters_that_are_frozen_are_named(options: dict[str, Any]) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group, **options)
        inner(ddp)[0 if group.rank else 2].bias.requires_grad_(False)
        with pytest.raises(DisagreementError, match=r"'0.bias' is .* on rank 0 and .*\(frozen\) on rank 1"):
            step_of(ddp, group.rank, 1)

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_of_a_frozen_model_announces_no_backward(options: dict[str, Any], fails: bool) -> None:
    """So the next backward in `no_sync` stays local."""
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options), copy.deepcopy(first)
        step_of(ddp, group.rank, 0)
        ddp.zero_grad()
        ddp.requires_grad_(False)
        if fails:
            with pytest.raises(RuntimeError):
                ddp(torch.ones(1, 1, dtype=torch.complex64))
        else:
            loss(ddp, group.rank, 0)
        ddp.requires_grad_(True)
        with ddp.no_sync():
            loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        loss(whole, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients(ddp), gradients(whole))
        torch.testing.assert_close(step_of(ddp, group.rank, 2), averages(whole, 2, 2))

    run_ranks(2, body)


@pytest.mark.parametrize("finds_unused", [False, True])
def test_ignored_parameters_are_not_awaited_in_a_forward_of_a_frozen_model(finds_unused: bool) -> None:
    first = nn.Sequential(linear(3, 3, 0), linear(3, 2, 0))

    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(first)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight", "1.bias"])
        ddp = DistributedDataParallel(module, process_group=group, find_unused_parameters=finds_unused)
        module[0].requires_grad_(False)
        loss(ddp, group.rank, 0)
        module[0].requires_grad_(True)
        with ddp.no_sync():
            loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        whole = copy.deepcopy(first)
        loss(whole, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients(ddp), gradients(whole))

    run_ranks(2, body)


def test_freezing_for_a_while_builds_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The discriminator of a GAN while its generator trains; also in the steps after which all parameters are looked at."""
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        for step in range(3):
            step_of(ddp, group.rank, step)
        allocate, asked = group.allocate, []
        monkeypatch.setattr(group, "allocate", lambda *args: asked.append(args) or allocate(*args))
        for step in range(LOOK_EVERY + 2):
            ddp.requires_grad_(False)
            picture = batch(group.rank, step).requires_grad_()
            ddp(picture).sum().backward()
            ddp.module.train()
            ddp.requires_grad_(True)
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))
        assert not asked

    run_ranks(2, body)


def test_parameters_that_nobody_registers_are_seen_by_a_look_now_and_then() -> None:
    """`ddp.module.double()` puts others in place, where torch is asked to."""
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        for step in range(4):
            step_of(ddp, group.rank, step)
        there_and_back_anew(ddp.module, group.rank)
        for step in range(3):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))

    run_ranks(2, body)


def other_strides(module: nn.Module) -> None:
    """As `module.to(memory_format=...)` does with convolutions."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_strides_that_all_ranks_change_are_followed(after: int, options: dict[str, Any]) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        for step in range(8):
            if step == after:
                other_strides(ddp.module)
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))
            # Fused optimizers pair the elements of parameters and gradients in the order of memory.
            assert all(p.grad is not None and p.grad.stride() == p.stride() for p in ddp.module.parameters())
        if options:
            assert all(p.grad._base is not None for p in ddp.module.parameters() if p.grad is not None)

    run_ranks(2, body)


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize("rows", [6, 1])
def test_other_rows_that_all_ranks_give_a_table_are_followed(after: int, options: dict[str, Any], rows: int) -> None:
    def body(group: ProcessGroup) -> None:
        table = nn.Embedding(4, 3)
        ddp = DistributedDataParallel(table, process_group=group, **options)
        for step in range(6):
            if step == after:
                table.weight.data = torch.ones(rows, 3)
            ddp.zero_grad()
            (ddp(torch.tensor([0])) * (group.rank + 1)).sum().backward()
            assert table.weight.grad is not None
            assert table.weight.grad[0].tolist() == [1.5] * 3
            assert table.weight.grad.shape == table.weight.shape

    run_ranks(2, body)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("options", OPTIONS[:2])
def test_strides_that_one_rank_changes_mix_no_gradients_and_are_seen_by_a_look(after: int, options: dict[str, Any]) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        with pytest.raises(DisagreementError, match="the module has changed"):  # noqa: PT012 - a later step raises it
            for step in range(2 * LOOK_EVERY):
                if step == after and group.rank == 1:
                    other_strides(ddp.module)
                torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))
        group.abort()

    run_ranks(2, body)


class Growing(nn.Module):
    """A layer, and after it those of a list that may be added later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 2, 0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        for layer in getattr(self, "more", ()):
            result = torch.tanh(layer(result))
        return result


@pytest.mark.parametrize("how", [nn.ModuleList.append, lambda layers, layer: layers.insert(0, layer)])
def test_a_layer_in_a_container_that_was_added_empty_is_averaged(how: Callable[[nn.ModuleList, nn.Module], Any]) -> None:
    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(Growing(), process_group=group), Growing()
        step_of(ddp, group.rank, 0)
        inner(ddp).more = nn.ModuleList()
        step_of(ddp, group.rank, 1)
        how(inner(ddp).more, linear(2, 2, group.rank))
        whole.more = nn.ModuleList([linear(2, 2, 0)])
        for step in range(2, 5):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


def test_buffers_of_a_layer_without_parameters_that_is_added_are_synchronised() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        step_of(ddp, group.rank, 0)
        inner(ddp).append(nn.BatchNorm1d(2, affine=False).double())
        for step in range(1, 3):
            step_of(ddp, group.rank, step)
        inner(ddp).eval()
        ddp(batch(0, 0))
        mean = inner(ddp)[3].running_mean.clone()
        theirs = torch.empty_like(mean) if group.rank else mean
        group.broadcast(theirs, 0)
        torch.testing.assert_close(mean, theirs)

    run_ranks(2, body)


@pytest.mark.parametrize(
    "replace", [lambda ddp, new: ddp._modules.update(module=new), lambda ddp, new: inner(ddp)._modules.update({"2": new[2]})]
)
def test_modules_that_nobody_registers_are_seen_by_a_look_now_and_then(replace: Any) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(copy.deepcopy(first), process_group=group), copy.deepcopy(first)
        for step in range(4):
            step_of(ddp, group.rank, step)
        replace(ddp, nn.Sequential(copy.deepcopy(first[0]), nn.Tanh(), linear(4, 2, group.rank)))
        whole[2] = linear(4, 2, 0)
        for step in range(3):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("take_out", [lambda parts: parts.pop("second"), lambda parts: parts["first"].pop(1)])
def test_a_layer_that_is_taken_out_of_a_container_is_left_out(options: dict[str, Any], take_out: Any) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"first": nn.Sequential(linear(3, 3, 0), linear(3, 3, 0)), "second": linear(3, 3, 0)})

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result = inputs
            for part in self.parts.values():
                result = torch.tanh(part(result))
            return result

    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(Parts(), process_group=group, **options), Parts()
        for step in range(3):
            step_of(ddp, group.rank, step)
        take_out(inner(ddp).parts)
        take_out(whole.parts)
        for step in range(3, 6):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


def test_a_layer_that_is_taken_out_counts_as_unused_if_that_is_allowed() -> None:
    """So each rank may take out another layer."""
    module, owner = model(), nn.Identity()
    watch = ModelWatch(_state(module), owner, allows_unused=True)
    watch.is_due(0)
    module.pop(0)
    assert not watch.is_due(0)
    assert watch.is_due(1), "a look now and then"
    assert not watch.has_changed()
    module.append(nn.Linear(2, 2))
    assert watch.is_due(1)
    assert watch.has_changed()


def test_a_container_with_a_layer_that_is_left_out_is_no_sign() -> None:
    module, owner = nn.ModuleList([nn.Linear(2, 2), None]), nn.Identity()  # type: ignore[list-item]
    assert not ModelWatch(_state(module), owner, allows_unused=False).is_due(0)


def test_the_looks_become_rare_and_do_not_end() -> None:
    module = model()
    owner = nn.Identity()
    watch = ModelWatch(_state(module), owner, allows_unused=False)
    looked = []
    place, name, parameter = watch._places[0]
    for reductions in range(4 * LOOK_EVERY):
        place[name] = None
        looked += [reductions] if watch.is_due(reductions) else []
        watch.has_sign = False
        assert not watch.is_due(reductions), "once after each step, however many forwards there are"
        place[name] = parameter
    assert looked == [0, 1, 2, 4, 8, 16, LOOK_EVERY, 2 * LOOK_EVERY, 3 * LOOK_EVERY]


def _state(module: nn.Module) -> Any:
    from syncline.ddp.module_state import ModuleState

    return ModuleState(module)


def test_what_happens_to_other_modules_is_no_sign() -> None:
    module, owner = model(), nn.Identity()
    watch = ModelWatch(_state(module), owner, allows_unused=False)
    other = nn.Sequential(nn.Linear(2, 2))
    other[0].weight = nn.Parameter(torch.ones(2, 2))
    other.append(module)
    copy.deepcopy(module).append(nn.Linear(2, 2))
    assert not watch.has_sign
    module[0].register_module("extra", nn.Linear(2, 2))
    assert watch.has_sign


def test_gradients_that_were_accumulated_before_the_change_are_averaged_after_it() -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        for options in OPTIONS:
            ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
            with ddp.no_sync():
                loss(ddp, group.rank, 0).backward()  # type: ignore[no-untyped-call]
            one_layer_more(ddp, group.rank)
            loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
            whole = copy.deepcopy(first)
            for rank in range(2):
                (loss(whole, rank, 0) / 2).backward()  # type: ignore[no-untyped-call]
            one_layer_more(whole, 0)
            for rank in range(2):
                (loss(whole, rank, 1) / 2).backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(gradients(ddp), gradients(whole))

    run_ranks(2, body)


class TwoParts(nn.Module):
    """A forward uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([linear(3, 2, 0), linear(3, 2, 0)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        result: torch.Tensor = self.parts[which](inputs)
        return result


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_what_was_accumulated_before_the_change_counts_though_the_backward_after_it_does_not_use_it(options: Any) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(TwoParts(), process_group=group, **options)
        with ddp.no_sync():
            ddp(batch(group.rank, 0), 0).sum().backward()
        inner(ddp).parts[1] = linear(3, 2, group.rank)
        ddp(batch(group.rank, 1), 1).sum().backward()
        mean = (batch(0, 0) + batch(1, 0)).sum(0) / 2
        torch.testing.assert_close(inner(ddp).parts[0].weight.grad, mean.expand(2, 3))

    run_ranks(2, body)


def test_a_layer_that_is_added_brings_its_buffers() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        step_of(ddp, group.rank, 0)
        norm = nn.BatchNorm1d(2).double()
        norm.running_mean.fill_(5.0 + group.rank)  # type: ignore[union-attr, operator]
        inner(ddp).append(norm)
        ddp.eval()
        assert ddp(batch(0, 0)).shape == (2, 2)
        assert norm.running_mean.tolist() == [5.0, 5.0], "rank 0's"  # type: ignore[union-attr]
        ddp.train()
        for step in range(2):
            ddp(batch(group.rank, step))
        ddp(batch(group.rank, 3))
        mine = torch.cat([buffer.double().flatten() for buffer in norm.buffers()])
        step_of(ddp, group.rank, 4)
        assert mine.numel() == 5

    run_ranks(2, body)


class WithMean(nn.Module):
    """A layer, and a buffer that a forward replaces if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(3, 2, 0)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor, replaces: bool = True) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        if replaces:
            self.mean = result.detach().mean(0)
        return result


@pytest.mark.parametrize("replaces_on", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("syncs", [False, True])
def test_a_buffer_that_forward_replaces_is_not_new_when_the_model_changes(replaces_on: set[int], syncs: bool) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(WithMean(), process_group=group, forward_sync_buffers=syncs)
        ddp(batch(group.rank, 0), group.rank in replaces_on).sum().backward()
        mine = inner(ddp).mean.clone()
        inner(ddp).layer = linear(3, 2, group.rank)
        ddp(batch(group.rank, 1), False)
        theirs = mine.clone()
        group.broadcast(theirs, 0)
        torch.testing.assert_close(inner(ddp).mean, theirs if syncs else mine)

    run_ranks(2, body)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_change_on_one_rank_is_an_error_on_all(odd: int) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        step_of(ddp, group.rank, 0)
        if group.rank == odd:
            one_layer_more(ddp, 0)
        with pytest.raises(DisagreementError) as caught:
            step_of(ddp, group.rank, 1)
        said = str(caught.value)
        assert "the module has changed" in said
        if group.rank == odd:
            headline = said.splitlines()[0]
            assert "'3.weight', '3.bias'" in headline
            assert "make the same change on every rank" in headline
            assert len(headline) <= 200
        group.abort()

    run_ranks(2, body)


def test_different_changes_are_named_on_all_ranks() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        inner(ddp).append(linear(2, 2 + group.rank, 0))
        with pytest.raises(DisagreementError, match=r"parameter '3.weight' is float64\[2, 2\].*float64\[3, 2\]"):
            step_of(ddp, group.rank, 1)
        group.abort()

    run_ranks(2, body)


def test_other_parameters_that_are_new_are_named() -> None:
    """The models look alike, but each rank has replaced another parameter: whose values would be sent where?"""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        part = inner(ddp)[0 if group.rank else 2]
        part.bias = nn.Parameter(part.bias.detach().clone())
        with pytest.raises(DisagreementError, match=r"new parameters=\['2.bias'\] on rank 0 and \['0.bias'\] on rank 1"):
            step_of(ddp, group.rank, 1)

    run_ranks(2, body)


def test_within_join_a_change_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)

        def change_within_join() -> None:
            with ddp.join():
                one_layer_more(ddp, 0)
                step_of(ddp, group.rank, 0)

        with pytest.raises(MisuseError, match=r"new parameters: '3.weight', '3.bias'.*within join\(\)"):
            change_within_join()

    run_ranks(1, body)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_a_change_before_join_is_followed_when_the_context_is_entered(options: dict[str, Any]) -> None:
    """Rank 0 has no input at all, so it cannot follow the change later."""
    first = model()
    first[0].requires_grad_(False)

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        with ddp.join():
            step_of(ddp, group.rank, 0)
        inner(ddp)[0].requires_grad_(True)
        one_layer_more(ddp, group.rank)
        whole = copy.deepcopy(inner(ddp))
        for module in (ddp, whole):
            module.zero_grad()
        with ddp.join():
            if group.rank == 1:
                step_of(ddp, 1, 1)
        if group.rank == 1:  # rank 0's values of the new layer
            whole.load_state_dict(ddp.module.state_dict())
            (loss(whole, 1, 1) / 2).backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(gradients(ddp), gradients(whole))
        assert len(set(exchange_objects(repr(ddp.module.state_dict()), group=group))) == 1

    run_ranks(2, body)


def test_in_mixed_precision_new_parameters_are_cast() -> None:
    def body(group: ProcessGroup) -> None:
        first = model().float()
        ddp = DistributedDataParallel(first, process_group=group, mixed_precision=MixedPrecision(torch.bfloat16))
        ddp(batch(group.rank, 0).float()).sum().backward()
        inner(ddp).append(linear(2, 2, group.rank).float())
        ddp.zero_grad()
        outputs = ddp(batch(group.rank, 1).float())
        assert outputs.dtype is torch.bfloat16
        outputs.sum().backward()
        bias = inner(ddp)[3].bias
        assert bias.grad.dtype is torch.float32
        assert bias.grad.tolist() == [2.0, 2.0]

    run_ranks(2, body)


def test_a_hook_stays() -> None:
    first = model()

    def hook(group: ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work = group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / group.size * 10)

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        ddp.register_comm_hook(group, hook)
        step_of(ddp, group.rank, 0)
        one_layer_more(ddp, group.rank)
        whole = copy.deepcopy(first)
        one_layer_more(whole, 0)
        expected = [None if one is None else 10 * one for one in averages(whole, 2, 1)]
        torch.testing.assert_close(step_of(ddp, group.rank, 1), expected)

    run_ranks(2, body)


def test_a_lazy_layer_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        inner(ddp).append(nn.LazyLinear(2))
        with pytest.raises(MisuseError, match=r"parameter '3.weight' is not initialised yet"):
            step_of(ddp, group.rank, 0)

    run_ranks(1, body)


# ---- tensors that functional_call puts in the places of parameters for one call ----


def leaves(module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(p, rank + 1.0).requires_grad_() for name, p in module.named_parameters()}


def scaled(module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {name: p * (rank + 1.5) for name, p in module.named_parameters()}


def one_plain_tensor(module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {"module.0.weight": inner(module)[0].weight.detach() * (rank + 0.5)}


def parameters_of_another_module(module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {f"module.{name}": nn.Parameter(p * (rank + 2)) for name, p in inner(module).named_parameters()}


def its_own_in_another_place(module: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    return {"module.2.weight": inner(module)[0].weight}


def square() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


@pytest.mark.parametrize("given", [leaves, scaled, one_plain_tensor, parameters_of_another_module, its_own_in_another_place])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_tensors_of_functional_call_are_the_callers_and_no_change_of_the_module(given: Any, after: int) -> None:
    first = square()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        for step in range(after):
            step_of(ddp, group.rank, step)
        tensors = given(ddp, group.rank)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        functional_call(ddp, tensors, (batch(group.rank, 0),))
        torch.testing.assert_close({name: tensor.detach() for name, tensor in tensors.items()}, before, rtol=0, atol=0)
        for step in range(after, after + 3):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(copy.deepcopy(first), 2, step))

    run_ranks(2, body)


def test_gradients_through_tensors_that_are_computed_from_the_parameters_are_averaged() -> None:
    first = square()

    def body(group: ProcessGroup) -> None:
        ddp, whole = DistributedDataParallel(copy.deepcopy(first), process_group=group), copy.deepcopy(first)
        for step in range(3):
            ddp.zero_grad()
            tensors = {name: p * 1.5 for name, p in ddp.named_parameters()}
            functional_call(ddp, tensors, (batch(group.rank, step),)).square().sum().backward()
            whole.zero_grad()
            for rank in range(2):
                tensors = {name: p * 1.5 for name, p in whole.named_parameters()}
                (functional_call(whole, tensors, (batch(rank, step),)).square().sum() / 2).backward()
            torch.testing.assert_close(gradients(ddp), gradients(whole))

    run_ranks(2, body)


@pytest.mark.parametrize("change", [one_parameter, one_layer_more, there_and_back_anew])
def test_a_change_before_a_functional_call_is_followed_by_the_next_forward_of_its_own(change: Change) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        whole = copy.deepcopy(first)
        change(whole, 0)
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        step_of(ddp, group.rank, 0)
        change(ddp, group.rank)
        tensors = parameters_of_another_module(ddp, group.rank)
        functional_call(ddp, tensors, (batch(group.rank, 0),))
        for step in range(1, 4):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


def test_buffers_of_functional_call_are_the_callers_and_those_of_the_module_are_synchronised_later() -> None:
    def body(group: ProcessGroup) -> None:
        norm = nn.BatchNorm1d(3).double()
        ddp = DistributedDataParallel(norm, process_group=group)
        step_of(ddp, group.rank, 0)
        theirs = {"module.running_mean": torch.full((3,), float(group.rank), dtype=torch.float64)}
        ddp.eval()
        with torch.no_grad():
            functional_call(ddp, theirs, (batch(group.rank, 0),))
        assert theirs["module.running_mean"].tolist() == [group.rank] * 3
        ddp(batch(group.rank, 1))
        mean = batch(0, 0).mean(0) * 0.1  # rank 0's
        torch.testing.assert_close(norm.running_mean, mean)

    run_ranks(2, body)


@pytest.mark.parametrize("accumulates_on", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_a_part_with_gradients_of_one_rank_alone_cannot_be_frozen(accumulates_on: set[int], options: dict[str, Any]) -> None:
    """An optimizer would step it with them, so the replicas would drift apart."""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group, **options)
        step_of(ddp, group.rank, 0)
        ddp.zero_grad()
        if group.rank in accumulates_on:
            with ddp.no_sync():
                loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        inner(ddp)[0].requires_grad_(False)
        wrong, said = (
            (MisuseError, "'0.weight' was frozen .*not averaged")
            if group.rank in accumulates_on
            else (
                DisagreementError,
                r"rank \d has refused its model .*'0.weight' was frozen",
            )
        )
        with pytest.raises(wrong, match=said):
            loss(ddp, group.rank, 2)
        ddp.zero_grad()  # then it can be
        assert step_of(ddp, group.rank, 3)[0] is None

    run_ranks(2, body)


def test_a_layer_with_buffers_only_is_new_though_it_has_the_id_of_one_that_is_gone() -> None:
    module, owner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), nn.Identity()
    watch = ModelWatch(_state(module), owner, allows_unused=False)
    gone = id(module.pop(1))
    watch.take_note_of_structure()
    others = []
    for _ in range(1000):  # one of them might get the memory of the layer that is gone
        others.append(nn.BatchNorm1d(2, affine=False))
        if id(others[-1]) == gone:
            break
    module.append(others[-1])
    assert [name for name, _ in watch.new_buffers()] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_delayed_parameter_may_be_frozen_and_thawed() -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        delayed = {"delay_all_reduce_named_params": [("2.bias", module[2].bias)], "param_to_hook_all_reduce": module[0].weight}
        ddp = DistributedDataParallel(module, process_group=group, **delayed)
        step_of(ddp, group.rank, 0)
        for frozen in ([2], [0], [], [0, 2], []):
            for each in (module, whole):
                each[0].weight.requires_grad_(0 not in frozen)
                each[2].bias.requires_grad_(2 not in frozen)
            for step in range(2):
                torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))

    run_ranks(2, body)


class Branches(nn.Module):
    """A step uses both branches, or only the second."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([model(), model()])
        self.uses_both = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.branches[1](inputs)
        return result + self.branches[0](inputs) if self.uses_both else result


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_that_were_accumulated_before_a_change_of_the_group_are_averaged_after_it(options: dict[str, Any]) -> None:
    """Also those of parameters that the first averaged backward in the new group does not use."""
    later_uses_both = "find_unused_parameters" not in options and "static_graph" not in options
    first = Branches()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group, **options)
        with ddp.no_sync():
            loss(ddp, group.rank, 0).backward()  # type: ignore[no-untyped-call]
        smaller = group.split(0 if group.rank else None)
        if smaller is None:
            return
        ddp.update_process_group(smaller)
        assert ddp.has_local_gradients
        module.uses_both = later_uses_both
        loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        assert not ddp.has_local_gradients
        for step, whole.uses_both in enumerate((True, later_uses_both)):
            for rank in (1, 2):
                (loss(whole, rank, step) / 2).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients(module), gradients(whole))
        smaller.close()

    run_ranks(3, body)


def test_gradients_that_were_accumulated_before_a_change_of_the_group_count_though_the_graph_becomes_static_after_it() -> None:
    first = Branches()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group)
        with ddp.no_sync():
            loss(ddp, group.rank, 0).backward()  # type: ignore[no-untyped-call]
        ddp.update_process_group(group)
        ddp._set_static_graph()
        module.uses_both = False
        loss(ddp, group.rank, 1).backward()  # type: ignore[no-untyped-call]
        for step, whole.uses_both in enumerate((True, False)):
            for rank in (0, 1):
                (loss(whole, rank, step) / 2).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(gradients(module), gradients(whole))

    run_ranks(2, body)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("change", ["freeze", "take out", "update group", "freeze before"])
def test_a_graph_that_becomes_static_after_construction_is_as_one_that_was_static_from_the_start(
    skips: bool, change: str
) -> None:
    first = nn.Sequential(*(linear(3, 3, rank) for rank in range(3)))

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(
            module, process_group=group, find_unused_parameters=True, skip_all_reduce_unused_params=skips
        )
        if change == "freeze before":
            module[1].requires_grad_(False)
        ddp._set_static_graph()
        for step in range(4):
            if step == 2:
                if change == "freeze":
                    module[1].requires_grad_(False)
                elif change == "take out":
                    del module[1], whole[1]
                elif change == "update group":
                    ddp.update_process_group(group.split(0))
            found = step_of(ddp, group.rank, step)
            whole.zero_grad()
            for rank in (0, 1):
                (loss(whole, rank, step) / 2).backward()  # type: ignore[no-untyped-call]
            if change == "freeze before" or (change == "freeze" and step >= 2):
                whole[1].zero_grad()
            torch.testing.assert_close(found, gradients(whole))

    run_ranks(2, body)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_frozen_model_may_change_its_group_and_is_averaged_when_it_is_thawed(options: dict[str, Any]) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group, **options)
        step_of(ddp, group.rank, 0)
        module.requires_grad_(False)
        same = group.split(0)
        assert same is not None
        ddp.update_process_group(same)
        assert not any(parameter.requires_grad for parameter in module.parameters())
        ddp(batch(group.rank, 0))
        for thawed in (module[2], module):
            thawed.requires_grad_(True)
            whole.requires_grad_(thawed is module)
            whole[2].requires_grad_(True)
            for step in range(2):
                torch.testing.assert_close(
                    [one for one in step_of(ddp, group.rank, step) if one is not None],
                    [one for one in averages(whole, 2, step) if one is not None],
                )
            ddp.zero_grad(set_to_none=True)
        same.close()

    run_ranks(2, body)


def test_a_delayed_parameter_may_be_frozen_while_the_group_changes() -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        delayed = {"delay_all_reduce_named_params": [("2.bias", module[2].bias)], "param_to_hook_all_reduce": module[0].weight}
        ddp = DistributedDataParallel(module, process_group=group, **delayed)
        same = group.split(0)
        assert same is not None
        for frozen, to in (([0], same), ([2], group), ([], None), ([0, 2], same), ([], None)):
            for each in (module, whole):
                each[0].weight.requires_grad_(0 not in frozen)
                each[2].bias.requires_grad_(2 not in frozen)
            if to is not None:
                ddp.update_process_group(to)
            for step in range(2):
                torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 2, step))
            # After it is thawed, it is delayed again: the last bucket has it alone.
            if not frozen:
                assert ddp._reducer.buckets[-1].names == ["2.bias"]
        same.close()

    run_ranks(2, body)


@pytest.mark.parametrize("accumulates_on", [{0}, {1}, {0, 1}])
def test_a_part_with_gradients_of_one_rank_alone_cannot_be_frozen_before_the_group_changes(accumulates_on: set[int]) -> None:
    """All ranks raise an error, and keep the old group."""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        same = group.split(0)
        assert same is not None
        if group.rank in accumulates_on:
            with ddp.no_sync():
                loss(ddp, group.rank, 0).backward()  # type: ignore[no-untyped-call]
        inner(ddp)[2].requires_grad_(False)
        wrong, said = (
            (MisuseError, r"'2\.weight' was frozen .* is not averaged")
            if group.rank in accumulates_on
            else (DisagreementError, r"rank \d has refused its model .*'2\.weight' was frozen")
        )
        with pytest.raises(wrong, match=said):
            ddp.update_process_group(same)
        assert ddp.process_group is group
        ddp.zero_grad()  # then it can be
        ddp.update_process_group(same)
        assert step_of(ddp, group.rank, 1)[-1] is None
        same.close()

    run_ranks(2, body)


@pytest.mark.parametrize("follows_on", [set(), {0}, {1}])
@pytest.mark.parametrize("change", [one_parameter, one_layer_more, inserted, another_module])
def test_a_change_that_no_forward_has_followed_is_followed_when_the_group_changes(change: Change, follows_on: set[int]) -> None:
    """Rank 0's values count, also if the change is new for some ranks only."""
    first = model()

    def body(group: ProcessGroup) -> None:
        alone = group.split(int(group.rank in follows_on))
        assert alone is not None
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=alone)
        step_of(ddp, group.rank, 0)
        change(ddp, group.rank)
        if group.rank in follows_on:
            step_of(ddp, group.rank, 0)
        before = repr(ddp.module.state_dict())
        ddp.update_process_group(group)
        after, rank_0s = repr(ddp.module.state_dict()), exchange_objects(before, group=group)[0]
        assert after == rank_0s
        whole = copy.deepcopy(ddp.module)
        for step in range(2):
            torch.testing.assert_close(step_of(ddp, group.rank, step), averages(whole, 3, step))
        alone.close()

    run_ranks(3, body)


class Shifted(nn.Module):
    """A layer with a buffer."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale + self.shift


@pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": False}], ids=str)
def test_buffers_that_no_forward_has_followed_are_rank_0s_when_the_group_changes(options: dict[str, Any]) -> None:
    def body(group: ProcessGroup) -> None:
        precision = MixedPrecision(buffer_dtype=torch.bfloat16)
        # For the other ranks the layer is new.
        first = nn.Sequential(nn.Linear(3, 2), *([Shifted()] if group.rank == 1 else []))
        alone = group.split(int(group.rank == 1))
        assert alone is not None
        ddp = DistributedDataParallel(first, process_group=alone, mixed_precision=precision, **options)
        if group.rank != 1:
            first.append(Shifted())
        shift: Any = first[1].shift
        shift.fill_(5.0 + group.rank)
        ddp.update_process_group(group)
        ddp(torch.zeros(2, 3))
        assert shift.dtype is torch.bfloat16
        assert shift.tolist() == [5.0, 5.0]
        alone.close()

    run_ranks(3, body)


class Caching(nn.Linear):
    """Its first forward makes a buffer."""

    seen: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.register_buffer("seen", inputs.detach().clone(), persistent=False)
        return super().forward(inputs)


def test_buffers_that_a_forward_has_made_stay_each_ranks_own_when_the_group_changes() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(Caching(3, 2), process_group=group, forward_sync_buffers=False)
        inputs = torch.full((2 + group.rank, 3), float(group.rank))
        ddp(inputs).sum().backward()
        same = group.split(0)
        assert same is not None
        ddp.update_process_group(same)
        assert torch.equal(inner(ddp).seen, inputs)
        same.close()

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"init_sync": False}], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_a_layer_that_would_see_one_rank_is_refused_when_it_is_added(affine: bool, options: dict[str, Any]) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        inner(ddp).append(nn.SyncBatchNorm(2, affine=affine).double())
        for _ in range(2):
            with pytest.raises(MisuseError, match=r"layer '3' is torch\.nn\.SyncBatchNorm \(1 in all\)"):
                step_of(ddp, group.rank, 0)
        inner(ddp).pop(3)
        torch.testing.assert_close(step_of(ddp, group.rank, 0), averages(copy.deepcopy(first), 2, 0))

    run_ranks(2, body)


@pytest.mark.parametrize("having", [{0}, {1}, {0, 1}])
def test_a_layer_that_would_see_one_rank_is_refused_when_the_group_grows(having: set[int]) -> None:
    """All ranks raise an error, and keep the old group."""

    def body(group: ProcessGroup) -> None:
        alone = group.split(group.rank)
        assert alone is not None
        module = model().append(nn.SyncBatchNorm(2) if group.rank in having else nn.BatchNorm1d(2)).double()
        ddp = DistributedDataParallel(module, process_group=alone)
        wrong, said = (
            (MisuseError, r"layer '3' is torch\.nn\.SyncBatchNorm")
            if group.rank in having
            else (DisagreementError, r"rank \d has refused its model .*layer '3' is torch\.nn\.SyncBatchNorm")
        )
        with pytest.raises(wrong, match=said):
            ddp.update_process_group(group)
        assert ddp.process_group is alone
        alone.close()

    run_ranks(2, body)


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("how", ["forward", "update_process_group"])
def test_a_new_parameter_that_cannot_be_averaged_is_refused_on_all_ranks(how: str, refusing: set[int]) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        inner(ddp).append(nn.Linear(2, 2, device="meta" if group.rank in refusing else "cpu").double())
        wrong, said = (
            (MisuseError, r"'3\.weight' is on meta")
            if group.rank in refusing
            else (DisagreementError, r"rank \d has refused its model .*'3\.weight' is on meta")
        )
        with pytest.raises(wrong, match=said):
            step_of(ddp, group.rank, 0) if how == "forward" else ddp.update_process_group(group)
        inner(ddp).pop(3)
        torch.testing.assert_close(step_of(ddp, group.rank, 0), averages(copy.deepcopy(first), 2, 0))

    run_ranks(2, body)


def test_after_a_change_of_the_group_that_fails_the_model_is_averaged_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Reducer):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise MemoryError

    first = model()

    def body(group: ProcessGroup) -> None:
        module, whole = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(module, process_group=group)
        group.barrier()
        monkeypatch.setattr(distributed_data_parallel, "Reducer", Full)
        with pytest.raises(MemoryError):
            ddp.update_process_group(group)
        torch.testing.assert_close(step_of(ddp, group.rank, 0), averages(whole, 2, 0))

    run_ranks(2, body)


def test_after_a_change_of_the_group_that_fails_a_frozen_model_is_frozen_as_before() -> None:
    def body(group: ProcessGroup) -> None:
        module = model()
        with torch.inference_mode():
            last = nn.Parameter(torch.ones(2), requires_grad=False)
        module[2].register_parameter("last", last)  # torch refuses to unfreeze it
        ddp = DistributedDataParallel(module, process_group=group, init_sync=False)
        module.requires_grad_(False)
        with pytest.raises(RuntimeError, match="inference tensor"):
            ddp.update_process_group(group)
        assert not any(parameter.requires_grad for parameter in module.parameters())

    run_ranks(2, body)


@pytest.mark.parametrize("is_all_frozen", [True, False])
def test_a_model_with_frozen_parameters_may_be_copied(is_all_frozen: bool) -> None:
    """One of them is delayed."""
    init_process_group("in_process", world_size=1)
    try:
        module = model()
        delayed = {"delay_all_reduce_named_params": [("2.bias", module[2].bias)], "param_to_hook_all_reduce": module[0].weight}
        ddp = DistributedDataParallel(module, **delayed)
        (module if is_all_frozen else module[2].bias).requires_grad_(False)
        copied = copy.deepcopy(ddp)
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in module.parameters()]
        for whole in (copied.module, module):
            whole.requires_grad_(True)
        torch.testing.assert_close(step_of(copied, 0, 0), averages(module, 1, 0))
        assert copied._reducer.buckets[-1].names == ["2.bias"]
    finally:
        destroy_process_group()
