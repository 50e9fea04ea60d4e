"""Sizes, factors, statistics and tables: nothing is measured here."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ReduceOp
from syncline.collectives.cli.bench import KINDS, Buffers, Case, Measurement, command, results
from syncline.collectives.cli.bench.measure import LEAST_ROUNDS, MOST_ROUNDS, refusal_of_all, repeats_of, rounds_of
from syncline.collectives.cli.bench.results import in_json, in_text, ladder, parse_size, size_in_words
from syncline.collectives.reduce_op import BOOL, DTYPES_OF


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", 4), ("64K", 65536), ("64k", 65536), ("25M", 25 * 2**20), ("25MiB", 25 * 2**20), ("1G", 2**30), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-4", "4.5M", "4T", "M", "4 4"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "words"), [(4, "4"), (1000, "1000"), (1024, "1K"), (64 * 2**20, "64M"), (2**30, "1G"), (0, "0")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert size_in_words(size) == words
    assert size == 0 or parse_size(words) == size


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [((4, 64, 4), [4, 16, 64]), ((4, 63, 4), [4, 16, 63]), ((4, 4, 4), [4]), ((3, 7, 2), [3, 6, 7])],
)
def test_ladders(arguments: tuple[int, int, int], sizes: list[int]) -> None:
    assert ladder(*arguments) == sizes


@pytest.mark.parametrize("arguments", [(8, 4, 2), (4, 8, 1)])
def test_no_ladders(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="a smallest and a largest size"):
        ladder(*arguments)


@pytest.mark.parametrize(
    ("collective", "two", "four", "eight"),
    [
        ("all_reduce", 1.0, 1.5, 1.75),
        ("reduce_scatter", 0.5, 0.75, 0.875),
        ("all_gather", 0.5, 0.75, 0.875),
        ("all_to_all", 0.5, 0.75, 0.875),
        ("gather", 0.5, 0.75, 0.875),
        ("scatter", 0.5, 0.75, 0.875),
        ("broadcast", 1.0, 1.0, 1.0),
        ("reduce", 1.0, 1.0, 1.0),
        ("send_recv", 1.0, 1.0, 1.0),
        ("barrier", 0.0, 0.0, 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective: str, two: float, four: float, eight: float) -> None:
    assert [KINDS[collective].bus_factor(size) for size in (2, 4, 8)] == [two, four, eight]


def test_every_collective_has_a_row_above() -> None:
    assert len(KINDS) == 10


@pytest.mark.parametrize(
    ("collective", "size_bytes", "world_size", "numel"),
    [
        ("all_reduce", 4, 2, 1),
        ("all_reduce", 1000, 3, 250),
        ("all_reduce", 1, 3, 1),
        ("all_gather", 4, 2, 2),
        ("all_gather", 1000, 3, 249),
        ("barrier", 4, 2, 1),
    ],
)
def test_cases(collective: str, size_bytes: int, world_size: int, numel: int) -> None:
    case = Case(collective, torch.float32, size_bytes)
    assert case.numel(world_size) == numel
    assert case.true_bytes(world_size) == (0 if collective == "barrier" else 4 * numel)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_a_bucket_of_ddp_is_among_the_default_sizes_only() -> None:
    sizes = [case.size_bytes for case in command._cases(options())]
    assert sizes == [*(4**power for power in range(1, 13)), 25 * 2**20, 64 * 2**20]
    assert [case.size_bytes for case in command._cases(options("--sizes", "4", "64M", "--factor", "4"))] == [
        4**power for power in range(1, 14)
    ]


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "bits8", "uint4", "bool", "float4_e2m1fn_x2", "Tensor", "weather"])
def test_dtypes_that_cannot_be_measured(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"expected a dtype .*, found '{name}'; .*bfloat16.*float8_e5m2"):
        command._cases(options("--dtypes", name))


def test_no_gpu_is_said_before_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "init_process_group", lambda **_: pytest.fail("connected"))
    with pytest.raises(InvalidArgumentError, match="torch sees no CUDA device here"):
        command.run(options("--device", "cuda"))


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(command, "default_device", lambda group: torch.device("cuda", group))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert command._device("cuda", 3) == torch.device("cuda", 3)  # type: ignore[arg-type]
    assert command._device("cpu", 3) == torch.device("cpu")  # type: ignore[arg-type]
    assert taken == [torch.device("cuda", 3)]


def test_all_tensors_lie_on_the_device() -> None:
    asked: list[tuple[int, torch.dtype, torch.device]] = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((numel, dtype, device))
        return torch.empty(numel, dtype=dtype, device=device)

    meta = torch.device("meta")
    common = Buffers(0, 2, 4, torch.float16, device=meta)
    for buffers in (common, common.like(allocate)):
        assert {buffers.block.device, buffers.part.device, buffers.output.device, buffers.pattern(1, 4).device} == {meta}
    assert asked == [(4, torch.float16, meta)]


@pytest.mark.parametrize("size", [1, 2, 3, 20, 31, 100])
@pytest.mark.parametrize("dtype", sorted(DTYPES_OF[ReduceOp.SUM] - BOOL, key=str))
def test_sums_of_the_data_are_exact(dtype: torch.dtype, size: int) -> None:
    buffers = Buffers(0, size, 70, dtype)
    total = torch.zeros(70, dtype=dtype)
    for rank in range(size):
        total += buffers.pattern(rank, 70)
    assert torch.equal(total, buffers.total(70))


def test_the_data_differ_by_rank_and_by_index() -> None:
    buffers = Buffers(0, 31, 31, torch.int8)
    patterns = torch.stack([buffers.pattern(rank, 31) for rank in range(31)])
    for rows in (patterns, patterns.T):
        assert all(sorted(row.tolist()) == list(range(-15, 16)) for row in rows)


@pytest.mark.parametrize(
    ("refusals", "told"),
    [(("no", "no"), "no"), (("", "no", "never"), "rank 1: no; rank 2: never")],
)
def test_what_ranks_refuse(refusals: tuple[str, ...], told: str) -> None:
    assert refusal_of_all(refusals) == told


@pytest.mark.parametrize(("estimate_s", "repeats"), [(1e-9, 1000), (1.1e-6, 91), (3e-5, 4), (1e-4, 1), (1.0, 1)])
def test_repeats(estimate_s: float, repeats: int) -> None:
    assert repeats_of(estimate_s) == repeats


@pytest.mark.parametrize(
    ("samples_s", "budget_s", "rounds"),
    [([], 1.0, 0), ([0.01, 0.02], 0.3, 10), ([1.0], 0.3, LEAST_ROUNDS), ([1e-6], 0.3, MOST_ROUNDS)],
)
def test_rounds(samples_s: list[float], budget_s: float, rounds: int) -> None:
    assert rounds_of(samples_s, budget_s) == rounds


FIRST = Measurement("all_reduce", "float32", 2**20, 4, "mpi", (1e-3, 2e-3, 3e-3, 4e-3, 5e-3))
SECOND = Measurement("all_reduce", "float32", 2**20, 4, "raw-mpi", (6e-3,))
REFUSED = Measurement("all_reduce", "bfloat16", 2**20, 4, "raw-mpi", note="no datatype")


def test_bandwidths() -> None:
    assert FIRST.quartiles_s == pytest.approx((2e-3, 3e-3, 4e-3))
    assert SECOND.quartiles_s == (6e-3, 6e-3, 6e-3)
    assert FIRST.algorithm_bandwidth == pytest.approx(2**20 / 3e-3)
    assert FIRST.bus_bandwidth == pytest.approx(1.5 * 2**20 / 3e-3)


def test_table() -> None:
    lines = in_text([FIRST, SECOND, REFUSED]).splitlines()
    assert lines[0] == "all_reduce, float32"
    assert lines[1].split() == [
        "bytes",
        "backend",
        "median",
        "us",
        "least",
        "p25",
        "p75",
        "alg",
        "GB/s",
        "bus",
        "GB/s",
        "times",
        "first",
    ]
    assert lines[2].split() == ["1M", "mpi", "3000.0", "1000.0", "2000.0", "4000.0", "0.35", "0.52", "1.00"]
    assert lines[3].split() == ["1M", "raw-mpi", "6000.0", "6000.0", "6000.0", "6000.0", "0.17", "0.26", "2.00"]
    assert lines[5] == "all_reduce, bfloat16"
    assert lines[7].split() == ["1M", "raw-mpi", *"-------"]
    assert len({len(line) for line in lines[1:4]}) == 1


def test_json() -> None:
    written = json.loads(json.dumps(in_json([FIRST, REFUSED], {"world_size": 4})))
    assert written["environment"] == {"world_size": 4}
    first, refused = written["measurements"]
    assert (first["samples"], first["median_s"], first["least_s"]) == (5, 3e-3, 1e-3)
    assert first["bus_bandwidth"] == pytest.approx(FIRST.bus_bandwidth)
    assert refused == {
        "collective": "all_reduce",
        "dtype": "bfloat16",
        "size_bytes": 2**20,
        "backend": "raw-mpi",
        "refused": "no datatype",
    }


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    with pytest.raises(MisuseError, match=r"pip install matplotlib"):
        results.require_matplotlib()
