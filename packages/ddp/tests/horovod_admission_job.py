"""A process of `test_horovod_newcomers.py`: `horovod_admission_job.py NUMBER COUNT FOLDER`.

Process 0 begins a training alone, and lets each of the others in at another step. The folder's file "place" says where the
processes make their optimizer. If there is a file "loses", process 2 is killed in its first step. Every other process writes
the weights with which it ends, or the error.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from horovod_joining import begin_or_join

import syncline.horovod as hvd
from syncline.collectives import SynclineError, get_default_group
from test_support.waiting import wait_until

IN_TRAINING, IN_CALLBACK = "in the training function", "in a reset callback"
STEPS = 6


def made() -> Any:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    if place == IN_TRAINING:
        torch.optim.lr_scheduler.StepLR(optimizer, 100)  # a cycle of references: only the garbage collector frees the optimizer
    return optimizer


def rebuild() -> None:
    global optimizer
    if place == IN_CALLBACK:
        state.optimizer = optimizer = made()


@hvd.elastic.run
def train(state: Any) -> None:
    used = made() if place == IN_TRAINING else optimizer
    while state.step < STEPS:
        if number == 2 and (folder / "loses").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        used.zero_grad()
        model(torch.ones(2, 3) * (hvd.rank() + 1)).sum().backward()
        used.step()
        state.step += 1
        if state.step == 2 * hvd.size() and hvd.size() < count:
            if hvd.rank() == 0:
                (folder / f"admits-{hvd.size()}").touch()
                wait_until(lambda: get_default_group().newcomers() == 1)
            state.commit()


number, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
place = (folder / "place").read_text()
begin_or_join(number, folder, folder / f"admits-{number}")
torch.manual_seed(number)
model = torch.nn.Linear(3, 1)
optimizer = made() if place == IN_CALLBACK else None
state = hvd.elastic.TorchState(model, optimizer, step=0)
state.register_reset_callbacks([rebuild])
try:
    train(state)
    found = str([parameter.tolist() for parameter in model.parameters()])
except SynclineError as error:
    found = str(error)
(folder / f"result-{number}").write_text(found)
hvd.shutdown()
