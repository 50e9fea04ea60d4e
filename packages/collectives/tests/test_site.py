from __future__ import annotations

import pytest

from syncline.collectives.launch import Launch
from syncline.collectives.site import BACKEND_VARIABLE, choose_backend

MPIEXEC = Launch("Open MPI", True, 0, 2)
TORCHRUN = Launch("torchrun", False, 0, 2)


@pytest.mark.parametrize(
    ("argument", "variable", "launch", "mpi_lacks", "rendezvous", "name", "reason"),
    [
        ("gloo", "mpi", MPIEXEC, None, False, "gloo", "given as argument"),
        ("smoke", None, None, None, False, "smoke", "given as argument"),
        (None, "gloo", MPIEXEC, None, False, "gloo", f"set by {BACKEND_VARIABLE}"),
        (None, "", MPIEXEC, None, False, "mpi", "launched by Open MPI"),
        (None, None, MPIEXEC, None, True, "mpi", "launched by Open MPI"),
        (None, None, MPIEXEC, "no library", False, "gloo", "MPI cannot be used: no library"),
        (None, None, TORCHRUN, None, False, "gloo", "launched by torchrun"),
        (None, None, None, None, True, "gloo", "a rendezvous was given"),
        (None, None, None, None, False, "in_process", "alone"),
    ],
)
def test_choice(argument, variable, launch, mpi_lacks, rendezvous, name, reason) -> None:
    environ = {} if variable is None else {BACKEND_VARIABLE: variable}
    choice = choose_backend(argument, environ, launch, lambda _: mpi_lacks, rendezvous_given=rendezvous)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(("argument", "launch"), [("mpi", MPIEXEC), (None, TORCHRUN), (None, None)])
def test_mpi_is_not_looked_for_without_need(argument: str | None, launch: Launch | None) -> None:
    def fail(name: str) -> str:
        raise AssertionError(f"asked what {name} lacks")

    choose_backend(argument, {}, launch, fail)
