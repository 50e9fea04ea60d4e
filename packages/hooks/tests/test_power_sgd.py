from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup, RoundRobinGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    Phase,
    PowerSGDState,
    ScheduleState,
    allreduce_hook,
    batched_powerSGD_hook,
    merge_states,
    powerSGD_hook,
)
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks

VARIANTS = [powerSGD_hook, batched_powerSGD_hook]
SHAPES = {"a": (12, 10), "b": (12, 10), "bias": (12,), "conv": (8, 4, 3, 3)}


class Model:
    """Parameters of one rank, and gradients that differ by rank, step and index."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32, shapes: dict[str, Any] | None = None) -> None:
        self.parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in (shapes or SHAPES).items()}
        self.rank = rank

    def gradients(self, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + step)
        return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.parameters.values()]

    def bucket(self, group: ProcessGroup, gradients: list[torch.Tensor]) -> FakeBucket:
        return FakeBucket(gradients, group, parameters=list(self.parameters.values()))

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.parameters.items())


def state_for(model: Model | None = None, **settings: Any) -> PowerSGDState:
    """Compresses from the first step on."""
    state = PowerSGDState(None, **{"start_powerSGD_iter": 2, **settings}, named_parameters=model.named() if model else None)
    state.iter = 2
    return state


def low_rank(rank: int, shape: tuple[int, ...], of_rank: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every rank's has the same column space, so that the mean is of that rank, too."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 77 * (rank + 1))
    left = torch.randn(shape[0], of_rank, generator=shared, dtype=torch.float64)
    right = torch.randn(of_rank, math.prod(shape[1:]), generator=own, dtype=torch.float64)
    return (left @ right).view(shape).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("rank_of_matrices", [1, 2, 4])
@pytest.mark.parametrize("together", [False, True])
def test_matrices_of_the_rank_are_reproduced(world_size: int, rank_of_matrices: int, together: bool) -> None:
    shapes = [(20, 15), (20, 15), (20, 15), (9, 30)]
    scales = [1.0, 1000.0, 0.001, 1.0]

    def terms(rank: int) -> list[torch.Tensor]:
        return [
            scale * low_rank(rank, s, rank_of_matrices, i, torch.float64)
            for i, (s, scale) in enumerate(zip(shapes, scales, strict=True))
        ]

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        settings = {"batch_tensors_with_same_shape": together, "min_compression_rate": 1}
        state = state_for(matrix_approximation_rank=rank_of_matrices, **settings)
        bucket = FakeBucket(terms(group.rank), group)
        powerSGD_hook(state, bucket).wait()
        assert state.compression_stats()[0] > 1, "not compressed at all"
        return bucket.gradients()

    results = run_ranks(world_size, body)
    for number in range(len(shapes)):
        mean = torch.stack([terms(rank)[number] for rank in range(world_size)]).mean(0)
        for result in results:
            torch.testing.assert_close(result[number], mean, rtol=1e-9, atol=1e-9 * scales[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hook", VARIANTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_went_in_is_what_came_out_and_the_error(world_size: int, hook: Any, dtype: torch.dtype) -> None:
    def body(group: ProcessGroup) -> torch.Tensor:
        model = Model(group.rank, dtype)
        state = state_for(model, matrix_approximation_rank=2)
        errors: dict[str, torch.Tensor] = {}
        for step in range(4):
            gradients = model.gradients(step)
            bucket = model.bucket(group, [g.clone() for g in gradients])
            result = hook(state, bucket).wait()
            assert result is bucket.buffer()
            assert result.dtype == dtype
            before, errors = errors, state.error_feedback.state_dict()
            for name, gradient, out in zip(SHAPES, gradients, bucket.gradients(), strict=True):
                if name not in errors:
                    continue
                given = gradient.to(errors[name].dtype) + before.get(name, 0)
                tolerance = {"rtol": 0.0, "atol": 0.05} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(out.to(errors[name].dtype) + errors[name], given, **tolerance)
                assert errors[name].abs().max() > 0.1, "nothing was left out: not compressed"
            assert {"a", "b", "conv"} <= errors.keys()
            assert (torch.linalg.norm(bucket.buffer().double())) > 0
        return bucket.buffer()

    for result in (results := run_ranks(world_size, body)):
        assert torch.equal(result, results[0]), "all ranks end with the same bits"


@pytest.mark.parametrize("hook", VARIANTS)
def test_before_its_start_it_is_a_plain_average(hook: Any) -> None:
    def body(group: ProcessGroup) -> int:
        model, state = Model(group.rank), PowerSGDState(None, 1, 2)
        for step in range(2):
            bucket = model.bucket(group, model.gradients(step))
            hook(state, bucket).wait()
            mean = sum(torch.cat([g.reshape(-1) for g in Model(rank).gradients(step)]) for rank in range(2)) / 2
            torch.testing.assert_close(bucket.buffer(), mean)
        hook(state, model.bucket(group, model.gradients(2))).wait()
        return len(state.error_feedback)

    assert min(run_ranks(2, body)) > 0


@pytest.mark.parametrize("hook", VARIANTS)
@pytest.mark.parametrize("groups_in_turn", [0, 2])
def test_buckets_in_flight_are_reduced_in_one_order_on_every_rank(hook: Any, groups_in_turn: int) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        if groups_in_turn:
            group = RoundRobinGroup([part for _ in range(groups_in_turn) if (part := group.split(0)) is not None])
        shapes = {f"w{i}": (16 + 4 * i, 16) for i in range(6)}
        model = Model(group.rank, shapes=shapes)
        state = state_for(model)
        for step in range(5):
            gradients, parameters = model.gradients(step), list(model.parameters.values())
            buckets = [
                FakeBucket([gradient], group, parameters=[parameter], index=i, is_last=i == 5)
                for i, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True))
            ]
            futures = [hook(state, bucket) for bucket in buckets]
            for future in futures:
                future.wait()
        assert state.iter == 7
        return [bucket.buffer() for bucket in buckets]

    results = run_ranks(3, body)
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert torch.equal(ours, theirs)


# ---- state ----


def steps(group: ProcessGroup, hook: Any, model: Model, state: PowerSGDState, numbers: range) -> list[torch.Tensor]:
    out = []
    for step in numbers:
        bucket = model.bucket(group, model.gradients(step))
        out.append(hook(state, bucket).wait().clone())
    return out


def saved_and_loaded(state: PowerSGDState) -> Any:
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("hook", VARIANTS)
@pytest.mark.parametrize(
    "settings", [{}, {"warm_start": False}, {"use_error_feedback": False}], ids=["all", "cold", "forgetful"]
)
def test_resumed_on_as_many_ranks_it_goes_on_bitwise(hook: Any, settings: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model, **settings)
        steps(group, hook, model, state, range(3))
        saved = saved_and_loaded(state)
        expected = steps(group, hook, model, state, range(3, 6))
        again = Model(group.rank)
        resumed = PowerSGDState(None, start_powerSGD_iter=2, **settings, named_parameters=again.named(), random_seed=9)
        resumed.load_state_dict(saved)
        for ours, theirs in zip(steps(group, hook, again, resumed, range(3, 6)), expected, strict=True):
            assert torch.equal(ours, theirs)

    run_ranks(2, body)


def test_what_is_remembered_follows_the_parameters_into_another_layout_of_buckets() -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        one, other = state_for(model), state_for(model)
        steps(group, powerSGD_hook, model, one, range(2))
        other.load_state_dict(one.state_dict())
        expected = model.bucket(group, model.gradients(2))
        powerSGD_hook(one, expected).wait()
        parts = list(zip(model.gradients(2), model.parameters.values(), strict=True))
        buckets = [FakeBucket([g], group, parameters=[p], index=i, is_last=i == 3) for i, (g, p) in enumerate(reversed(parts))]
        for future in [powerSGD_hook(other, bucket) for bucket in buckets]:
            future.wait()
        for bucket, gradient in zip(buckets, reversed(expected.gradients()), strict=True):
            torch.testing.assert_close(bucket.gradients()[0], gradient)

    run_ranks(2, body)


def test_parameters_without_names_are_numbered_in_the_first_step_also_if_that_is_a_plain_one() -> None:
    """DDP orders its buckets anew after the first step; a run that is resumed compresses in that first step already."""

    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = PowerSGDState(None, start_powerSGD_iter=2)
        steps(group, powerSGD_hook, model, state, range(2))
        pairs = list(zip(model.gradients(2), model.parameters.values(), strict=True))[::-1]
        powerSGD_hook(state, FakeBucket([g for g, _ in pairs], group, parameters=[p for _, p in pairs])).wait()
        shapes = {name: tuple(error.shape) for name, error in state.error_feedback.state_dict().items()}
        assert shapes == {"parameter 0": (12, 10), "parameter 1": (12, 10), "parameter 3": (8, 4, 3, 3)}

    run_ranks(1, body)


def test_merged_states_fit_any_number_of_ranks_and_keep_the_mean_of_the_errors() -> None:
    def train(group: ProcessGroup) -> dict[str, Any]:
        model = Model(group.rank)
        state = state_for(model)
        steps(group, powerSGD_hook, model, state, range(3))
        return state.state_dict()

    saved = run_ranks(3, train)
    merged = merge_states(saved)
    for name, error in merged["errors"].items():
        torch.testing.assert_close(error, sum(state["errors"][name] for state in saved) / 3)
    # Each rank's state may be on another device.
    elsewhere = {name: error.to("meta") for name, error in saved[0]["errors"].items()}
    on_first = merge_states([{**saved[0], "errors": elsewhere}, *saved[1:]])["errors"]
    assert {error.device.type for error in on_first.values()} == {"meta"}

    def resume(group: ProcessGroup) -> torch.Tensor:
        model = Model(group.rank)
        state = state_for(model)
        state.load_state_dict(merged)
        assert state.iter == 5
        return steps(group, powerSGD_hook, model, state, range(3, 5))[-1]

    results = run_ranks(2, resume)
    assert torch.equal(results[0], results[1])

    def refuse(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model)
        state.load_state_dict(saved[group.rank])
        with pytest.raises(MisuseError, match=r"error feedback of rank \d of 3; .*merge_states"):
            steps(group, powerSGD_hook, model, state, range(3, 4))

    run_ranks(2, refuse)


def test_a_state_of_rank_0_that_all_ranks_load_starts_the_error_feedback_of_the_others() -> None:
    """The pattern of torch's documentation."""

    def train(group: ProcessGroup) -> dict[str, Any]:
        model = Model(group.rank)
        state = state_for(model)
        steps(group, powerSGD_hook, model, state, range(3))
        return state.state_dict()

    saved = run_ranks(3, train)[0]

    def resume(group: ProcessGroup) -> torch.Tensor:
        model = Model(group.rank)
        state = state_for(model)
        state.load_state_dict(saved)
        state.enter(group)
        errors = state.state_dict()["errors"]
        assert errors.keys() == (saved["errors"].keys() if group.rank == 0 else set())
        assert all(torch.equal(error, saved["errors"][name]) for name, error in errors.items())
        return steps(group, powerSGD_hook, model, state, range(3, 5))[-1]

    with pytest.warns(UserWarning, match="begins its own error feedback at zero") as caught:
        results = run_ranks(3, resume)
    assert all(torch.equal(buffer, results[0]) for buffer in results)
    assert sorted(str(entry.message).split(" loaded")[0] for entry in caught) == ["rank 1 of 3", "rank 2 of 3"]


def test_a_state_in_use_goes_on_in_a_group_of_another_size_and_a_loaded_one_does_not() -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model)
        steps(group, powerSGD_hook, model, state, range(3))
        kept = state.state_dict()["errors"]
        left = group.split(None if group.rank == 1 else 0)
        if left is None:
            return
        assert kept
        loaded, origin = state_for(model), pickle.loads(pickle.dumps(state.origin))
        loaded.load_state_dict(state.state_dict())
        state.enter(left)
        assert all(torch.equal(error, kept[name]) for name, error in state.state_dict()["errors"].items())
        with pytest.raises(MisuseError, match=f"holds the error feedback of rank {group.rank} of 3"):
            loaded.enter(left)
        with pytest.raises(MisuseError, match=f"holds the error feedback of rank {group.rank} of 3"):
            origin.settle(left.rank, left.size, state.error_feedback)

    run_ranks(3, body)


def test_states_of_different_steps_cannot_be_merged() -> None:
    one, other = state_for().state_dict(), {**state_for().state_dict(), "iter": 7}
    with pytest.raises(InvalidArgumentError, match=r"of step 2 with 0 errors and .* of step 7"):
        merge_states([one, other])
    with pytest.raises(InvalidArgumentError, match="at least one rank"):
        merge_states([])
    with pytest.raises(InvalidArgumentError, match=r"found a dict with 'state', 'outer'; of a DiLoCoOptimizer's state pass"):
        merge_states([{"state": {}, "outer": one}])


def test_pickling_leaves_out_the_group_and_keeps_the_rest() -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = PowerSGDState(group, 2, 2)
        state.iter = 2
        steps(group, powerSGD_hook, model, state, range(3))
        assert "process_group" not in state.__getstate__()
        again = pickle.loads(pickle.dumps(state))
        assert again.process_group is None
        assert copy.deepcopy(state).process_group is None
        assert again.matrix_approximation_rank == 2
        expected = steps(group, powerSGD_hook, model, state, range(3, 5))
        for ours, theirs in zip(steps(group, powerSGD_hook, Model(group.rank), again, range(3, 5)), expected, strict=True):
            assert torch.equal(ours, theirs)

    run_ranks(2, body)


def test_a_pickle_of_named_parameters_goes_on_with_the_models_own_names_and_is_refused_with_numbers() -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model)
        steps(group, powerSGD_hook, model, state, range(3))
        again, numbered = pickle.loads(pickle.dumps(state)), pickle.loads(pickle.dumps(state))
        expected = steps(group, powerSGD_hook, model, state, range(3, 5))
        other = Model(group.rank)
        for step, theirs in zip(range(3, 5), expected, strict=True):
            bucket = FakeBucket(other.gradients(step), group, parameters=list(other.parameters.values()), names=list(SHAPES))
            assert torch.equal(powerSGD_hook(again, bucket).wait(), theirs)
        with pytest.raises(MisuseError, match=r"'a' and 3 more only there, 'parameter 0' and 3 more.*pass named_parameters"):
            steps(group, powerSGD_hook, other, numbered, range(3, 4))

    run_ranks(2, body)


# ---- bad input ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank of 1 or above, found 0"),
        ({"matrix_approximation_rank": -3}, "matrix_approximation_rank of 1 or above, found -3"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter of 2 or above with use_error_feedback or warm_start.* found 1"),
        ({"start_powerSGD_iter": 0, "warm_start": False}, "start_powerSGD_iter of 2 or above.* found 0"),
        ({"start_powerSGD_iter": 1, "use_error_feedback": False}, "start_powerSGD_iter of 2 or above.* found 1"),
        ({"start_powerSGD_iter": -1, "use_error_feedback": False, "warm_start": False}, "start_powerSGD_iter of 0 or above"),
        ({"min_compression_rate": 0}, "min_compression_rate above 0, found 0"),
        ({"orthogonalization_epsilon": -1.0}, "orthogonalization_epsilon of 0 or above"),
        ({"random_seed": 2**32}, "random_seed from 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PowerSGDState(None, **settings)


def test_an_early_start_is_allowed_without_feedback_and_warm_start() -> None:
    assert PowerSGDState(None, 1, 0, use_error_feedback=False, warm_start=False).compresses


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank_of_factors", [1, 2, 4])
@pytest.mark.parametrize("hook", VARIANTS)
def test_nan_reaches_every_rank_and_leaves_no_trace(hook: Any, rank_of_factors: int, bad: float) -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model, matrix_approximation_rank=rank_of_factors, min_compression_rate=1)
        steps(group, hook, model, state, range(2))
        gradients = model.gradients(2)
        if group.rank == 1:
            gradients[0][3, 4] = bad
        bucket = model.bucket(group, gradients)
        hook(state, bucket).wait()
        assert bucket.gradients()[0].isnan().all()
        assert len(state.error_feedback) == 0
        assert len(state.factors) == 0
        for result in steps(group, hook, model, state, range(3, 5)):
            assert result.isfinite().all()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_error_is_sent_although_the_gradient_is_not_compressed_any_more(dtype: torch.dtype) -> None:
    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = Model(group.rank, dtype, {"a": (12, 10)})
        compressing = state_for(model, min_compression_rate=1)
        steps(group, powerSGD_hook, model, compressing, range(2))
        plain = state_for(model, min_compression_rate=100)
        plain.load_state_dict(compressing.state_dict())
        bucket = model.bucket(group, model.gradients(2))
        result = powerSGD_hook(plain, bucket).wait()
        assert len(plain.error_feedback) == 0
        return result.float(), (model.gradients(2)[0] + compressing.error_feedback.state_dict()["a"]).view(-1).float()

    (result, one), (_, other) = run_ranks(2, body)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(result, (one + other) / 2, rtol=tolerance, atol=tolerance)


class Stages(TorchDispatchMode):
    """Finds memory that one stage made and a later stage uses. The group runs each callback at once, as over NCCL."""

    def __init__(self, state: PowerSGDState, group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.number = 0
        self.made_in: dict[torch.UntypedStorage, int] = {}
        self.told: set[tuple[int, torch.UntypedStorage]] = set()
        self.untold: list[str] = []
        # torch tells the allocator about the results of collectives.
        self.reduced: set[torch.UntypedStorage] = set()
        reduce = group.all_reduce
        monkeypatch.setattr(
            group, "all_reduce", lambda wire, *a, **k: (self.reduced.add(wire.untyped_storage()), reduce(wire, *a, **k))[1]
        )
        stage = state.statistics.stage
        monkeypatch.setattr(state.statistics, "stage", lambda name: (setattr(self, "number", self.number + 1), stage(name))[1])
        for module in ("power_sgd", "batched_power_sgd"):
            monkeypatch.setattr(f"syncline.hooks.{module}.used_here", self.tell)

    def tell(self, tensors: Any) -> None:
        self.told |= {(self.number, tensor.untyped_storage()) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        used, made = (
            {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in ((args, kwargs), results)
        )
        for storage in used - self.reduced:
            if self.made_in.get(storage, self.number) < self.number and (self.number, storage) not in self.told:
                self.untold.append(f"stage {self.number}: {func} uses {storage.nbytes()} bytes of an earlier stage")
        for storage in made - used:
            self.made_in.setdefault(storage, self.number)
        return results


@pytest.mark.parametrize("settings", [{}, {"use_error_feedback": False, "warm_start": False}])
@pytest.mark.parametrize("hook", VARIANTS)
def test_the_allocator_is_told_which_memory_later_stages_use(
    hook: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the stages of a GPU run on different streams."""

    def body(group: ProcessGroup) -> None:
        model = Model(0)
        state = state_for(model, **settings)
        steps(group, hook, model, state, range(2))
        bucket = model.bucket(group, model.gradients(2))
        with Stages(state, group, monkeypatch) as seen:
            hook(state, bucket).wait()
        assert seen.number == 3
        assert seen.untold == []

    run_ranks(1, body)


@pytest.mark.parametrize("rank_of_factors", [1, 2, 4])
@pytest.mark.parametrize("hook", VARIANTS)
def test_errors_that_grow_make_no_half_infinite(hook: Any, rank_of_factors: int) -> None:
    gradient = (10000 * torch.randn(64, 64, generator=torch.Generator().manual_seed(3))).half()

    def body(group: ProcessGroup) -> None:
        model = Model(0, torch.float16, {"a": (64, 64)})
        state, total = state_for(model, matrix_approximation_rank=rank_of_factors), torch.zeros(64 * 64)
        for _ in range(30):
            total += hook(state, model.bucket(group, [gradient.clone()])).wait()
            assert total.isfinite().all()
        total += state.error_feedback.state_dict()["a"].view(-1)
        torch.testing.assert_close(total.view(64, 64) / 30, gradient.float(), rtol=0.0, atol=10.0)

    run_ranks(2, body)


def test_a_model_of_vectors_is_averaged_as_it_is() -> None:
    def body(group: ProcessGroup) -> tuple[torch.Tensor, PowerSGDState]:
        state = state_for()
        bucket = FakeBucket([torch.arange(5.0) + group.rank, torch.tensor(3.0 * group.rank)], group)
        return powerSGD_hook(state, bucket).wait(), state

    for result, state in run_ranks(2, body):
        assert result.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 1.5]
        assert state.compression_stats() == (1.0, 6, 6)
        assert len(state.error_feedback) == 0


@pytest.mark.parametrize("hook", VARIANTS)
@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_bucket_of_one_element_is_averaged(hook: Any, shape: tuple[int, ...]) -> None:
    def body(group: ProcessGroup) -> float:
        return float(hook(state_for(), FakeBucket([torch.full(shape, 1.0 + group.rank)], group)).wait())

    assert run_ranks(3, body) == pytest.approx([2.0] * 3)


@pytest.mark.parametrize("hook", VARIANTS)
def test_an_empty_bucket_communicates_nothing_and_counts_as_a_step(hook: Any) -> None:
    def body(group: ProcessGroup) -> None:
        state = state_for()
        if group.rank == 0:  # alone: nobody answers
            assert hook(state, FakeBucket([], group)).wait().numel() == 0
            assert state.iter == 3

    run_ranks(2, body)


def test_an_empty_parameter_among_others_does_no_harm() -> None:
    def body(group: ProcessGroup) -> None:
        bucket = FakeBucket([torch.zeros(0, 4), torch.ones(12, 12), torch.zeros(3, 0)], group)
        torch.testing.assert_close(powerSGD_hook(state_for(), bucket).wait(), torch.ones(144))

    run_ranks(2, body)


@pytest.mark.parametrize("hook", VARIANTS)
def test_gradients_of_zeros_stay_zeros_and_the_factors_keep_their_rank(hook: Any) -> None:
    def body(group: ProcessGroup) -> None:
        model = Model(group.rank)
        state = state_for(model, matrix_approximation_rank=2)
        bucket = model.bucket(group, [torch.zeros(shape) for shape in SHAPES.values()])
        assert hook(state, bucket).wait().count_nonzero() == 0
        shape = SHAPES["a"]
        for step in range(8):  # warm: from a factor of zeros
            gradients = [low_rank(group.rank, s, 2, step) if len(s) > 1 else torch.zeros(s) for s in SHAPES.values()]
            bucket = model.bucket(group, gradients)
            powerSGD_hook(state, bucket).wait()
        mean = sum(low_rank(rank, shape, 2, 7) for rank in range(2)) / 2
        if hook is powerSGD_hook:
            assert torch.linalg.matrix_rank(bucket.gradients()[0]) == 2
            assert torch.linalg.norm(bucket.gradients()[0] - mean) < 3 * torch.linalg.norm(mean)

    run_ranks(2, body)


def of_torch() -> object:
    kind = type("PowerSGDState", (), {})
    kind.__module__ = "torch.distributed"
    return kind()


@pytest.mark.parametrize(
    ("state", "found"),
    [(None, "NoneType"), (torch.zeros(1), r"torch\.Tensor"), (of_torch(), r"torch\.distributed\.PowerSGDState")],
    ids=["none", "tensor", "torch's"],
)
@pytest.mark.parametrize("hook", VARIANTS)
def test_another_state_is_refused_also_of_a_class_with_the_same_name(hook: Any, state: Any, found: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match=f"expected a PowerSGDState as the hook's state, found <class '{found}'>: make"):
            hook(state, FakeBucket([torch.ones(2)], group))

    run_ranks(1, body)


@pytest.mark.parametrize("hook", VARIANTS)
def test_integers_are_refused(hook: Any) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match=r"floating-point dtype for PowerSGD, found torch\.int64"):
            hook(state_for(), FakeBucket([torch.ones(2, dtype=torch.int64)], group))

    run_ranks(1, body)


def trained(names: bool = True) -> dict[str, Any]:
    def body(group: ProcessGroup) -> dict[str, Any]:
        model = Model(group.rank)
        state = state_for(model if names else None)
        steps(group, powerSGD_hook, model, state, range(2))
        return state.state_dict()

    return run_ranks(1, body)[0]


def test_the_state_of_another_model_is_refused_by_name_or_shape() -> None:
    saved = trained()
    with pytest.raises(MisuseError, match=r"another model: it knows parameter 'a', this one has only 'x'"):
        state_for(Model(0, shapes={"x": (12, 10)})).load_state_dict(saved)
    with pytest.raises(MisuseError, match=r"another model: parameter 'a' is \[12, 10\] there and \[12, 11\] here"):
        state_for(Model(0, shapes={**SHAPES, "a": (12, 11)})).load_state_dict(saved)


def test_with_numbered_parameters_the_first_gradient_of_another_shape_tells() -> None:
    saved = trained(names=False)

    def body(group: ProcessGroup) -> None:
        model = Model(group.rank, shapes={**SHAPES, "a": (12, 11)})
        state = state_for()
        state.load_state_dict(saved)
        with pytest.raises(MisuseError, match=r"parameter 'parameter 0' is \[12, 10\] there and \[12, 11\] here"):
            powerSGD_hook(state, model.bucket(group, model.gradients(0))).wait()

    run_ranks(1, body)


def test_a_state_of_other_settings_or_of_another_kind_is_refused() -> None:
    saved = trained()
    with pytest.raises(MisuseError, match="saved PowerSGD state has matrix_approximation_rank=1, this one 2"):
        state_for(Model(0), matrix_approximation_rank=2).load_state_dict(saved)
    with pytest.raises(MisuseError, match="expected a state of kind 'PowerSGD' in format 2, found kind None"):
        state_for().load_state_dict({"weight": torch.zeros(1)})


def test_a_parameter_without_a_name_is_refused_if_names_were_given() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match=r"shape \[3, 3\] that is not among the 4 named_parameters"):
            powerSGD_hook(state_for(Model(0)), FakeBucket([torch.ones(3, 3)], group))

    run_ranks(1, body)


def test_statistics_count_what_was_sent() -> None:
    def body(group: ProcessGroup) -> None:
        state = state_for()
        powerSGD_hook(state, FakeBucket([torch.ones(100, 50), torch.ones(7)], group)).wait()
        assert state.statistics.bytes_before == 4 * 5007
        assert state.statistics.bytes_sent == 4 * (150 + 7)
        assert state.statistics.ratio == 5007 / 157
        assert list(state.statistics.seconds_by_stage) == ["compress", "second factor", "decompress"]

    run_ranks(2, body)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("hook", VARIANTS)
def test_a_backward_inside_autocast_changes_nothing(hook: Any, columns: int) -> None:
    """Matrix products would return bfloat16."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        results = []
        for is_inside in (False, True):
            model = Model(group.rank)
            state = state_for(model, matrix_approximation_rank=columns)
            for step in range(3):
                bucket = model.bucket(group, model.gradients(step))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_inside):
                    hook(state, bucket).wait()
            results.append(bucket.buffer().clone())
        return results

    for outside, inside in run_ranks(2, body):
        assert torch.equal(outside, inside)


@pytest.mark.parametrize("hook", VARIANTS)
def test_torchs_default_device_has_no_effect(hook: Any) -> None:
    def body(group: ProcessGroup) -> dict[str, Any]:
        model = Model(group.rank)
        state, bucket = state_for(model), model.bucket(group, model.gradients(0))
        with torch.device("meta"):
            hook(state, bucket).wait()
            saved = state.state_dict()
        assert bucket.buffer().isfinite().all()
        return saved

    assert all(saved["seeds"].is_cpu for saved in run_ranks(2, body))


def test_numbers_of_numpy_give_a_state_that_torch_loads_safely() -> None:
    settings: dict[str, Any] = {
        "matrix_approximation_rank": np.int64(2),
        "start_powerSGD_iter": np.int64(20),
        "min_compression_rate": np.float64(1.5),
        "use_error_feedback": np.bool_(True),
        "random_seed": np.int32(7),
    }
    state, same = PowerSGDState(**settings), PowerSGDState(random_seed=7)
    assert torch.equal(state.seeds.state(), same.seeds.state())
    schedule = ScheduleState([Phase(0, allreduce_hook), Phase(np.int64(5), powerSGD_hook, state)])  # type: ignore[arg-type]
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    schedule.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("rate", [np.array(1.5), torch.tensor(1.5)])
def test_a_setting_may_be_an_array_or_a_tensor_of_one_number(rate: Any) -> None:
    assert PowerSGDState(min_compression_rate=rate).min_compression_rate == 1.5


def test_a_seed_that_is_no_integer_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected an integer as random_seed, found float"):
        PowerSGDState(random_seed=1.5)  # type: ignore[arg-type]
