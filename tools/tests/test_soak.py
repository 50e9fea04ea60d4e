"""The bound of the soak, and which ranks are told when it is exceeded."""

from __future__ import annotations

import pytest

from syncline.collectives.group import ProcessGroup
from syncline.collectives.testing.ranks import run_ranks
from test_support import soak_job
from test_support.soak_memory import Load, handed_out_parts, resident_parts

LOAD = Load(ranks=4, threads=3, groups=4, largest_bytes=16_000_000)
MIB = 2**20


def test_the_parts_are_those_of_the_note() -> None:
    parts = resident_parts(LOAD, 128 << 10)
    assert parts["tensors"] == 3 * 6 * 16_000_000
    assert parts["copies"] == 3 * 4 * 16_000_000
    assert parts["shared"] == 4 * 4 * (3 * MIB + 2 * 512 * 1024)
    assert parts["allocator"] == 6 * 16 * (128 << 10) * 13
    assert {name: parts[name] for name in handed_out_parts(LOAD)} == handed_out_parts(LOAD)


def test_a_larger_threshold_lets_the_allocator_keep_more() -> None:
    assert resident_parts(LOAD, 1 * MIB)["allocator"] > resident_parts(LOAD, 128 << 10)["allocator"]


class Grown(soak_job.Memory):
    """The memory of a rank that grew by a given amount."""

    def __init__(self, resident_mib: float, in_use_mib: float) -> None:
        self._grown = (resident_mib, in_use_mib)

    def growth_mib(self) -> tuple[float, float]:
        return self._grown


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("threshold", "resident", "in_use", "is_within"),
    [(131072, 700, 400, True), (131072, 800, 400, False), (131072, 700, 500, False), (None, 5000, 400, True)],
)
def test_one_rank_above_the_bound_fails_the_soak(
    monkeypatch: pytest.MonkeyPatch, threshold: int | None, resident: float, in_use: float, is_within: bool
) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, str(threshold)) if threshold else monkeypatch.delenv(name, raising=False)

    def body(group: ProcessGroup) -> None:
        grown = Grown(resident, in_use) if group.rank == 1 else Grown(1.0, 1.0)
        assert soak_job.verdict(group, grown, LOAD) is is_within

    run_ranks(2, body)
