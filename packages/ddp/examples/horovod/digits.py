"""Learns handwritten digits as a script for Horovod does: `mpirun -n 2 python digits.py`. The import is its only new line."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import syncline.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
options = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")

pixels, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
images = (pixels / 16).float().reshape(-1, 1, 8, 8)
train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train, batch_size=options.batch_size, sampler=train_sampler)
test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
test_loader = DataLoader(test, batch_size=100, sampler=test_sampler)

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 12, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(12, 24, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(24 * 16, 10),
).to(device)

# Adasum needs no larger learning rate on more ranks.
scale = 1 if options.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * scale, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if options.use_adasum else hvd.Average,
    gradient_predivide_factor=options.gradient_predivide_factor,
)


def average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name))


for epoch in range(options.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    model.eval()
    right = total_loss = 0.0
    with torch.no_grad():
        for inputs, targets in test_loader:
            outputs = model(inputs.to(device))
            total_loss += F.cross_entropy(outputs, targets.to(device), reduction="sum").item()
            right += (outputs.argmax(1).cpu() == targets).sum().item()
    test_loss = average(total_loss / len(test_sampler), "test_loss")
    accuracy = average(right / len(test_sampler), "accuracy")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {test_loss:.3f}, {100 * accuracy:.1f} % right", flush=True)
