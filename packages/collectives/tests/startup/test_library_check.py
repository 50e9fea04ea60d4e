"""Which MPI libraries a launcher cannot start, and what is said before MPI starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.startup import mpi_library
from syncline.collectives.startup.launch import HYDRA, OPEN_MPI, SRUN_PMI2, SRUN_PMIX, process_manager
from syncline.collectives.startup.mpi_library import LEAST_SHM_BYTES, launcher_conflict, little_shared_memory, other_mpi

STEP = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
BY_PMI2 = {**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "8.0", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}
BY_PMIX = {**STEP, "PMIX_NAMESPACE": "slurm.pmix.8.0", "PMIX_RANK": "1"}
BY_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "HYDI_CONTROL_FD": "7"}
BY_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-1@1", "PMIX_RANK": "0"}
VERSIONS = {"MPICH": (5, 0, 2), "Open MPI": (5, 0, 11), "Intel MPI": (2021, 16, 0)}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (STEP, None),
        (BY_PMI2, SRUN_PMI2),
        (BY_PMIX, SRUN_PMIX),
        (BY_HYDRA, HYDRA),
        (BY_OPEN_MPI, OPEN_MPI),
        # mpiexec inside a step, and mpirun that starts its daemons by srun
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}, None),
        ({**STEP, **BY_HYDRA}, HYDRA),
        ({**BY_PMIX, **BY_HYDRA}, HYDRA),
        ({**BY_PMIX, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}, None),
        ({**STEP, "PMI_JOBID": "8.0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, OPEN_MPI),
        ({**STEP, "PMIX_NAMESPACE": "prterun-n0-12@1", "PMIX_RANK": "1"}, None),
    ],
)
def test_who_connects_the_ranks(variables: dict[str, str], found: str | None) -> None:
    assert process_manager(variables) == found


@pytest.mark.parametrize("environ", [BY_PMI2, BY_PMIX, BY_HYDRA, BY_OPEN_MPI, {}], ids=["pmi2", "pmix", "hydra", "mpirun", "-"])
@pytest.mark.parametrize("vendor", VERSIONS)
@pytest.mark.parametrize("is_from_pypi", [True, False])
def test_only_what_is_certain_is_refused(vendor: str, environ: dict[str, str], is_from_pypi: bool) -> None:
    manager = process_manager(environ)
    refused = {
        ("MPICH", SRUN_PMIX): "`srun --mpi=pmi2`",
        ("MPICH", OPEN_MPI): "MPICH's mpiexec",
        ("Intel MPI", OPEN_MPI): "Intel MPI's mpiexec",
        ("Open MPI", SRUN_PMI2): "`srun --mpi=pmix`",
        ("Open MPI", HYDRA): "Open MPI's mpiexec",
    }
    conflict = launcher_conflict(environ, vendor, VERSIONS[vendor], is_from_pypi)
    if (vendor, manager) not in refused or not (is_from_pypi or vendor == "Open MPI"):
        assert conflict is None
        return
    assert conflict is not None
    first = conflict.splitlines()[0]
    assert first.startswith(f"{manager} started this process, but does not work with {vendor} ")
    assert refused[vendor, manager] in first
    assert len(first) <= 200


def test_an_older_open_mpi_may_have_been_built_for_pmi() -> None:
    assert launcher_conflict(BY_PMI2, "Open MPI", (4, 1, 4), False) is None


def test_mpich_over_ucx_is_told_that_its_addresses_may_not_get_through_pmi2() -> None:
    two = {**BY_PMI2, "SLURM_STEP_NUM_NODES": "2"}
    for environ in (two, {**two, "MPIR_CVAR_CH4_NETMOD": "ucx"}):
        conflict = launcher_conflict(environ, "MPICH", (5, 0, 2), True)
        assert conflict is not None
        assert "on 2 nodes" in conflict
        assert "`export MPIR_CVAR_CH4_NETMOD=ofi`" in conflict.splitlines()[0]
    assert launcher_conflict({**two, "MPIR_CVAR_CH4_NETMOD": "ofi"}, "MPICH", (5, 0, 2), True) is None
    assert launcher_conflict({**two, "SLURM_STEP_NUM_NODES": "1"}, "MPICH", (5, 0, 2), True) is None
    assert launcher_conflict(two, "MPICH", (5, 0, 2), False) is None


def test_another_number_of_ranks_may_be_another_mpi_or_a_shell_inside_a_job() -> None:
    said = other_mpi("Slurm", 8, "MPICH 5.0.2", 1)
    first, *rest = said.splitlines()
    assert first.startswith("Slurm started 8 rank(s), but MPICH 5.0.2 sees 1: ")
    assert "different MPIs" in first
    assert "this process was started by hand inside a job" in first
    assert len(first) <= 200
    assert "--mpi=pmi2" in said
    assert "`env -u SLURM_STEP_ID python ...`" in "".join(rest)
    assert "--mpi" not in other_mpi("Open MPI", 8, "MPICH 5.0.2", 1)


def test_little_shared_memory_is_told_to_the_ranks_of_mpich_that_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    total = LEAST_SHM_BYTES - 1
    monkeypatch.setattr(mpi_library.shutil, "disk_usage", lambda folder: (total, 0, total))
    warning = little_shared_memory("MPICH", 2)
    assert warning is not None
    assert "/dev/shm has 63 MiB" in warning
    assert "--shm-size" in warning
    assert little_shared_memory("Open MPI", 2) is None
    assert little_shared_memory("MPICH", 1) is None
    total += 1
    assert little_shared_memory("MPICH", 2) is None


def test_where_there_is_no_shared_memory_nothing_is_known(tmp_path: Path) -> None:
    assert little_shared_memory("MPICH", 2, str(tmp_path / "none")) is None
