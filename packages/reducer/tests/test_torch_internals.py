"""What the reducer uses of torch without a promise: each with what happens in a torch that does not have it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import create_groups
from syncline.reducer import Reducer, dynamic_usage, gradient_aliasing, torch_internals
from syncline.reducer.torch_internals import (
    accumulation_node,
    call_at_backward_end,
    call_at_outer_end,
    current_backward,
    enclosing_function,
    hookable,
    storage_users,
    unreached,
)
from test_support.chosen_gradients import CountingGroup

ranks = pytest.mark.ranks


def probed_again() -> ModuleType:
    """The module, as it comes up in the torch that there is now."""
    spec = importlib.util.spec_from_file_location("probed_again", torch_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_reducer(**options: Any) -> Reducer:
    (group,) = create_groups(1)
    return Reducer([("p", torch.nn.Parameter(torch.ones(2)))], group, **options)


# ---- what is there ----


def test_this_torch_has_all_of_it() -> None:
    """Were one missing, the tests of what it is for would test what happens without it."""
    assert torch_internals.CAN_COUNT_STORAGE_USERS
    assert torch_internals.CAN_FORESEE_NODES
    assert hasattr(torch._C, "_current_graph_task_id")


# ---- what happens without it ----


def test_without_queue_callback_the_package_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Variable, "_execution_engine", SimpleNamespace())
    with pytest.raises(ImportError, match=rf"does not work with torch {re.escape(torch.__version__)}: .*queue_callback"):
        probed_again()


def test_without_the_code_of_functions_backwards_the_package_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.function, "BackwardCFunction", SimpleNamespace(apply=len))
    with pytest.raises(ImportError, match=rf"does not work with torch {re.escape(torch.__version__)}: .*__code__"):
        probed_again()


@ranks
def test_without_graph_task_ids_a_bucket_with_another_last_gradient_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose last gradient is the expected one does not wait."""
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    module = probed_again()
    assert module.current_backward() != module.current_backward()
    monkeypatch.setattr(torch_internals, "_current_graph_task_id", module._current_graph_task_id)

    def body(group: ProcessGroup) -> None:
        counting = CountingGroup(group)
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        reducer = Reducer(named, counting, bucket_cap_bytes=16, first_bucket_cap_bytes=16)  # type: ignore[arg-type]
        found: list[int] = []
        parameters[0].register_hook(lambda _: found.append(counting.issued))
        for step, order in enumerate([[3, 2, 1, 0]] * 3 + [[2, 3, 1, 0]]):
            before = counting.issued
            reducer.prepare_for_backward()
            total = torch.zeros(())
            for index in reversed(order):
                parameters[index].grad = None
                total = total + (parameters[index] * (group.rank + 1.0)).sum()
            total.backward()  # type: ignore[no-untyped-call]
            assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [[1.5, 1.5]] * 4
            assert found.pop() - before == (1 if step < 3 else 0)

    run_ranks(2, body)


@ranks
def test_without_graph_task_ids_a_forward_within_a_backward_with_averaging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        reducer = Reducer([("one", one), ("other", other)], group)
        for is_known in (True, False):
            if not is_known:
                monkeypatch.setattr(torch_internals, "_current_graph_task_id", module._current_graph_task_id)
            reducer.prepare_for_backward()
            middle = one * 1.0
            middle.register_hook(lambda _: reducer.prepare_for_backward())  # type: ignore[no-untyped-call]
            total = middle.sum() + other.sum()  # the gradient of `other` comes first
            if is_known:
                total.backward()  # type: ignore[no-untyped-call]
            else:
                with pytest.raises(MisuseError, match=r"prepare_for_backward on rank 0 of 1.*never ended"):
                    total.backward()  # type: ignore[no-untyped-call]

    with monkeypatch.context() as without:
        without.delattr(torch._C, "_current_graph_task_id")
        module = probed_again()
    run_ranks(1, body)


def test_without_foreseen_nodes_unused_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    module = probed_again()
    assert not module.CAN_FORESEE_NODES
    monkeypatch.setattr(dynamic_usage, "CAN_FORESEE_NODES", module.CAN_FORESEE_NODES)
    with pytest.raises(MisuseError, match=r"find_unused_parameters=True: this version of torch .* use static_graph=True"):
        make_reducer(find_unused_parameters=True)
    make_reducer()
    make_reducer(static_graph=True)


def test_without_storage_counts_gradients_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    module = probed_again()
    assert not module.CAN_COUNT_STORAGE_USERS
    monkeypatch.setattr(gradient_aliasing, "CAN_COUNT_STORAGE_USERS", module.CAN_COUNT_STORAGE_USERS)
    parameter = torch.nn.Parameter(torch.ones(gradient_aliasing.LEAST_ALIASED_BYTES // 4))
    (group,) = create_groups(1)
    reducer = Reducer([("p", parameter)], group)
    places = []
    parameter.register_post_accumulate_grad_hook(lambda parameter: places.append(parameter.grad.data_ptr()))  # type: ignore
    for _ in range(3):
        parameter.grad = None
        reducer.prepare_for_backward()
        (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == places[-1]
        assert bool(parameter.grad.eq(2).all())


# ---- what it is for ----


def test_storage_users_are_counted() -> None:
    tensor = torch.zeros(4)
    alone = storage_users(tensor)
    uses: list[Callable[[], Any]] = [
        lambda: tensor[:2],
        lambda: tensor.detach(),
        lambda: tensor.numpy(),
        lambda: tensor.untyped_storage(),
        lambda: torch.empty(0).set_(tensor),  # type: ignore[call-overload]
    ]
    for use in uses:
        user = use()
        assert storage_users(tensor) != alone
        del user
        assert storage_users(tensor) == alone
    same_object = [tensor]
    assert storage_users(same_object[0]) == alone


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_frozen_parameter_takes_hooks(is_frozen: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=not is_frozen)
    with hookable(parameter):
        assert parameter.requires_grad
        seen: list[object] = []
        parameter.register_post_accumulate_grad_hook(seen.append)  # type: ignore[arg-type]
    assert parameter.requires_grad is not is_frozen
    parameter.requires_grad_()
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1


class Marked(torch.Tensor):
    """Results of torch's functions have this type, too, so each of them has one node more."""


@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
def test_the_accumulation_node_is_the_one_that_backward_executes(kind: type[torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2).as_subclass(kind))
    with torch.inference_mode():
        node = accumulation_node(parameter)
    assert accumulation_node(parameter) is node
    seen: list[object] = []
    node.register_hook(lambda *_: seen.append(parameter.grad))
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [parameter.grad]
    assert seen[0] is parameter.grad


def test_unreached_nodes_are_known_when_backward_begins() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    nodes = [accumulation_node(parameter) for parameter in parameters]
    found: list[list[int]] = []
    for used in ([0, 1, 2], [1], [0, 2]):
        total = torch.stack([parameters[index].sum() for index in used]).sum()
        total.register_hook(lambda _: found.append(unreached(nodes)))
        total.backward()  # type: ignore[no-untyped-call]
    assert found == [[], [0, 2], [1]]


def test_a_backward_within_another_has_another_number() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    found: list[int] = []

    def nested(_: torch.Tensor) -> None:
        found.append(current_backward())
        with torch.enable_grad():
            other = torch.ones(1, requires_grad=True) * 2
            other.register_hook(lambda _: found.append(current_backward()))
            other.backward()  # type: ignore[no-untyped-call]
        found.append(current_backward())

    parameter.register_hook(nested)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    outer, inner, outer_again = found
    assert outer == outer_again
    assert outer != inner
    assert current_backward() == -1


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_end_of_the_outermost_backward_is_seen_once(depth: int) -> None:
    """From within re-entrant checkpoints, too; after every gradient is there."""
    first, inner = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    ends: list[bool] = []
    is_nested: list[bool] = []

    def note(_: object) -> None:
        is_nested.append(enclosing_function() is not None)
        call_at_backward_end(lambda: ends.append(first.grad is not None))

    inner.register_post_accumulate_grad_hook(note)  # type: ignore[arg-type]

    def part(inputs: torch.Tensor, levels: int) -> torch.Tensor:
        if levels == 0:
            return inputs * inner
        return checkpoint(part, inputs, levels - 1, use_reentrant=True)  # type: ignore[no-any-return]

    part(first * 2, depth).sum().backward()  # type: ignore[no-untyped-call]
    assert is_nested == [depth > 0]
    assert ends == [True]
    assert enclosing_function() is None


@pytest.mark.parametrize("tells", [True, False])
def test_the_end_of_a_backward_in_a_hook_tells_of_the_one_around_it(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells:
        monkeypatch.setattr(torch_internals, "_current_node", lambda: None)
    first, inner = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    ends: list[tuple[bool, bool]] = []

    def end() -> None:
        ends.append((first.grad is not None, call_at_outer_end(end)))

    inner.register_post_accumulate_grad_hook(lambda _: call_at_backward_end(end))  # type: ignore[arg-type]
    outputs, auxiliary = first * 2, (inner * 3).sum()
    outputs.register_hook(lambda _: auxiliary.backward())  # type: ignore[no-untyped-call]
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    assert ends == ([(False, True), (True, False)] if tells else [(False, False)])


class Given(torch.autograd.Function):
    """Gives its input a gradient, or leaves it undefined."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, is_defined: bool) -> torch.Tensor:
        ctx.is_defined = is_defined
        return inputs.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return gradient.expand(2) if ctx.is_defined else None, None


def test_a_hook_tells_of_a_gradient_that_is_left_undefined() -> None:
    """In torch 2.6 no other one does."""
    parameter, told = torch.nn.Parameter(torch.ones(2)), []
    handle = torch_internals.hook_undefined_gradients(parameter, lambda: told.append("undefined"))
    for is_defined in (True, False, True):
        Given.apply(parameter, is_defined).backward()  # type: ignore[no-untyped-call]
    assert told == ["undefined"]
    handle.remove()
    Given.apply(parameter, False).backward()  # type: ignore[no-untyped-call]
    assert told == ["undefined"]


def test_compiled_autograd_that_raises_where_others_drop_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6's."""

    def refuse(_: Callable[[], None]) -> None:
        raise RuntimeError("Final callbacks can only be installed during backward pass.")

    monkeypatch.setattr(torch_internals, "_queue_callback", refuse)
    with pytest.raises(RuntimeError, match="Final callbacks"):
        call_at_backward_end(pytest.fail)
    monkeypatch.setattr(torch_internals, "in_compiled_autograd", lambda: True)
    call_at_backward_end(pytest.fail)
