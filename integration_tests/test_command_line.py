"""`doctor` and `bench` as jobs of their own, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

MODULE = ("-m", "syncline.collectives")


def test_doctor_speaks_once_for_all_ranks(run_job) -> None:
    job = run_job(2, "", *MODULE, "doctor")
    assert job.status == 0, job.output
    assert job.output.count("2 rank(s) connected, and an all_reduce gave the right sum") == 1
    assert "1 node(s), 2 rank(s)" in job.output
    assert "MPI_THREAD_MULTIPLE" in job.output
    assert "mpi (launched by" in job.output
    assert "yes: each rank read what the others of its node wrote" in job.output
    assert "left for each of 2 rank(s)" in job.output


def test_doctor_checks_the_backend_that_is_set(run_job) -> None:
    job = run_job(2, "", *MODULE, "doctor", SYNCLINE_BACKEND="gloo")
    assert job.status == 0, job.output
    assert "gloo (set by SYNCLINE_BACKEND)" in job.output


def test_doctor_ends_with_an_error_where_something_is_wrong(run_job, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('bakend = "mpi"')
    job = run_job(2, "", *MODULE, "doctor", SYNCLINE_SITE=str(tmp_path / "site.toml"))
    assert job.status != 0
    assert "did you mean 'backend'?" in " ".join(job.output.split())
    assert job.output.count("WRONG  connection") == 1


def test_doctor_without_an_mpi_library(run_job) -> None:
    job = run_job(1, "", *MODULE, "doctor", MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert job.status != 0
    words = " ".join(job.output.split())
    assert "cannot be used, though" in words
    assert "MPI4PY_LIBMPI" in words


def test_bench_side_by_side(run_job, tmp_path: Path) -> None:
    """Every collective on MPI, Gloo and the two baselines; each result is checked before it is timed."""
    names = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"]
    path = tmp_path / "figures.json"
    job = run_job(
        3,
        "",
        *(*MODULE, "bench", "--collective", *names, "--sizes", "1000", "1000", "--dtypes", "float32", "bfloat16"),
        *("--backends", "mpi", "raw-mpi", "gloo", "torch-gloo", "--seconds", "0.01", "--json", str(path)),
    )
    assert job.status == 0, job.output
    rows = json.loads(path.read_text())["measurements"]
    refused = {(row["backend"], row["collective"], row["dtype"]) for row in rows if "refused" in row}
    assert refused == {("raw-mpi", name, "bfloat16") for name in ("all_reduce", "reduce", "reduce_scatter")}
    assert len(rows) == (2 * (len(names) - 1) + 1) * 4
    assert all(row["median_s"] > 0 for row in rows if "refused" not in row)


def test_large_calls_that_differ_are_named(run_job) -> None:
    """The ranks compare a call before they block in MPI; see Note [Presync]."""
    job = run_job(
        2,
        """
        import torch
        from syncline.collectives import DisagreementError, init_process_group

        group = init_process_group(timeout=60)
        try:
            group.all_reduce(torch.ones(100_000 + group.rank))
        except DisagreementError as error:
            print(f"rank {group.rank} read: {error}", flush=True)
        """,
    )
    for rank in range(2):
        read = job.output.partition(f"rank {rank} read:")[2].splitlines()
        assert read[1:3] == ["  rank 0: all_reduce(float32[100000], op=SUM)", "  rank 1: all_reduce(float32[100001], op=SUM)"]
