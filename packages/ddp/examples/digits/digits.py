"""Train a small network on handwritten digits, on as many ranks as the launcher starts.

    mpirun -n 2 python digits.py
    srun -n 2 python digits.py
    python digits.py

Needs `pip install './packages/ddp[examples]'`. What differs from a script for one process stands in `main` and is three lines:
the process group, the sampler that gives each rank its part of every batch, and the wrapper around the model. The rest of the
folder measures and checks what this one trains.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from data import first_batch_of_one_process, load, loader_of_rank
from gradient_check import largest_relative_difference
from measurement import Measurement, gather_measurements
from model import BUCKET_CAP_MB, DigitsNetwork
from options import Options, check_with_group, parse
from placement import gather_placements, threads_for
from progress import epochs_with_progress
from replicas import replicas_are_identical
from report import Report, versions
from syncline.collectives import ReduceOp, all_reduce, destroy_process_group, get_rank, get_world_size, init_process_group
from syncline.ddp import DistributedDataParallel
from timeline import draw, record

MAX_LEARNING_RATE = 0.1
TRACED_STEPS = 10, 20


def main() -> int:
    options = parse()
    group = init_process_group(options.backend)
    check_with_group(options, group)
    placements = gather_placements(group)
    threads = threads_for(placements, group.rank)
    torch.set_num_threads(threads)

    train, test = load()
    batch_size = options.batch_size_for(get_world_size())
    loader = loader_of_rank(train, get_rank(), get_world_size(), batch_size, options.seed)
    torch.manual_seed(options.seed + get_rank())  # each rank its own: the wrapper gives all of them rank 0's weights
    network = DigitsNetwork()
    difference = largest_relative_difference(
        network, next(iter(loader)), first_batch_of_one_process(train, batch_size, options.seed), group
    )
    model = DistributedDataParallel(network, bucket_cap_mb=BUCKET_CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=MAX_LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)

    with model.trace(options.trace, *TRACED_STEPS) if options.trace else nullcontext():
        measurement = fit(model, optimizer, loader, options)
    steps = record(model, *next(iter(loader)), group=group) if options.timeline else []
    accuracy = evaluate(model, test)
    report = Report(
        backend=group.backend_name,
        library=group.describe(),
        ranks=group.size,
        nodes=len({placement.host for placement in placements}),
        threads_per_rank=threads,
        epochs=options.epochs,
        global_batch_size_images=batch_size,
        **gather_measurements(measurement, batch_size, group),
        test_accuracy_percent=100 * accuracy,
        replicas_bitwise_identical=replicas_are_identical(model, optimizer, group),
        first_gradient_largest_relative_difference=difference,
        versions=versions(),
    )
    if get_rank() == 0:
        print(report.table(), flush=True)
        if options.report:
            report.write(options.report)
        if options.timeline:
            draw(steps, options.timeline)
    destroy_process_group()
    return 0 if report.is_exact() else 1


def fit(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    options: Options,
) -> Measurement:
    """Train, and measure every step."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LEARNING_RATE, total_steps=options.epochs * len(loader))
    measurement = Measurement()
    model.train()
    began = time.perf_counter()
    for epoch in epochs_with_progress(options.epochs, is_shown=get_rank() == 0):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # the loader's type does not say which sampler it has
        for images, labels in loader:
            with measurement.step(model):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
    measurement.training_s = time.perf_counter() - began
    return measurement


@torch.no_grad()
def evaluate(model: DistributedDataParallel, test: TensorDataset) -> float:
    """The share of test images that are recognised; each rank looks at its part of them."""
    model.eval()
    images, labels = (tensor[get_rank() :: get_world_size()] for tensor in test.tensors)
    correct = (model(images).argmax(dim=1) == labels).sum()
    all_reduce(correct, ReduceOp.SUM)
    return int(correct) / len(test)


if __name__ == "__main__":
    sys.exit(main())
