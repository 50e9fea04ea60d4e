"""Into how many pieces a ring divides a part, and how large Open MPI lets them be."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.backends.mpi import eager_limit
from syncline.collectives.backends.mpi.eager_limit import RAISED_BYTES, VARIABLE, eager_bytes, raise_eager_limit
from syncline.collectives.backends.mpi.ring_all_reduce import MOST_PIECE_BYTES, pieces_of_part


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(0, 1), (4, 1), (60 << 10, 1), ((60 << 10) + 4, 2), (240 << 10, 4), (512 << 10, 4), (2 << 20, 4), (32 << 20, 64)],
)
def test_a_part_has_four_pieces_unless_they_were_too_small_or_too_large(nbytes: int, pieces: int) -> None:
    assert pieces_of_part(nbytes, 512 << 10) == pieces


def test_no_piece_is_larger_than_agreed() -> None:
    assert max(nbytes / pieces_of_part(nbytes, 60 << 10) for nbytes in range(4, 32 << 20, 99_991)) < 63 << 10


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 60 << 10), ("", 60 << 10), ("1m", 60 << 10), ("1000", 0), (str(RAISED_BYTES), MOST_PIECE_BYTES)],
)
def test_what_is_sent_at_once_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: int
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    assert eager_bytes() == expected


@pytest.mark.parametrize(
    ("is_loaded", "given", "expected"), [(False, None, str(RAISED_BYTES)), (False, "7", "7"), (True, None, None)]
)
def test_the_limit_is_raised_before_mpi_is_loaded_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool, given: str | None, expected: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI"))
    if not is_loaded:
        monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    raise_eager_limit()
    assert eager_limit.os.environ.get(VARIABLE) == expected
