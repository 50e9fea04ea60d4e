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


MANY = [f"veth{number}" for number in range(13)]


def test_many_network_devices_are_too_many_for_pmi2_between_nodes() -> None:
    conflict = pmi2_conflict(PMI2, "MPICH", 2, MANY, None)
    assert conflict is not None
    assert "13 network devices (veth0, veth1, veth10" in conflict
    assert "UCX_NET_DEVICES=eth0" in conflict


@pytest.mark.parametrize(
    ("interface", "vendor", "nodes", "devices", "chosen"),
    [
        (PMIX, "MPICH", 2, MANY, None),
        (None, "MPICH", 2, MANY, None),
        (PMI2, "Open MPI", 2, MANY, None),
        (PMI2, "MPICH", 1, MANY, None),
        (PMI2, "MPICH", 2, MANY[:8], None),
        (PMI2, "MPICH", 2, MANY, "veth3"),
    ],
)
def test_few_devices_and_a_chosen_one_get_through(interface, vendor, nodes, devices, chosen) -> None:
    assert pmi2_conflict(interface, vendor, nodes, devices, chosen) is None
