from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import CompressionState, Int4, Int8, OneBit, PowerSGDState, RandomK, TopK, compression_hook, merge_states
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks

SHAPES = {"weight": (6, 5), "bias": (7,), "scale": (), "conv": (4, 3, 3, 3)}
COMPRESSORS = {
    "int8": Int8(),
    "int8-channels": Int8(per_channel=True),
    "int4": Int4(),
    "int4-channels": Int4(per_channel=True),
    "one-bit": OneBit(),
    "top": TopK(0.1),
    "random": RandomK(0.1),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS.keys())


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def reduce(state: CompressionState, group: ProcessGroup, given: list[torch.Tensor], known: dict[str, Any]) -> FakeBucket:
    bucket = FakeBucket(given, group, parameters=list(known.values()))
    assert compression_hook(state, bucket).wait() is bucket.buffer()
    return bucket


@every_compressor
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_went_in_is_what_was_sent_and_the_error(compressor: Any, dtype: torch.dtype) -> None:
    """On one rank what comes out is what this rank has sent."""

    def body(group: ProcessGroup) -> None:
        known = parameters(dtype)
        state = CompressionState(compressor, named_parameters=known.items())
        errors: dict[str, torch.Tensor] = {}
        for step in range(5):
            bucket = reduce(state, group, gradients(0, step, dtype), known)
            before, errors = errors, state.error_feedback.state_dict()
            for name, gradient, out in zip(SHAPES, gradients(0, step, dtype), bucket.gradients(), strict=True):
                given = gradient.to(errors[name].dtype) + before.get(name, 0)
                tolerance = 0.05 if dtype.itemsize == 2 else 1e-5
                torch.testing.assert_close(out.to(errors[name].dtype) + errors[name], given, rtol=0, atol=tolerance)
            assert errors["weight"].abs().max() > 1e-4, "nothing was left out: not compressed"
            assert bucket.buffer().dtype == dtype

    run_ranks(1, body)


@every_compressor
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_end_with_the_mean_of_what_was_sent_bit_by_bit(compressor: Any, world_size: int, dtype: torch.dtype) -> None:
    def body(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        known = parameters(dtype)
        state = CompressionState(compressor, named_parameters=known.items())
        given = gradients(group.rank, 0, dtype)
        bucket = reduce(state, group, [g.clone() for g in given], known)
        errors = state.error_feedback.state_dict()
        sent = [g.to(errors[n].dtype) - errors[n] for n, g in zip(SHAPES, given, strict=True)]
        return bucket.buffer(), torch.cat([tensor.reshape(-1) for tensor in sent])

    results = run_ranks(world_size, body)
    mean = torch.stack([sent for _, sent in results]).mean(0)
    for out, _ in results:
        assert torch.equal(out, results[0][0])
        tolerance = 0.05 if dtype.itemsize == 2 else 1e-5
        torch.testing.assert_close(out.to(mean.dtype), mean, rtol=0, atol=tolerance)
    assert not torch.equal(results[0][1], results[1][1]), "the ranks have sent different things"


@every_compressor
def test_with_feedback_the_sums_over_many_steps_come_close(compressor: Any) -> None:
    constant = gradients(0, 0)

    def body(group: ProcessGroup) -> torch.Tensor:
        known, total = parameters(), torch.zeros(1)
        state = CompressionState(compressor, named_parameters=known.items())
        for _ in range(200):
            total = total + reduce(state, group, [g.clone() for g in constant], known).buffer()
        return total / 200

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, torch.cat([g.reshape(-1) for g in constant]), rtol=0.2, atol=0.2)


def sent_alone(compressor: Any, gradient: torch.Tensor) -> torch.Tensor:
    return compressor.decompress(compressor.compress([gradient], 5), [gradient], 5)[0]


def test_int8_is_off_by_half_a_scale_at_most() -> None:
    rows = torch.tensor([[1.0, -0.5, 0.3], [1000.0, 3.0, -7.0]])

    assert (sent_alone(Int8(), rows) - rows).abs().max() <= 1000 / 127 / 2
    by_channel = (sent_alone(Int8(per_channel=True), rows) - rows).abs()
    assert by_channel[0].max() <= 1 / 127 / 2 * 1.001
    assert by_channel[1].max() <= 1000 / 127 / 2 * 1.001
    assert (sent_alone(Int8(), rows) - rows)[0].abs().max() > 0.25, "one scale for all cannot do that"


def test_int8_gives_back_what_it_can_represent() -> None:
    exact = torch.arange(-127, 128).float() * 0.5
    assert torch.equal(sent_alone(Int8(), exact), exact)


def test_int4_gives_back_what_it_can_represent() -> None:
    exact = torch.arange(-7, 8).float() * 0.5
    assert torch.equal(sent_alone(Int4(), exact), exact)
    assert (sent_alone(Int4(), torch.tensor([7.0, 3.4, -0.6, 0.4])) - torch.tensor([7.0, 3.0, -1.0, 0.0])).abs().max() == 0


def test_one_bit_sends_signs_and_the_mean_magnitude() -> None:
    numbers = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 2.0, -1.0, 1.0, -6.0])
    assert sent_alone(OneBit(), numbers).tolist() == pytest.approx([20 / 9 if x >= 0 else -20 / 9 for x in numbers.tolist()])


def test_top_k_sends_the_largest_exactly() -> None:
    numbers = torch.tensor([[0.1, -9.0, 0.2], [3.0, 0.3, -0.4]])
    assert sent_alone(TopK(1 / 3), numbers).tolist() == [[0, -9, 0], [3, 0, 0]]


def test_top_k_counts_in_64_bits_where_32_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of five numbers plays one of 2^31 and one more."""
    monkeypatch.setattr("syncline.hooks.sparsify._MOST_IN_INT32", 4)
    small, large = torch.tensor([1.0, -7.0, 2.0, 3.0]), torch.tensor([0.5, 1.5, -0.5, 2.5, -8.0])
    message = TopK(0.25).compress([small, large], 0)
    assert message.numel() == (4 + 4) + 2 * (4 + 8)
    received = TopK(0.25).decompress(message, [small, large], 0)
    assert [tensor.tolist() for tensor in received] == [[0, -7, 0, 0], [0, 0, 0, 2.5, -8]]


def test_random_k_chooses_anew_and_on_all_ranks_alike() -> None:
    numbers, compressor = torch.arange(1.0, 101.0), RandomK(0.1)
    first, second = (compressor.decompress(compressor.compress([numbers], s), [numbers], s)[0] for s in (1, 2))
    assert first.count_nonzero() == second.count_nonzero() == 10
    assert not torch.equal(first, second)
    assert torch.equal(first[first != 0], numbers[first != 0])


def test_seeds_that_differ_between_ranks_are_refused() -> None:
    """Only rank 0 has loaded a saved state. Otherwise each rank would put the sent numbers at other positions."""

    def body(group: ProcessGroup) -> None:
        known = parameters()
        state = CompressionState(RandomK(0.1), named_parameters=known.items())
        if group.rank == 0:
            earlier = CompressionState(RandomK(0.1), named_parameters=known.items())
            earlier.seeds.next()
            state.load_state_dict(earlier.state_dict())
        with pytest.raises(DisagreementError, match="random seed"):
            reduce(state, group, gradients(group.rank, 0), known)

    run_ranks(2, body)


def test_seeds_that_have_no_effect_may_differ() -> None:
    def body(group: ProcessGroup) -> torch.Tensor:
        known = parameters()
        state = CompressionState(TopK(0.1), random_seed=group.rank, named_parameters=known.items())
        return reduce(state, group, gradients(group.rank, 0), known).buffer()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("compressor", "nbytes"),
    [
        (Int8(), 1000 + 33 + 2 * 4),
        (Int8(per_channel=True), 1000 + 33 + 21 * 4),
        (Int4(), 500 + 17 + 2 * 4),
        (Int4(per_channel=True), 500 + 17 + 21 * 4),
        (OneBit(), 125 + 5 + 2 * 4),
        (TopK(0.01), (10 + 1) * 8),
        (RandomK(0.01), (10 + 1) * 4),
    ],
    ids=COMPRESSORS.keys(),
)
def test_as_many_bytes_are_sent_as_documented(compressor: Any, nbytes: int) -> None:
    def body(group: ProcessGroup) -> None:
        state = CompressionState(compressor)
        compression_hook(state, FakeBucket([torch.randn(20, 50), torch.randn(33)], group)).wait()
        assert state.statistics.bytes_sent == nbytes
        assert state.statistics.bytes_before == 4 * 1033
        assert state.error_feedback.norm() > 0
        assert list(state.statistics.seconds_by_stage) == ["compress", "decompress"]

    run_ranks(2, body)


@every_compressor
@pytest.mark.parametrize("place", [slice(None), (3, 2)], ids=["everywhere", "one number"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_and_leaves_no_trace(compressor: Any, bad: float, place: Any) -> None:
    def body(group: ProcessGroup) -> None:
        known = parameters()
        state = CompressionState(compressor, named_parameters=known.items())
        given = gradients(group.rank, 0)
        if group.rank == 1:
            given[0][place] = bad
        out = reduce(state, group, given, known).gradients()[0]
        assert not out.isfinite().all()
        assert all(error.isfinite().all() for error in state.error_feedback.state_dict().values())
        assert reduce(state, group, gradients(group.rank, 1), known).buffer().isfinite().all()

    run_ranks(2, body)


@every_compressor
def test_errors_that_grow_make_no_half_infinite(compressor: Any) -> None:
    """One gradient is much larger than the others, so its error grows beyond the range of float16."""

    def body(group: ProcessGroup) -> None:
        state, total = CompressionState(compressor), torch.zeros(200)
        for _ in range(100):
            given = torch.tensor([10000.0] + [0.5] * 199, dtype=torch.float16)
            total += compression_hook(state, FakeBucket([given], group, names=["weight"])).wait()
            assert total.isfinite().all()
        total += state.error_feedback.state_dict()["weight"]
        torch.testing.assert_close(total[0].item(), 100 * 10000.0, rtol=0.01, atol=0.0)

    run_ranks(1, body)


@every_compressor
@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_bucket_of_one_element(compressor: Any, shape: tuple[int, ...]) -> None:
    def body(group: ProcessGroup) -> float:
        return float(
            compression_hook(CompressionState(compressor), FakeBucket([torch.full(shape, 1.0 + group.rank)], group)).wait()
        )

    assert run_ranks(2, body) == pytest.approx([1.5, 1.5])


@every_compressor
def test_an_empty_bucket_communicates_nothing(compressor: Any) -> None:
    def body(group: ProcessGroup) -> None:
        if group.rank == 0:  # alone: nobody answers
            assert compression_hook(CompressionState(compressor), FakeBucket([], group)).wait().numel() == 0

    run_ranks(2, body)


@every_compressor
def test_zeros_stay_zeros_beside_an_empty_parameter(compressor: Any) -> None:
    def body(group: ProcessGroup) -> None:
        bucket = FakeBucket([torch.zeros(3, 4), torch.zeros(0, 3), torch.zeros(2)], group)
        assert compression_hook(CompressionState(compressor), bucket).wait().count_nonzero() == 0

    run_ranks(2, body)


@every_compressor
def test_resumed_it_goes_on_bitwise(compressor: Any) -> None:
    def body(group: ProcessGroup) -> None:
        known = parameters()
        state = CompressionState(compressor, named_parameters=known.items())
        for step in range(3):
            reduce(state, group, gradients(group.rank, step), known)
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        expected = reduce(state, group, gradients(group.rank, 3), known).buffer()
        again = parameters()
        resumed = CompressionState(compressor, named_parameters=again.items(), random_seed=8)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.iter == 3
        assert torch.equal(reduce(resumed, group, gradients(group.rank, 3), again).buffer(), expected)

    run_ranks(2, body)


@pytest.mark.parametrize("copied", [lambda state: pickle.loads(pickle.dumps(state)), copy.deepcopy], ids=["pickle", "deepcopy"])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_copy_goes_on_bitwise_with_the_models_own_names(copied: Any, is_given: bool) -> None:
    def body(group: ProcessGroup) -> None:
        known = parameters()

        def step(state: CompressionState, number: int) -> torch.Tensor:
            given = gradients(group.rank, number)
            bucket = FakeBucket(given, group, parameters=list(known.values()), names=list(SHAPES))
            return compression_hook(state, bucket).wait()

        state = CompressionState(TopK(0.1), group, named_parameters=known.items() if is_given else None)
        for number in range(3):
            step(state, number)
        again = copied(state)
        assert again.process_group is None
        for number in range(3, 6):
            assert torch.equal(step(again, number), step(state, number))

    run_ranks(2, body)


def test_a_state_without_error_feedback_refuses_saved_errors_and_changes_nothing() -> None:
    def body(group: ProcessGroup) -> None:
        known = parameters()
        state, without = CompressionState(TopK(0.1)), CompressionState(TopK(0.1), use_error_feedback=False)
        reduce(state, group, gradients(group.rank, 0), known)
        saved = state.state_dict()
        with pytest.raises(MisuseError, match="the saved state has error feedback, this one has use_error_feedback=False"):
            without.load_state_dict(saved)
        assert without.iter == 0
        without.load_state_dict({**saved, "errors": {}})
        assert without.iter == 1

    run_ranks(1, body)


def saved_after_a_step(group: ProcessGroup) -> dict[str, Any]:
    known = parameters()
    state = CompressionState(TopK(0.1), named_parameters=known.items())
    reduce(state, group, gradients(group.rank, 0), known)
    return state.state_dict()


def test_states_of_groups_of_different_sizes_are_merged() -> None:
    saved = [*run_ranks(3, saved_after_a_step), *run_ranks(2, saved_after_a_step)]
    merged = merge_states(saved)
    for name, error in merged["errors"].items():
        torch.testing.assert_close(error, torch.stack([state["errors"][name] for state in saved]).mean(0))
    with pytest.raises(InvalidArgumentError, match=r"all 2 ranks that have errors, found those of rank\(s\) 0: pass"):
        merge_states(saved[:4])


def test_merged_states_fit_another_number_of_ranks() -> None:
    saved = run_ranks(2, saved_after_a_step)
    for ranks in ([0], [1], [0, 0], [0, 0, 1]):
        with pytest.raises(InvalidArgumentError, match=f"all 2 ranks that have errors, found .* {str(ranks)[1:-1]}: pass"):
            merge_states([saved[rank] for rank in ranks])

    def resume(group: ProcessGroup) -> None:
        known = parameters()
        state = CompressionState(TopK(0.1), named_parameters=known.items())
        state.load_state_dict(saved[0])
        with pytest.raises(MisuseError, match=r"error feedback of rank 0 of 2"):
            reduce(state, group, gradients(group.rank, 1), known)
        state.load_state_dict(merge_states(saved))
        reduce(state, group, gradients(group.rank, 1), known)

    run_ranks(3, resume)


def test_states_of_something_else_are_refused() -> None:
    state = CompressionState(Int8())
    with pytest.raises(MisuseError, match="kind 'compression' in format 2, found kind 'PowerSGD'"):
        state.load_state_dict(PowerSGDState(None).state_dict())
    with pytest.raises(MisuseError, match=r"of compressor 'top 0\.5', this one of 'int8 per tensor'"):
        state.load_state_dict(CompressionState(TopK(0.5)).state_dict())
    other = CompressionState(Int8(), named_parameters=[("x", torch.zeros(2))])
    state.error_feedback.remember(["weight"], [torch.zeros(6, 5)])
    with pytest.raises(MisuseError, match="another model: it knows parameter 'weight'"):
        other.load_state_dict(state.state_dict())


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, math.nan])
@pytest.mark.parametrize("kind", [TopK, RandomK])
def test_fractions_that_cannot_be_are_refused(kind: Any, fraction: float) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a fraction above 0 and up to 1"):
        kind(fraction)


def test_other_misuse_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="such as Int8"):
        CompressionState(Int8)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(InvalidArgumentError, match="random_seed from 0"):
        CompressionState(Int8(), random_seed=-1)

    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match="expected a CompressionState as the hook's state, found NoneType"):
            compression_hook(None, FakeBucket([torch.ones(2)], group))  # type: ignore[arg-type]  # on purpose
        with pytest.raises(MisuseError, match=r"floating-point dtype to compress, found torch\.int32"):
            compression_hook(CompressionState(Int8()), FakeBucket([torch.ones(2, dtype=torch.int32)], group))

    run_ranks(1, body)


def test_random_positions_do_not_depend_on_torchs_default_device() -> None:
    numbers, compressor = [torch.arange(1.0, 101.0)], RandomK(0.1)
    expected = compressor.compress(numbers, 3)
    with torch.device("meta"):
        assert torch.equal(compressor.compress(numbers, 3), expected)
