"""torch's FSDP2 over MPI: each rank keeps a part of every parameter, and gathers a layer's parameters while it uses them.

    mpirun -n 2 python fsdp2.py --save model.pt

Syncline is a backend of torch.distributed here; `mpi://` finds the ranks without an address or a port.
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

import syncline.collectives.torch_backend  # noqa: F401 - registers the backend "syncline" and `mpi://`

INPUTS, WIDTH, LAYERS, SAMPLES, BATCH = 16, 128, 4, 640, 32


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(F.gelu(self.inner(self.norm(hidden))))


def held_elements(model: torch.nn.Module) -> int:
    """How many elements of the parameters are in this rank's memory."""
    return sum(each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in model.parameters())


def main() -> dict[str, torch.Tensor]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    parser.add_argument("--save", type=Path, help="write the whole model to this file")
    options = parser.parse_args()

    dist.init_process_group("syncline", init_method="mpi://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # FSDP2 sends no weights, so all ranks must begin with the same ones
    layers = [Layer() for _ in range(LAYERS)]
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, WIDTH), *layers, torch.nn.Linear(WIDTH, 1))
    whole = held_elements(model)
    for layer in layers:
        fully_shard(layer)  # gathered and freed layer by layer
    fully_shard(model)  # the first and the last linear layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding: its state is as small as the shards
    if rank == 0:
        print(f"{ranks} ranks, each with {held_elements(model)} of {whole} parameters", flush=True)

    data = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(rank))  # other samples on each rank
    for epoch in range(options.epochs):
        total = torch.zeros(())
        for inputs in data.split(BATCH):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / (ranks * SAMPLES / BATCH):.4f}", flush=True)

    # All ranks call this one: it gathers the shards.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if options.save and rank == 0:
        torch.save(state, options.save)
    dist.destroy_process_group()
    return state


if __name__ == "__main__":
    main()
