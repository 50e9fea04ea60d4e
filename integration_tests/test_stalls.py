"""A stall is reported long before the time limit, and at the limit by the rank that hangs; over each backend of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.launch

JOB = """
    import logging, os, sys, time
    from pathlib import Path
    import torch
    from syncline import collectives

    class Told(logging.Handler):
        def emit(self, record):
            # On a busy machine, a slow start is told of, too.
            if record.levelno == logging.WARNING and "all_reduce" in record.getMessage():
                Path("told").write_text(record.getMessage())

    logging.basicConfig(level=logging.INFO)
    logging.getLogger("syncline.collectives").addHandler(Told())
    group = collectives.init_process_group(sys.argv[1])
    Path(f"came-{group.rank}").touch()
    # The others begin together, because a rank that comes later than the limit would be reported, too.
    awaited = ["told"] if group.rank == 1 else ["came-0", "came-2"]
    end_s = time.monotonic() + 30
    while not all(Path(name).exists() for name in awaited) and time.monotonic() < end_s:
        time.sleep(0.01)
    collectives.all_reduce(torch.ones(3))
    collectives.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_rank_0_says_who_waits_for_whom(run_job: Callable[..., Any], tmp_path: Path, backend: str) -> None:
    site = tmp_path / "site.toml"
    site.write_text("stall_warning_s = 1\n")
    (tmp_path / "script.py").write_text("")
    finished = run_job(3, JOB, str(tmp_path / "script.py"), backend, SYNCLINE_SITE=str(site))
    assert finished.status == 0, finished.output
    told = (tmp_path / "told").read_text()
    assert "a call has run for 1 s and more: ranks 0, 2 in all_reduce(float32[3], op=SUM) #0 at script.py:" in told
    assert "not in a call: rank 1" in told
    assert all(f"rank {rank} of 3: host " in finished.output for rank in range(3))


HANGING_JOB = """
    import os, sys, time
    import torch
    from syncline import collectives

    def hang():
        time.sleep(600)

    group = collectives.init_process_group(sys.argv[1])
    collectives.all_reduce(torch.ones(3))
    group.set_timeout(3)  # not before, because the start of a rank may take longer
    if group.rank == 1:
        hang()
    collectives.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_the_rank_that_hangs_says_where_before_the_job_ends(run_job: Callable[..., Any], tmp_path: Path, backend: str) -> None:
    finished = run_job(2, HANGING_JOB, str(tmp_path / "script.py"), backend, SYNCLINE_REPORT_DIR=str(tmp_path))
    assert finished.status != 0
    assert "CollectiveTimeout" in finished.output
    (report,) = tmp_path.glob("syncline-report-*/rank-1.*")
    assert "in hang" in report.read_text()


TORCH_JOB = """
    import sys, time
    import torch
    import torch.distributed as dist
    if sys.argv[1] == "syncline":
        import syncline.collectives.torch_backend

    def hang():
        time.sleep(600)

    dist.init_process_group(sys.argv[1])
    dist.group.WORLD.syncline_group.set_timeout(3)
    if dist.get_rank() == dist.get_world_size() - 1:
        hang()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize(
    ("ranks", "command", "variables"),
    [
        pytest.param(
            3,
            ("torch.distributed.run", "--nproc-per-node", "3", "script.py", "syncline"),
            {"SYNCLINE_BACKEND": "gloo"},
            id="torchrun",
        ),
        pytest.param(2, ("syncline.collectives", "run", "-n", "2", "script.py", "gloo"), {}, id="syncline run"),
    ],
)
def test_under_torch_the_time_out_and_the_rank_that_hangs_are_seen(
    run_job: Callable[..., Any], tmp_path: Path, ranks: int, command: tuple[str, ...], variables: dict[str, str]
) -> None:
    finished = run_job(None, TORCH_JOB, "-m", *command, SYNCLINE_REPORT_DIR=str(tmp_path), **variables)
    assert finished.status != 0
    assert "did not finish within 3 s" in finished.output
    (report,) = tmp_path.glob(f"syncline-report-*/rank-{ranks - 1}.*")
    assert "in hang" in report.read_text()
