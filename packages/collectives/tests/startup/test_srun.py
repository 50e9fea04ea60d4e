"""What srun offers, and which libraries it cannot start."""

from __future__ import annotations

import pytest

from syncline.collectives.startup.srun import PMI2, PMIX, interface_of_srun, pmi2_conflict, srun_conflict, srun_hint

STEP = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (STEP, None),
        ({**STEP, "SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "8.0", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}, PMI2),
        ({**STEP, "PMIX_NAMESPACE": "slurm.pmix.8.0", "PMIX_RANK": "1"}, PMIX),
        # mpiexec inside a step, and mpirun that starts its daemons by srun
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}, None),
        ({**STEP, "PMIX_NAMESPACE": "slurm.pmix.8.0", "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11"}, None),
        ({**STEP, "PMI_JOBID": "8.0", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None),
        ({**STEP, "PMIX_NAMESPACE": "prterun-n0-12@1", "PMIX_RANK": "1"}, None),
    ],
)
def test_interface_is_slurms_own_only(variables: dict[str, str], found: str | None) -> None:
    assert interface_of_srun(variables) == found


@pytest.mark.parametrize("vendor", ["MPICH", "Open MPI", "Intel MPI"])
@pytest.mark.parametrize("interface", [PMIX, PMI2, None])
def test_only_what_is_certain_is_refused(vendor: str, interface: str | None) -> None:
    assert srun_conflict(interface, vendor, is_from_pypi=False) is None
    conflict = srun_conflict(interface, vendor, is_from_pypi=True)
    if (vendor, interface) in (("MPICH", PMIX), ("Open MPI", PMI2)):
        assert conflict is not None
        assert f"srun --mpi={interface}" in conflict
        assert f"`srun --mpi={PMI2 if interface == PMIX else PMIX}`" in conflict
    else:
        assert conflict is None


def test_hint_is_for_srun_only() -> None:
    assert "--mpi=pmix" in srun_hint("Slurm")
    assert srun_hint("Open MPI") == ""


def test_mpich_over_ucx_is_told_that_its_addresses_may_not_get_through_pmi2() -> None:
    conflict = pmi2_conflict(PMI2, "MPICH", 2, None)
    assert conflict is not None
    assert "on 2 nodes" in conflict
    assert "export MPIR_CVAR_CH4_NETMOD=ofi" in conflict
    assert pmi2_conflict(PMI2, "MPICH", 2, "ucx") is not None


@pytest.mark.parametrize(
    ("interface", "vendor", "nodes", "netmod"),
    [
        (PMIX, "MPICH", 2, None),
        (None, "MPICH", 2, None),
        (PMI2, "Open MPI", 2, None),
        (PMI2, "MPICH", 1, None),
        (PMI2, "MPICH", 2, "ofi"),
    ],
)
def test_other_addresses_get_through(interface, vendor, nodes, netmod) -> None:
    assert pmi2_conflict(interface, vendor, nodes, netmod) is None
