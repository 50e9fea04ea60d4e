"""How many samples a second, on made-up data, as Horovod's synthetic benchmark: `mpirun -n 2 python synthetic.py`."""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import syncline.horovod as hvd  # was: import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--num-warmup-batches", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--fp16-allreduce", action="store_true")
options = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
model = torch.nn.Sequential(
    torch.nn.Linear(options.width, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 10)
).to(device)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
inputs = torch.randn(options.batch_size, options.width, device=device)
targets = torch.randint(0, 10, (options.batch_size,), device=device)


def benchmark_step() -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


for _ in range(options.num_warmup_batches):
    benchmark_step()
rates = []
for _ in range(options.num_iters):
    began_s = time.perf_counter()
    for _ in range(options.num_batches_per_iter):
        benchmark_step()
    rates.append(options.batch_size * options.num_batches_per_iter / (time.perf_counter() - began_s))
if hvd.rank() == 0:
    print(f"samples a second on each of {hvd.size()} rank(s): {statistics.mean(rates):.0f}", flush=True)
