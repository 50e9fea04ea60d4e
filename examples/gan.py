"""Two models train against each other: one makes points, the other judges them.

    mpirun -n 2 python gan.py

Each model gets a DistributedDataParallel and an optimizer of its own. The real points lie
on a ring. The distance that is printed falls as the made points come to lie there, too.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from syncline.collectives import (
    ReduceOp,
    all_reduce,
    default_device,
    destroy_process_group,
    init_process_group,
)
from syncline.ddp import DistributedDataParallel

NOISE, WIDTH, BATCH, STEPS_PER_EPOCH = 4, 32, 64, 50


def network(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, WIDTH),
        torch.nn.LeakyReLU(0.2),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.LeakyReLU(0.2),
        torch.nn.Linear(WIDTH, outputs),
    )


def points_of_ring(number: int) -> torch.Tensor:
    """Points `[number, 2]` near a circle with radius 2."""
    angles = 2 * torch.pi * torch.rand(number)
    return 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * torch.randn(number, 2)


def energy_distance(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """About 0 for two sets of points from the same distribution."""
    within = torch.cdist(some, some).mean() + torch.cdist(others, others).mean()
    return 2 * torch.cdist(some, others).mean() - within


def main() -> torch.nn.ModuleList:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    group = init_process_group()
    device = default_device()
    if group.rank == 0:
        print(f"{group.size} ranks over {group.describe()}", flush=True)
    # Other points on each rank. The wrappers give all ranks rank 0's weights.
    torch.manual_seed(group.rank)
    generator = DistributedDataParallel(network(NOISE, 2).to(device))
    discriminator = DistributedDataParallel(network(2, 1).to(device))
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(
        discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9)
    )
    ones, zeros = (
        torch.ones(BATCH, 1, device=device),
        torch.zeros(BATCH, 1, device=device),
    )

    for epoch in range(options.epochs):
        losses = torch.zeros(3, device=device)
        for _ in range(STEPS_PER_EPOCH):
            real = points_of_ring(BATCH).to(device)
            made = generator(torch.randn(BATCH, NOISE, device=device))

            # The discriminator learns. `detach` keeps its gradients out of the generator.
            of_discriminator.zero_grad()
            verdicts = discriminator(torch.cat([real, made.detach()]))
            first = F.binary_cross_entropy_with_logits(verdicts, torch.cat([ones, zeros]))
            first.backward()
            of_discriminator.step()

            # The generator learns. The frozen discriminator gets no gradients, so only
            # those of the generator travel.
            discriminator.requires_grad_(False)
            of_generator.zero_grad()
            second = F.binary_cross_entropy_with_logits(discriminator(made), ones)
            second.backward()
            of_generator.step()
            discriminator.requires_grad_(True)
            losses += torch.stack([first, second, energy_distance(real, made)]).detach()

        losses /= STEPS_PER_EPOCH
        all_reduce(losses, ReduceOp.AVG)  # now they are the same on all ranks
        if group.rank == 0:
            words = "discriminator {:.3f}, generator {:.3f}, distance {:.4f}"
            print(f"epoch {epoch + 1}:", words.format(*losses.tolist()), flush=True)

    destroy_process_group()
    return torch.nn.ModuleList([generator.module, discriminator.module])


if __name__ == "__main__":
    main()
