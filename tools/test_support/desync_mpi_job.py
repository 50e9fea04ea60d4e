"""One program of the desync catalogue over MPI: `mpiexec -n N python -m test_support.desync_mpi_job FOLDER NAME SIZE`.

Each rank is on a node of its own, so calls are messages, and small calls are not compared before they run. Each rank leaves its
outcome in the folder. A rank that leaves nothing was ended by the MPI library or by the monitor, which watches this group as
any other: MPI_Comm_create_group may never return if a rank calls something else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mpi4py import MPI

from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.liveness import Liveness, own_identity
from syncline.collectives.transports.mpi import neighbours
from syncline.collectives.transports.mpi.node.node_transport import NodeTransport
from test_support.desync_programs import NUMELS, TIMEOUT_S, catalogue, outcome


def main(folder: Path, name: str, size: str) -> None:
    """Run this rank."""
    neighbours._LISTEN_S, neighbours._TELL_EVERY_S = 0.5, 0.1
    world = MPI.COMM_WORLD
    transport = NodeTransport(world.Dup(), split=lambda communicator: communicator.Split(communicator.Get_rank(), 0))
    members = dict(enumerate(world.allgather(own_identity())))
    liveness = Liveness({rank: process for rank, process in members.items() if process is not None}, world.Get_rank())
    group = HostGroup(transport, world.Get_rank(), world.Get_size(), timeout_s=TIMEOUT_S, liveness=liveness)
    world.Barrier()
    said = outcome(group, catalogue()[name], NUMELS[size])
    (folder / f"rank-{world.Get_rank()}").write_text(said)
    world.Barrier()  # no rank ends the job before all have written
    os._exit(0)  # MPI_Finalize would wait for the messages of calls that failed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
