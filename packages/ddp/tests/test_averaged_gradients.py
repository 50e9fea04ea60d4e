"""Hooks on averaged gradients, the warning of hooks that come too early, and the comparison of replicas."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.collectives import DisagreementError, InvalidArgumentError, InvalidTypeError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.replica_check import EVERY_VARIABLE, HASH_BYTES, ReplicaHash, difference

pytestmark = pytest.mark.ranks

OPTIONS = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}]


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1) / 10 - step / 4


def trained(first: nn.Module, size: int, steps: int) -> list[torch.Tensor]:
    """Locally, on the batches of all ranks."""
    whole = copy.deepcopy(first)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            (whole(batch(rank, step)).square().sum() / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in whole.parameters()]


# ---- hooks on averaged gradients ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_optimizer_that_steps_in_the_hook_trains_as_one_after_backward(options: dict[str, Any], size: int) -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, bucket_cap_mb=64 / 2**20, **options)
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in ddp.parameters()}

        def step_and_drop(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        ddp.register_post_average_grad_hook(step_and_drop)
        for step in range(4):
            ddp(batch(group.rank, step)).square().sum().backward()
        torch.testing.assert_close([p.detach() for p in ddp.parameters()], trained(first, size, 4))

    run_ranks(size, body)


def test_hooks_see_averages_once_in_each_reduced_backward_and_before_fused_optimizers() -> None:
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        ddp._register_fused_optim(torch.optim.SGD, lr=1.0)
        seen: list[tuple[str, nn.Parameter, torch.Tensor]] = []

        def look(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            seen.append(("first", parameter, parameter.grad.clone()))

        def clip(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            seen.append(("second", parameter, parameter.grad.clone()))
            parameter.grad.zero_()

        handle = ddp.register_post_average_grad_hook(look)
        ddp.register_post_average_grad_hook(clip)
        with ddp.no_sync():
            ddp(batch(group.rank, 0)).square().sum().backward()
        assert not seen
        ddp.zero_grad()
        ddp(batch(group.rank, 1)).square().sum().backward()
        whole = copy.deepcopy(first)
        for rank in range(2):
            (whole(batch(rank, 1)).square().sum() / 2).backward()
        expected = dict(zip(map(id, ddp.parameters()), (p.grad for p in whole.parameters()), strict=True))
        assert [name for name, _, _ in seen] == ["first", "second"] * 4
        for _, parameter, gradient in seen:
            torch.testing.assert_close(gradient, expected[id(parameter)])
        torch.testing.assert_close(list(ddp.parameters()), list(first.parameters()))
        handle.remove()
        seen.clear()
        ddp(batch(group.rank, 2)).square().sum().backward()
        assert [name for name, _, _ in seen] == ["second"] * 4

    run_ranks(2, body)


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        with pytest.raises(InvalidTypeError, match=r"a function hook\(parameter\), found int"):
            ddp.register_post_average_grad_hook(3)  # type: ignore[arg-type]

    run_ranks(1, body)


def test_a_wrapper_with_hooks_is_freed_without_the_garbage_collector() -> None:
    import gc
    import weakref

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        ddp.register_post_average_grad_hook(lambda _: None)
        ddp(batch(0, 0)).sum().backward()
        reducer = weakref.ref(ddp._reducer)
        del ddp
        assert reducer() is None

    gc.disable()
    try:
        run_ranks(1, body)
    finally:
        gc.enable()


# ---- hooks that come too early ----


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_hook_that_only_looks_is_warned_of_once(before: bool) -> None:
    def body(group: ProcessGroup) -> list[str]:
        module = model()
        if before:
            module[2].bias.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[operator]
        ddp = DistributedDataParallel(module, process_group=group)
        if not before:
            module[2].bias.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[operator]
        for step in range(6):
            ddp(batch(0, step)).sum().backward()
        return [str(one.message) for one in caught]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (said,) = run_ranks(1, body)
    assert len(said) == 1
    assert said[0].startswith("'2.bias': hooks on the gradient before it is averaged.")
    assert "register_post_average_grad_hook" in said[0]
    assert caught[0].filename == __file__


def test_without_hooks_there_is_no_warning() -> None:
    """The reducer's own are none; nor are those of torch's optimizers in backward, which are taken over."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, when it is loaded
        from torch.distributed.optim import _apply_optimizer_in_backward

    def body(group: ProcessGroup) -> None:
        module = model()
        _apply_optimizer_in_backward(torch.optim.SGD, module[0].parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(module, process_group=group)
        second = DistributedDataParallel(module, process_group=group)
        for step in range(3):
            for one in (ddp, second):
                one(batch(0, step)).sum().backward()

    run_ranks(1, body)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_torchs_optimizers_in_backward_that_are_attached_later_step_with_averages(options: dict[str, Any], after: int) -> None:
    """Also a second optimizer of the same parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, when it is loaded
        from torch.distributed.optim import _apply_optimizer_in_backward
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group, **options)
        whole = copy.deepcopy(first)
        for _ in range(after):
            ddp(batch(group.rank, 0)).sum().backward()
        for rates in ([0.1], [0.1, 0.05]):
            _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": rates[-1]})
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(group.rank, step)).square().sum().backward()
                whole.zero_grad()
                for rank in range(2):
                    (whole(batch(rank, step)).square().sum() / 2).backward()
                for rate in rates:
                    torch.optim.SGD(whole.parameters(), lr=rate).step()
        torch.testing.assert_close(list(ddp.module.parameters()), list(whole.parameters()))

    run_ranks(2, body)


@pytest.mark.parametrize(
    "takes_off", [lambda p: p._in_backward_optimizers.clear(), lambda p: delattr(p, "_in_backward_optimizers")]
)
def test_torchs_optimizers_in_backward_may_be_replaced(takes_off: Callable[[Any], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, when it is loaded
        from torch.distributed.optim import _apply_optimizer_in_backward
    first = model()

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(copy.deepcopy(first), process_group=group)
        whole = copy.deepcopy(first)
        for step, rate in enumerate([0.1, 0.05]):
            for parameter in ddp.parameters() if step else ():
                takes_off(parameter)
            _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": rate})
            ddp(batch(group.rank, step)).square().sum().backward()
            whole.zero_grad()
            for rank in range(2):
                (whole(batch(rank, step)).square().sum() / 2).backward()
            torch.optim.SGD(whole.parameters(), lr=rate).step()
        torch.testing.assert_close(list(ddp.module.parameters()), list(whole.parameters()))

    run_ranks(2, body)


def test_a_step_in_such_a_hook_names_the_parameter() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        for parameter in ddp.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())  # type: ignore[misc]
        with pytest.raises(MisuseError, match=r"parameter '\S+' was changed before its gradient was averaged"):
            ddp(batch(0, 0)).sum().backward()

    run_ranks(1, body)


# ---- the comparison of replicas ----

TENSORS = [
    torch.arange(1000, dtype=torch.float32),
    torch.linspace(-1, 1, 70_001, dtype=torch.float64),
    torch.arange(77, dtype=torch.bfloat16),
    torch.randn(33, 5, generator=torch.Generator().manual_seed(1)).to(torch.complex64),
    torch.arange(5) % 2 == 0,
    torch.zeros(3, 4).to(memory_format=torch.contiguous_format)[:, :2],
    torch.zeros(()),
    torch.arange(9).to(torch.bfloat16)[1:5],  # begins at an address in its storage that is no multiple of four
    torch.arange(9).to(torch.bfloat16)[1:4],
    torch.arange(4.0)[::3][:1],  # contiguous for torch, with a stride of 3
    torch.arange(30.0).as_strided((1, 1), (5, 3)),
    torch.zeros(0, 3),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda one: f"{one.dtype}{list(one.shape)}")
def test_a_hash_sees_any_element_and_its_place(tensor: torch.Tensor) -> None:
    digest = ReplicaHash()
    (same,) = digest([tensor])
    assert len(same) == HASH_BYTES
    assert ReplicaHash()([tensor.clone()]) == [same], "the same on every rank"
    places = {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else set()
    found = {same}
    for place in places:
        other = tensor.clone().reshape(-1)
        other[place] = ~other[place] if other.dtype is torch.bool else other[place] + 1
        found.update(digest([other]))
    assert len(found) == 1 + len(places)


def test_signs_that_differ_in_pairs_are_seen() -> None:
    """Where a hash adds the lanes up, two changes of the highest bit cancel out."""
    digest = ReplicaHash()
    tensor = torch.arange(1.0, 9.0, dtype=torch.float64)
    found = set(digest([tensor]))
    for first, second in itertools.combinations(range(8), 2):
        other = tensor.clone()
        other[first] *= -1
        other[second] *= -1
        found.update(digest([other]))
    assert len(found) == 1 + 28
    assert digest([tensor.flip(0)]) != digest([tensor])


def test_the_first_that_differs_is_named_with_the_ranks() -> None:
    a, b, c = (bytes([number]) * HASH_BYTES for number in range(3))
    assert "parameter 'two' on rank(s) 1, 3 is not that of rank 0; 2 of 3 parameters differ" in difference(
        ["one", "two", "three"], [a + b + c, a + c + c, a + b + a, a + a + c]
    )
    assert "different numbers of parameters: 2, 1" in difference(["one", "two"], [a + b, a])


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_replicas_that_differ_are_an_error_on_all_ranks(odd: int) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        ddp.check_replicas(2)
        for step in range(4):
            ddp(batch(group.rank, step)).sum().backward()
        if group.rank == odd:
            with torch.no_grad():
                ddp.module[2].weight[1, 2] += 1e-12  # type: ignore[index, operator]
        ddp(batch(group.rank, 4)).sum().backward()
        with pytest.raises(DisagreementError) as caught:
            ddp(batch(group.rank, 5)).sum().backward()
        others = "1, 2" if odd == 0 else str(odd)
        assert f"parameter '2.weight' on rank(s) {others} is not that of rank 0; 1 of 4 parameters differ" in str(caught.value)
        assert "after 6 averaged backwards" in str(caught.value)
        assert "equal after 4" in str(caught.value)

    run_ranks(3, body)


def test_the_variable_asks_for_it_and_must_be_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVERY_VARIABLE, "1")

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        with torch.no_grad():
            ddp.module[0].bias += group.rank  # type: ignore[operator, union-attr]
        with pytest.raises(DisagreementError, match=r"parameter '0.bias' on rank\(s\) 1"):
            ddp(batch(group.rank, 0)).sum().backward()

    run_ranks(2, body)
    monkeypatch.setenv(EVERY_VARIABLE, "0")
    with pytest.raises(InvalidArgumentError, match=f"{EVERY_VARIABLE}: expected a number of steps of at least 1"):
        run_ranks(1, body)


def test_it_goes_on_in_another_group_and_counts_anew() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        ddp.check_replicas(2)
        ddp(batch(group.rank, 0)).sum().backward()
        smaller = group.split(0 if group.rank else None)
        if smaller is None:
            return
        ddp.update_process_group(smaller)
        if group.rank == 2:
            with torch.no_grad():
                ddp.module[2].weight[1, 2] += 1e-12  # type: ignore[index, operator]
        ddp(batch(group.rank, 1)).sum().backward()
        with pytest.raises(DisagreementError, match=r"parameter '2.weight' on rank\(s\) 1.*after 2 averaged backwards"):
            ddp(batch(group.rank, 2)).sum().backward()
        smaller.close()

    run_ranks(3, body)


def test_it_ends_in_another_group_whose_ranks_differ_in_it(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: ProcessGroup) -> None:
        alone = group.split(group.rank)
        assert alone is not None
        ddp = DistributedDataParallel(model(), process_group=alone)
        if group.rank == 1:
            ddp.check_replicas(1)
        ddp.update_process_group(group)
        if group.rank == 1:
            with torch.no_grad():
                ddp.module[2].weight[1, 2] += 1e-12  # type: ignore[index, operator]
        ddp(batch(group.rank, 0)).sum().backward()
        alone.close()

    run_ranks(2, body)
    assert "check_replicas ends" in caplog.text
    assert "(rank 0: None, rank 1: 1)" in caplog.text
    assert "watch_stragglers" not in caplog.text


def test_within_join_it_ends() -> None:
    """Ranks without inputs do not step."""

    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(model(), process_group=group)
        ddp.check_replicas(1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 + group.rank):
                optimizer.zero_grad()
                ddp(batch(group.rank, step)).square().sum().backward()
                optimizer.step()

    run_ranks(2, body)


def test_a_hash_does_not_depend_on_torchs_default_device() -> None:
    tensors = [torch.arange(100.0)]
    expected = ReplicaHash()(tensors)
    with torch.device("meta"):
        assert ReplicaHash()(tensors) == expected
