"""Growth with the number of ranks over MPI: counts of real ranks against the formulas of docs/reference/scaling.md."""

from __future__ import annotations

import pytest

import mpi_runtimes
from benchmarks import growth
from benchmarks.growth_formulas import FORMULAS, Job
from commands import ToolError
from test_support.full_run import cases

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(("per_host", "sizes"), cases([(2, (4,))], in_full=[(1, (2, 4, 8, 16))]))
def test_formulas_over_mpi_hold_for_real_ranks(per_host: int, sizes: tuple[int, ...]) -> None:
    try:
        mpi_runtimes.find("mpich")
    except ToolError as error:
        pytest.skip(str(error))
    found = {ranks: growth.count("mpi", Job(ranks, per_host)) for ranks in sizes}
    rows, is_right = growth.compared("mpi", found, per_host)
    assert is_right, rows
    assert sum(row[-1] == "held" for row in rows) == sum(over == "mpi" for over, _, _ in FORMULAS)
