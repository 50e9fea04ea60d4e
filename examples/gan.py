"""Two models that train against each other: a generator of points on a ring, and a discriminator that tells them from real ones.

    mpirun -n 2 python gan.py

Each model gets a DistributedDataParallel and an optimizer of its own.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from syncline.collectives import ReduceOp, all_reduce, default_device, destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel

NOISE, WIDTH, BATCH, STEPS_OF_AN_EPOCH = 4, 32, 64, 50


def network(inputs: int, outputs: int) -> torch.nn.Module:
    hidden = [torch.nn.Linear(inputs, WIDTH), torch.nn.LeakyReLU(0.2), torch.nn.Linear(WIDTH, WIDTH), torch.nn.LeakyReLU(0.2)]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(WIDTH, outputs))


def ring(points: int) -> torch.Tensor:
    """Points `[points, 2]` near a circle with radius 2."""
    angles = 2 * torch.pi * torch.rand(points)
    return 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * torch.randn(points, 2)


def distance(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
    """The energy distance between two sets of points: 0 for equal distributions."""
    return 2 * torch.cdist(these, those).mean() - torch.cdist(these, these).mean() - torch.cdist(those, those).mean()


def main() -> torch.nn.ModuleList:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    options = parser.parse_args()

    group = init_process_group()
    device = default_device()
    torch.manual_seed(group.rank)  # other noise and other real points on each rank; the wrappers give all ranks rank 0's weights
    generator = DistributedDataParallel(network(NOISE, 2).to(device))
    discriminator = DistributedDataParallel(network(2, 1).to(device))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    ones, zeros = torch.ones(BATCH, 1, device=device), torch.zeros(BATCH, 1, device=device)
    if group.rank == 0:
        print(f"{group.size} ranks, each with {BATCH} points in a step", flush=True)

    for epoch in range(options.epochs):
        losses = torch.zeros(3, device=device)
        for _ in range(STEPS_OF_AN_EPOCH):
            real = ring(BATCH).to(device)
            fake = generator(torch.randn(BATCH, NOISE, device=device))

            # The discriminator learns; `detach` keeps its gradients out of the generator.
            discriminator_optimizer.zero_grad()
            verdicts = discriminator(torch.cat([real, fake.detach()]))
            discriminator_loss = F.binary_cross_entropy_with_logits(verdicts, torch.cat([ones, zeros]))
            discriminator_loss.backward()
            discriminator_optimizer.step()

            # The generator learns through a frozen discriminator, whose gradients would only be thrown away.
            discriminator.requires_grad_(False)
            generator_optimizer.zero_grad()
            generator_loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
            generator_loss.backward()
            generator_optimizer.step()
            discriminator.requires_grad_(True)
            losses += torch.stack([discriminator_loss, generator_loss, distance(real, fake)]).detach()
        losses /= STEPS_OF_AN_EPOCH
        all_reduce(losses, ReduceOp.AVG)
        if group.rank == 0:
            theirs, ours, apart = losses.tolist()
            print(f"epoch {epoch + 1}: discriminator {theirs:.3f}, generator {ours:.3f}, distance {apart:.4f}", flush=True)

    destroy_process_group()
    return torch.nn.ModuleList([generator.module, discriminator.module])


if __name__ == "__main__":
    main()
