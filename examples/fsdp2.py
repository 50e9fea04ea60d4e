"""torch's FSDP2 over MPI: each rank keeps a part of every parameter.

    mpirun -n 2 python fsdp2.py --save model.pt

The ranks gather a layer's parameters while they use the layer. Syncline is a backend of
torch.distributed here; `mpi://` finds the ranks without an address or a port.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import syncline.collectives.torch_backend  # noqa: F401 - registers "syncline" and `mpi://`

INPUTS, WIDTH, LAYERS, SAMPLES, BATCH = 16, 128, 4, 640, 32


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(F.gelu(self.inner(self.norm(hidden))))


def elements_here(model: torch.nn.Module) -> int:
    """How many elements of the parameters are in this rank's memory."""
    parts = (
        each.to_local() if isinstance(each, DTensor) else each
        for each in model.parameters()
    )
    return sum(part.numel() for part in parts)


def main() -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", type=Path, help="write the whole model to this file")
    options = parser.parse_args()

    dist.init_process_group("syncline", init_method="mpi://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # FSDP2 sends no weights: all ranks must begin with the same
    layers = [Layer() for _ in range(LAYERS)]
    ends = torch.nn.Linear(INPUTS, WIDTH), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(ends[0], *layers, ends[1])
    whole = elements_here(model)
    for layer in layers:
        fully_shard(layer)  # gathered and freed layer by layer
    fully_shard(model)  # what is left: the two ends
    # Make the optimizer after sharding, so that its state is sharded, too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if rank == 0:
        print(
            f"{ranks} ranks, rank 0 keeps {elements_here(model)} of {whole} elements",
            flush=True,
        )

    # Other samples on each rank.
    data = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(rank))
    for epoch in range(options.epochs):
        total = torch.zeros(())
        for inputs in data.split(BATCH):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)  # now it is the same on all ranks
        if rank == 0:
            mean = total.item() / (ranks * SAMPLES / BATCH)
            print(f"epoch {epoch + 1}: loss {mean:.4f}", flush=True)

    # All ranks call this one: it gathers the parts.
    whole_state = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=whole_state)
    if options.save and rank == 0:
        torch.save(state, options.save)
    dist.destroy_process_group()
    return state


if __name__ == "__main__":
    main()
