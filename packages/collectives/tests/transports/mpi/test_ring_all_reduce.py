"""Into how many pieces a ring divides a part, and how large they may be."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.transports.mpi.ring_all_reduce import TCP_EAGER_LIMIT, largest_piece_bytes, pieces_of_part


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(0, 1), (4, 1), (60 << 10, 1), ((60 << 10) + 4, 2), (240 << 10, 4), (512 << 10, 4), (2 << 20, 4), (32 << 20, 64)],
)
def test_a_part_has_four_pieces_unless_they_were_too_small_or_too_large(nbytes: int, pieces: int) -> None:
    assert pieces_of_part(nbytes, 512 << 10) == pieces


@pytest.mark.parametrize("largest", [60 << 10, 200 << 10])
def test_no_piece_is_larger_than_it_may_be(largest: int) -> None:
    assert max(nbytes / pieces_of_part(nbytes, largest) for nbytes in range(4, 32 << 20, 99_991)) <= largest


@pytest.mark.parametrize(
    ("library", "given", "expected"),
    [
        ("MPICH", None, 512 << 10),
        ("MPICH", "1000", 512 << 10),
        ("Open MPI", None, 60 << 10),
        ("Open MPI", "", 60 << 10),
        ("Open MPI", "1m", 60 << 10),
        ("Open MPI", "1000", 60 << 10),
        ("Open MPI", "204800", 196 << 10),
        ("Open MPI", "528384", 512 << 10),
        ("Open MPI", "10000000", 512 << 10),
    ],
)
def test_with_open_mpi_no_piece_waits_until_it_is_asked_for(library: str, given: str | None, expected: int) -> None:
    environ = {} if given is None else {TCP_EAGER_LIMIT: given}
    assert largest_piece_bytes(library, environ) == expected
