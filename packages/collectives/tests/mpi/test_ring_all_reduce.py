"""Into how many pieces a ring divides a part."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.backends.mpi import ring_all_reduce
from syncline.collectives.backends.mpi.ring_all_reduce import pieces_of_part


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(0, 1), (4, 1), (60 << 10, 1), ((60 << 10) + 4, 2), (240 << 10, 4), (512 << 10, 4), (2 << 20, 4), (32 << 20, 64)],
)
def test_a_part_has_four_pieces_unless_they_were_too_small_or_too_large(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, pieces: int
) -> None:
    monkeypatch.setattr(ring_all_reduce, "MOST_PIECE_BYTES", 512 << 10)
    assert pieces_of_part(nbytes) == pieces


def test_with_open_mpi_no_piece_waits_until_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends 64 KiB at once, of which its header takes some."""
    monkeypatch.setattr(ring_all_reduce, "MOST_PIECE_BYTES", 60 << 10)
    assert max(nbytes / pieces_of_part(nbytes) for nbytes in range(4, 32 << 20, 99_991)) < 63 << 10
