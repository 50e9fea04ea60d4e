"""Learns digits, and goes on when ranks die or come, as a script for Horovod's elastic mode does.

With Open MPI's `mpirun --with-ft ulfm -n 3 python elastic.py`, or without MPI, each rank with its number:
RANK=0 WORLD_SIZE=3 python elastic.py --meet FOLDER.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--kill", type=int, default=None, help="this rank ends itself in the second epoch, to show what happens")
parser.add_argument("--meet", default=None, help="without MPI: an empty folder that all ranks see")
options = parser.parse_args()

hvd.init(**({"backend": "gloo", "init_method": f"file://{options.meet}"} if options.meet else {}))
first_rank = hvd.rank()
torch.manual_seed(42)
torch.set_num_threads(1)

pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
train = TensorDataset((pixels / 16).float(), labels)
sampler = hvd.elastic.ElasticSampler(train, shuffle=True)
loader = DataLoader(train, batch_size=options.batch_size, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=options.lr * hvd.size(), momentum=0.9), named_parameters=model.named_parameters()
)


@hvd.elastic.run
def learn(state: hvd.elastic.TorchState) -> None:
    for epoch in range(state.epoch, options.epochs):
        state.epoch = epoch
        for number, (inputs, targets) in enumerate(loader):
            if (options.kill, epoch, number) == (first_rank, 1, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(inputs), targets).backward()
            state.optimizer.step()
            state.sampler.record_batch(number, options.batch_size)
            if number % 5 == 4:
                state.commit()
        state.sampler.set_epoch(epoch + 1)


def set_learning_rate() -> None:
    for group in optimizer.param_groups:
        group["lr"] = options.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
state.register_reset_callbacks([set_learning_rate])
learn(state)
right = (model(train.tensors[0]).argmax(1) == labels).float().mean().item()
same = len({str(each) for each in hvd.allgather_object([p.tolist() for p in model.parameters()])}) == 1
if hvd.rank() == 0:
    print(f"{hvd.size()} rank(s) at the end, {100 * right:.1f} % right, replicas equal: {same}", flush=True)
