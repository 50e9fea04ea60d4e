"""Works of torch.distributed; what they have in common with others is in the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.testing.processes import run_processes

JOB = Path(__file__).parent / "leaving_job.py"


@pytest.mark.launch
def test_a_program_that_ends_while_torchs_thread_drops_what_it_called(tmp_path: Path) -> None:
    """See Note [Leaving while torch's thread drops what it called]: without a wait at exit rank 0 aborts."""
    run_processes(JOB, 2, tmp_path)
