from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup, ReduceOp, exchange_objects
from syncline.collectives.testing import run_ranks
from syncline.hooks import DiLoCoOptimizer, Int4, Int8, OneBit, RandomK, Sites, TopK, merge_states

pytestmark = pytest.mark.ranks

STEPS = 13


def small_model() -> torch.nn.Module:
    """The same on every rank; from a generator of its own, since ranks are threads that share torch's."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return model


def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range = range(STEPS)) -> None:
    """Other data on each rank and in each step."""
    for step in steps:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


# ---- against what is written out on one process ----


def reference(
    ranks: int,
    *,
    sync_every: int,
    turns: dict[int, list[int]],
    overlap: int,
    mixing: float,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> list[list[torch.Tensor]]:
    """DiLoCo of all ranks in one process, with torch's SGD as the outer optimizer. `turns`: step mod H to parameters."""
    models = [small_model() for _ in range(ranks)]
    optimizers = [inner(model) for model in models]
    parameters = [list(model.parameters()) for model in models]
    anchors = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters[0]]
    outer = [torch.optim.SGD([anchor], lr, momentum, nesterov=momentum > 0) for anchor in anchors]
    under_way: dict[int, tuple[int, torch.Tensor]] = {}
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            train(model, optimizers[rank], rank, range(step - 1, step))
        for index in turns.get(step % sync_every, []):
            mean = torch.stack([parameters[rank][index].detach() for rank in range(ranks)]).mean(0)
            under_way[index] = step + overlap, mean
        for index, (due, mean) in list(under_way.items()):
            if due == step:
                del under_way[index]
                anchors[index].grad = anchors[index].detach() - mean
                outer[index].step()
                with torch.no_grad():
                    for rank in range(ranks):
                        parameters[rank][index].copy_(mixing * parameters[rank][index] + (1 - mixing) * anchors[index])
    return [values(model) for model in models]


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        ({"sync_every": 5}, {0: [0, 1, 2, 3]}),
        ({"sync_every": 5, "outer_momentum": 0.0}, {0: [0, 1, 2, 3]}),
        ({"sync_every": 4, "fragments": [["0.weight", "2.bias"], ["0.bias", "2.weight"]]}, {2: [0, 3], 0: [1, 2]}),
        (
            {"sync_every": 4, "fragments": [["0.weight", "2.bias"], ["0.bias", "2.weight"]], "overlap_steps": 2, "mixing": 0.5},
            {2: [0, 3], 0: [1, 2]},
        ),
    ],
)
def test_it_is_what_is_written_out_on_one_process(options: dict[str, Any], turns: dict[int, list[int]]) -> None:
    expected = reference(
        3,
        sync_every=options["sync_every"],
        turns=turns,
        overlap=options.get("overlap_steps", 0),
        mixing=options.get("mixing", 0.0),
        momentum=options.get("outer_momentum", 0.9),
    )

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, **options)
        train(model, optimizer, group.rank)
        return values(model)

    for found, wanted in zip(run_ranks(3, body), expected, strict=True):
        assert close(found, wanted)


def test_one_rank_with_an_outer_step_of_one_is_the_inner_optimizer_bitwise() -> None:
    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, alone = small_model(), small_model()
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), group, sync_every=1, outer_lr=1.0, outer_momentum=0.0
        )
        train(model, optimizer, 0)
        train(alone, inner(alone), 0)
        return values(model), values(alone)

    [(found, wanted)] = run_ranks(1, body)
    assert equal(found, wanted)


# ---- replicas ----


@pytest.mark.parametrize("compressor", [None, Int8(), Int4(per_channel=True)])
@pytest.mark.parametrize("fragments", [1, 3])
def test_replicas_are_bitwise_equal_after_an_outer_step(compressor: Any, fragments: int) -> None:
    def body(group: ProcessGroup) -> tuple[bool, bool]:
        model = small_model()
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), group, sync_every=6, fragments=fragments, compressor=compressor
        )
        train(model, optimizer, group.rank, range(7))
        before = exchange_objects(values(model), group=group)
        optimizer.synchronize()
        after = exchange_objects(values(model), group=group)
        return equal(*before), equal(*after)

    assert run_ranks(2, body) == [(False, True)] * 2


@pytest.mark.parametrize("compressor", [None, Int8(), OneBit(), TopK(0.5), RandomK(0.5)])
def test_a_fragment_may_have_parameters_of_several_dtypes(compressor: Any) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        named = [(f"{dtype} {n}", torch.nn.Parameter(torch.ones(n, 4, dtype=dtype))) for n in (3, 0) for dtype in dtypes]
        parameters = [parameter for _, parameter in named]
        optimizer = DiLoCoOptimizer(
            torch.optim.SGD(parameters, lr=0.5),
            named,
            group,
            sync_every=1,
            outer_lr=1.0,
            outer_momentum=0.0,
            compressor=compressor,
        )
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + group.rank)
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    first, second = run_ranks(2, body)
    assert equal(first, second)
    # Two steps of 0.5 times the mean gradient 1.5. Top-k and random-k have sent only a half of the steps so far.
    if not isinstance(compressor, TopK | RandomK):
        assert all((parameter == -0.5).all() for parameter in first)


@pytest.mark.parametrize("compressor", [None, Int4()])
def test_replicas_are_bitwise_equal_after_each_outer_step_and_only_then(compressor: Any) -> None:
    def body(group: ProcessGroup) -> list[bool]:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=4, compressor=compressor)
        are_equal = []
        for step in range(12):
            train(model, optimizer, group.rank, range(step, step + 1))
            everyone = exchange_objects(values(model), group=group)
            are_equal.append(all(equal(everyone[0], other) for other in everyone))
        return are_equal

    assert run_ranks(3, body) == [[False, False, False, True] * 3] * 3


def test_seeds_that_differ_between_ranks_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), group, sync_every=2, compressor=RandomK(0.5), seed=group.rank
        )
        with pytest.raises(DisagreementError, match="random seed"):
            train(model, optimizer, group.rank, range(3))

    run_ranks(2, body)


def test_every_rank_begins_with_the_first_ones_parameters() -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        model = small_model()
        with torch.no_grad():
            next(model.parameters()).add_(group.rank)
        DiLoCoOptimizer(inner(model), model.named_parameters(), group)
        return values(model)

    for found in run_ranks(3, body):
        assert equal(found, values(small_model()))


def test_weights_loaded_before_the_first_step_are_no_outer_gradient() -> None:
    """Also if only the first rank loads them. The learning rate is 0, so no step changes them."""

    def body(group: ProcessGroup) -> None:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = DiLoCoOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), group, sync_every=2, fragments=1
        )
        if group.rank == 0:
            model.load_state_dict({"weight": torch.full((1, 2), 100.0)})
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert model.weight.tolist() == [[100.0, 100.0]]

    run_ranks(2, body)


def test_parameters_of_several_dtypes_are_averaged_in_float32_at_least() -> None:
    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        double = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optim = torch.optim.SGD([half, double], lr=1.0)
        named = {"half": half, "double": double}.items()
        optimizer = DiLoCoOptimizer(optim, named, group, sync_every=1, outer_lr=1.0, outer_momentum=0.0)
        half.grad = torch.full_like(half, -1.0 - group.rank)
        double.grad = torch.full_like(double, -1e-12 * (1 + group.rank))
        optimizer.step()
        return half.detach(), double.detach()

    for half, double in run_ranks(2, body):
        assert half.tolist() == [1.5] * 3
        assert double.tolist() == [1.5e-12] * 2


def test_sites_average_between_their_first_ranks_only() -> None:
    """Two sites of two ranks; ranks of a site see the same data, as if DDP had averaged their gradients."""

    def two(group: ProcessGroup) -> list[torch.Tensor]:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=3, overlap_steps=1, fragments=2)
        train(model, optimizer, group.rank)
        return values(model)

    def four(group: ProcessGroup) -> tuple[list[torch.Tensor], int]:
        sites = Sites(group, "ab"[group.rank // 2])
        assert (sites.number, sites.inside.size, sites.between is not None) == (2, 2, group.rank % 2 == 0)
        model = small_model()
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), sites=sites, sync_every=3, overlap_steps=1, fragments=2
        )
        train(model, optimizer, group.rank // 2)
        return values(model), optimizer.statistics.bytes_sent

    expected = run_ranks(2, two)
    for rank, (found, sent) in enumerate(run_ranks(4, four)):
        assert equal(found, expected[rank // 2])
        assert (sent > 0) == (rank % 2 == 0)


@pytest.mark.parametrize(
    "compressor",
    [None, Int8(), Int8(per_channel=True), Int4(), OneBit(), TopK(0.5), RandomK(1.0)],
    ids=lambda compressor: "none" if compressor is None else compressor.name,
)
@pytest.mark.parametrize("fragments", [1, [["empty"], ["weight"]]])
def test_a_parameter_without_elements_changes_nothing(compressor: Any, fragments: Any) -> None:
    def body(group: ProcessGroup, shapes: dict[str, tuple[int, ...]], fragments: Any) -> torch.Tensor:
        known = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
        optimizer = DiLoCoOptimizer(
            torch.optim.SGD(known.values(), lr=1.0),
            known.items(),
            group,
            sync_every=2,
            fragments=fragments,
            compressor=compressor,
        )
        for step in range(4):
            known["weight"].grad = torch.arange(6.0).view(2, 3) * (group.rank + 1) + step
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return known["weight"].detach()

    expected = run_ranks(2, body, {"weight": (2, 3)}, 1)
    for found, wanted in zip(run_ranks(2, body, {"empty": (0, 3), "weight": (2, 3)}, fragments), expected, strict=True):
        assert torch.equal(found, wanted)


# ---- bytes ----


def test_bytes_are_those_of_all_parameters_every_h_steps() -> None:
    def body(group: ProcessGroup) -> tuple[int, int]:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=5, fragments=2)
        train(model, optimizer, group.rank, range(10))
        return optimizer.statistics.bytes_sent, sum(parameter.nbytes for parameter in model.parameters())

    for sent, nbytes in run_ranks(2, body):
        assert sent == 2 * nbytes


@pytest.mark.parametrize(("compressor", "fewer"), [(None, 1), (Int8(), 3)])
def test_a_stream_sends_at_most_a_fragment_in_a_step(compressor: Any, fewer: int) -> None:
    """Eight layers of one size in eight fragments; Int8 sends a quarter, and its scales."""

    def body(group: ProcessGroup) -> tuple[int, int]:
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(8)])
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), group, sync_every=16, fragments=8, overlap_steps=2, compressor=compressor
        )
        sent = [0]
        for _ in range(32):
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            sent.append(optimizer.statistics.bytes_sent)
        return max(after - before for before, after in itertools.pairwise(sent)), 8 * 16 * 16 * 4

    for most, whole in run_ranks(2, body):
        assert 0 < fewer * most <= whole / 8


# ---- resuming ----


@pytest.mark.parametrize("compressor", [None, Int8()])
@pytest.mark.parametrize("stop", [4, 5, 6, 8])
def test_it_resumes_with_the_same_bits(compressor: Any, stop: int) -> None:
    """Also where an average is under way."""

    def make(group: ProcessGroup) -> tuple[torch.nn.Module, DiLoCoOptimizer]:
        model = small_model()
        return model, DiLoCoOptimizer(
            inner(model),
            model.named_parameters(),
            group,
            sync_every=4,
            fragments=2,
            overlap_steps=2,
            mixing=0.5,
            compressor=compressor,
        )

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model, optimizer = make(group)
        train(model, optimizer, group.rank, range(stop))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, group.rank, range(stop, STEPS))
        again, resumed = make(group)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, group.rank, range(stop, STEPS))
        return values(model), values(again)

    for found, wanted in run_ranks(2, body):
        assert equal(found, wanted)


def test_it_resumes_an_average_under_way_with_fewer_steps_between_averages() -> None:
    """The steps that the saved run has averaged count once, although the next average begins before that one was due."""

    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.zeros(10))

        def make(sync_every: int, overlap_steps: int) -> DiLoCoOptimizer:
            return DiLoCoOptimizer(
                torch.optim.SGD([parameter], lr=1.0),
                [("weight", parameter)],
                group,
                sync_every=sync_every,
                overlap_steps=overlap_steps,
                outer_lr=1.0,
                outer_momentum=0.0,
                compressor=TopK(0.5),
            )

        optimizer = make(8, 6)
        parameter.grad = -torch.ones(10)
        for _ in range(8):
            optimizer.step()
        saved = optimizer.state_dict()
        optimizer = make(2, 1)
        optimizer.load_state_dict(saved)
        parameter.grad.zero_()
        for _ in range(20):
            optimizer.step()
        optimizer.synchronize()
        assert parameter.tolist() == [8.0] * 10

    run_ranks(2, body)


def test_states_of_all_ranks_of_sites_merge_to_the_mean_of_the_first_ranks_errors() -> None:
    def make(group: ProcessGroup) -> tuple[torch.nn.Module, DiLoCoOptimizer]:
        model = small_model()
        sites = Sites(group, "ab"[group.rank // 2])
        return model, DiLoCoOptimizer(inner(model), model.named_parameters(), sites=sites, sync_every=2, compressor=Int4())

    def first(group: ProcessGroup) -> Any:
        model, optimizer = make(group)
        train(model, optimizer, group.rank // 2, range(2))
        return model.state_dict(), optimizer.state_dict()

    def second(group: ProcessGroup, saved: list[Any]) -> Any:
        model, optimizer = make(group)
        model.load_state_dict(saved[0][0])
        # Ranks 0 and 2 load their own states; ranks 1 and 3 load these, too.
        optimizer.load_state_dict(saved[group.rank // 2 * 2][1])
        train(model, optimizer, group.rank // 2, range(2, 4))
        return model.state_dict(), optimizer.state_dict()

    saved = run_ranks(4, first)
    for _ in range(2):
        outer = [copy.deepcopy(state["outer"]) for _, state in saved]
        merged = merge_states(outer)
        assert merged["rank"] is None
        for name, error in merged["errors"].items():
            assert error.abs().max() > 0
            assert torch.equal(error, (outer[0]["errors"][name] + outer[2]["errors"][name]) / 2)
        saved = run_ranks(4, second, saved)


def test_it_resumes_on_another_number_of_ranks() -> None:
    """From a state that was saved after an outer step: all replicas are equal then."""
    saved: dict[int, Any] = {}

    def first(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=4, compressor=Int8())
        train(model, optimizer, group.rank, range(8))
        saved[group.rank] = model.state_dict(), optimizer.state_dict()

    def second(group: ProcessGroup) -> list[torch.Tensor]:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=4, compressor=Int8())
        model.load_state_dict(saved[0][0])
        outer = merge_states([saved[0][1]["outer"], saved[1][1]["outer"]])
        optimizer.load_state_dict({**saved[0][1], "outer": outer})
        train(model, optimizer, group.rank, range(8, 12))
        return values(model)

    run_ranks(2, first)
    found = run_ranks(3, second)
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_a_state_of_another_model_or_optimizer_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=4, fragments=2, overlap_steps=2)
        with pytest.raises(MisuseError, match="expected a state of kind 'DiLoCo'"):
            optimizer.load_state_dict(inner(model).state_dict())
        train(model, optimizer, group.rank, range(4))
        state = optimizer.state_dict()
        coarser = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=4)
        before = copy.deepcopy(coarser.state_dict())
        with pytest.raises(MisuseError, match="has other fragments"):
            coarser.load_state_dict(state)
        assert coarser.steps == 0
        assert str(coarser.state_dict()) == str(before)
        wider = torch.nn.Linear(5, 8)
        other = DiLoCoOptimizer(inner(wider), [(f"0.{name}", p) for name, p in wider.named_parameters()], group)
        with pytest.raises(MisuseError, match="of another model"):
            other.load_state_dict(state)

    run_ranks(1, body)


def test_without_a_compressor_saved_errors_are_refused_because_they_would_be_lost() -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()
        optimizer = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=2, compressor=TopK(0.1))
        without = DiLoCoOptimizer(inner(model), model.named_parameters(), group, sync_every=2)
        train(model, optimizer, group.rank, range(1))
        without.load_state_dict(optimizer.state_dict())  # no average yet, so there are no errors
        train(model, optimizer, group.rank, range(1, 2))
        state = optimizer.state_dict()
        with pytest.raises(MisuseError, match="the saved state has error feedback, and this optimizer has compressor=None"):
            without.load_state_dict(state)
        assert without.steps == 1
        without.load_state_dict({**state, "outer": {**state["outer"], "errors": {}}})
        assert without.steps == 2

    run_ranks(2, body)


@pytest.mark.parametrize("other", [TopK(1.0), Int8()])
def test_another_compressor_sends_the_saved_errors(other: Any) -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()

        def optimizer_with(compressor: Any) -> DiLoCoOptimizer:
            settings: dict[str, Any] = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "compressor": compressor}
            return DiLoCoOptimizer(inner(model), model.named_parameters(), group, **settings)

        optimizer = optimizer_with(TopK(0.1))
        train(model, optimizer, group.rank, range(2))
        state = optimizer.state_dict()
        expected = {}
        for name, parameter in model.named_parameters():
            error = state["outer"]["errors"][name].clone()
            group.all_reduce(error, ReduceOp.AVG)
            assert error.abs().max() > 0.01
            expected[name] = parameter.detach() - error
        resumed = optimizer_with(other)
        resumed.load_state_dict(state)
        resumed.zero_grad()  # without gradients, the inner steps change nothing
        resumed.step()
        resumed.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-3)

    run_ranks(2, body)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every of 1 step or above"),
        ({"outer_lr": 0.0}, "outer_lr above 0"),
        ({"outer_lr": float("nan")}, "outer_lr above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum of 0 or above and below 1"),
        ({"sync_every": 3, "overlap_steps": 3}, "overlap_steps of 0 to 2"),
        ({"mixing": 0.5}, "without overlap_steps"),
        ({"mixing": 1.0, "overlap_steps": 1}, "mixing of 0 or above and below 1"),
        ({"fragments": 5}, "1 to 4 fragments"),
        ({"fragments": 0}, "1 to 4 fragments"),
        ({"fragments": [["0.weight"], ["0.bias", "2.bias"]]}, "look at '2.weight'"),
        ({"fragments": [["0.weight", "2.weight"], ["0.bias", "2.bias", "0.bias"]]}, "look at '0.bias'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()
        with pytest.raises(InvalidArgumentError, match=message):
            DiLoCoOptimizer(inner(model), model.named_parameters(), group, **options)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda optim, _named, group: DiLoCoOptimizer(optim, [], group), "found none"),
        (
            lambda optim, named, group: DiLoCoOptimizer(optim, named, group, sites=Sites(group, "a")),
            "found both",
        ),
        (
            lambda optim, named, group: DiLoCoOptimizer(optim, named, group).add_param_group({"params": []}),
            "takes no further parameters",
        ),
        (
            lambda optim, _named, group: DiLoCoOptimizer(optim, [("n", torch.zeros(1, dtype=torch.int64))], group),
            "'n' of torch.int64",
        ),
    ],
)
def test_what_it_cannot_synchronise_is_refused(make: Callable[..., object], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        model = small_model()
        with pytest.raises(MisuseError, match=message):
            make(inner(model), model.named_parameters(), group)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compressor": Int8(), "seed": 2**32}, "a seed from 0 to"),
        ({"compressor": Int8(), "seed": -1}, "a seed from 0 to"),
        ({"compressor": Int8}, r"a Compressor, such as Int8\(\), found <class"),
        ({"seed": 3}, "expected a compressor, which uses seed=3"),
    ],
)
def test_a_compressor_and_its_seed_are_checked_at_once(settings: dict[str, Any], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(InvalidArgumentError, match=message):
            DiLoCoOptimizer(inner, model.named_parameters(), group, **settings)

    run_ranks(1, body)


def test_numbers_of_numpy_give_a_state_that_torch_loads_safely(tmp_path: Path) -> None:
    def body(group: ProcessGroup) -> tuple[int, Any]:
        model = small_model()
        settings: Any = {
            "sync_every": np.int64(4),
            "overlap_steps": np.int64(2),
            "mixing": np.float64(0.5),
            "seed": np.int64(7),
        }
        optimizer = DiLoCoOptimizer(
            inner(model), model.named_parameters(), group, fragments=np.int64(2), compressor=RandomK(0.5), **settings
        )
        train(model, optimizer, group.rank, range(3))  # an average is in progress
        return len(optimizer.fragments), optimizer.state_dict()

    [(fragments, state)] = run_ranks(1, body)
    assert fragments == 2
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["outer"]["iter"] == 3
