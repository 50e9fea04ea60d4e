"""Run by mpiexec on every rank: FOLDER ARGUMENT...

Becomes `python ARGUMENT...`, with its whole output in FOLDER/rank-N.log, so that lines of different ranks do not mix.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Hydra (MPICH, Intel MPI), Open MPI, PMIx, Slurm.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


def main(folder: str, *arguments: str) -> None:
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    if rank is None:
        sys.exit(f"mpiexec set none of {', '.join(RANK_VARIABLES)}: which rank is this?")
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.execv(sys.executable, (sys.executable, *arguments))


def read(folder: Path) -> dict[int, str]:
    """What each rank printed, in rank order."""
    logs = {int(path.stem.removeprefix("rank-")): path for path in folder.glob("rank-*.log")}
    return {rank: logs[rank].read_text(errors="replace") for rank in sorted(logs)}


if __name__ == "__main__":
    main(*sys.argv[1:])
