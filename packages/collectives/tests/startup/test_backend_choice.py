from __future__ import annotations

import pytest

from syncline.collectives import LaunchError
from syncline.collectives.startup.launch import Launch
from syncline.collectives.startup.registry import BACKEND_VARIABLE, BackendChoice, choose_backend
from syncline.collectives.startup.settings import Settings

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
    lacks = {"mpi": mpi_lacks, "nccl": "no GPU"}
    choice = choose_backend(argument, environ, launch, lacks.get, rendezvous_given=rendezvous)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("argument", "launch", "rendezvous", "name", "reason"),
    [
        (None, MPIEXEC, False, "cpu:mpi,cuda:nccl", "launched by Open MPI, and there are GPUs"),
        (None, TORCHRUN, False, "cpu:gloo,cuda:nccl", "launched by torchrun, and there are GPUs"),
        (None, None, True, "cpu:gloo,cuda:nccl", "a rendezvous was given"),
        (None, None, False, "cpu:in_process,cuda:nccl", "it is alone, and there are GPUs"),
        ("mpi", MPIEXEC, False, "mpi", "given as argument"),
    ],
)
def test_gpus_are_served_beside_the_host(argument, launch, rendezvous, name, reason) -> None:
    choice = choose_backend(argument, {}, launch, lambda _: None, rendezvous_given=rendezvous)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(("argument", "launch"), [("mpi", MPIEXEC), (None, TORCHRUN), (None, None)])
def test_mpi_is_not_looked_for_without_need(argument: str | None, launch: Launch | None) -> None:
    def fail(name: str) -> str:
        if name != "mpi":
            return "no GPU"
        raise AssertionError(f"asked what {name} lacks")

    choose_backend(argument, {}, launch, fail)


SMOKE_SITE = Settings(backend="smoke", path="/site.toml")


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        (None, None, BackendChoice("smoke", "set by the site file /site.toml")),
        (None, "", BackendChoice("smoke", "set by the site file /site.toml")),
        (None, "gloo", BackendChoice("gloo", f"set by {BACKEND_VARIABLE}")),
        ("mpi", "gloo", BackendChoice("mpi", "given as argument")),
    ],
)
def test_argument_then_variable_then_site(argument: str | None, variable: str | None, expected: BackendChoice) -> None:
    environ = {} if variable is None else {BACKEND_VARIABLE: variable}
    assert choose_backend(argument, environ, MPIEXEC, lambda _: None, settings=SMOKE_SITE) == expected


def test_a_site_without_a_backend_leaves_the_choice_automatic() -> None:
    assert choose_backend(None, {}, MPIEXEC, {"nccl": "no GPU"}.get, settings=Settings(path="/site.toml")).name == "mpi"


@pytest.mark.parametrize("argument", [None, "mpi"])
def test_mpi_url_is_the_backend_mpi(argument: str | None) -> None:
    choice = choose_backend(argument, {BACKEND_VARIABLE: "gloo"}, TORCHRUN, lambda _: None, scheme="mpi", settings=SMOKE_SITE)
    assert choice == BackendChoice("mpi", "init_method is mpi://")


def test_mpi_url_and_another_backend_contradict() -> None:
    with pytest.raises(LaunchError, match="'mpi://' means backend 'mpi', but backend 'gloo' was given"):
        choose_backend("gloo", {}, None, lambda _: None, scheme="mpi")
