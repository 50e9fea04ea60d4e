"""What the package's main module imports by a relative name."""

import torch


def loss_of(model, rank, step):
    return model(torch.linspace(-1, 1, 18).view(2, 9) * (rank + 1) + step).square().mean()
