"""What the ReFrame checks run on every rank: `job.py conformance`, `job.py replicas` or `job.py killed`.

Each prints one line on rank 0 when all is well, or ends with a traceback.
Without ReFrame: `mpirun -n 2 python job.py replicas`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from syncline.collectives import ProcessGroup, ReduceOp, destroy_process_group, init_process_group
from syncline.collectives.testing import CHECKS
from syncline.ddp import DistributedDataParallel


def conformance(group: ProcessGroup) -> str:
    """The checks that every backend passes, on the group that a training would get."""
    start_s = time.monotonic()
    for check in CHECKS.values():
        check(group)
    return f"{len(CHECKS)} checks passed in {time.monotonic() - start_s:.1f} s"


def replicas(group: ProcessGroup) -> str:
    """Train on data that differ by rank: the loss falls, and the ranks' parameters stay equal bit for bit."""
    torch.manual_seed(group.rank)  # other weights on each rank, until rank 0's are sent around
    net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(512, 16)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    bits = torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    group.all_reduce(lowest, ReduceOp.MIN)
    group.all_reduce(highest, ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise RuntimeError("the replicas differ")
    if not losses[-1] < 0.5 * losses[0]:
        raise RuntimeError(f"the loss did not fall: {losses[0]:.3f}, then {losses[-1]:.3f}")
    return f"{group.size} replicas of {bits.numel()} parameters are equal after {len(losses)} steps"


def killed(group: ProcessGroup) -> str:
    """The last rank is killed in the middle. Somebody must name it, well before the group's time limit."""
    for step in range(1_000_000):
        if group.rank == group.size - 1 and step == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        group.all_reduce(torch.ones(1000))
    return "nobody was killed"


def main(name: str) -> None:
    group = init_process_group(timeout=120)
    said = {"conformance": conformance, "replicas": replicas, "killed": killed}[name](group)
    if group.rank == 0:
        print(said)
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
