"""FSDP2 on a device mesh that the script makes, with a checkpoint of all ranks."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
rank = mesh.get_rank()
torch.manual_seed(11)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for step in range(3):
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(inputs).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {rank} {step} {loss.item().hex()} {norm.item().hex()}\n", end="")
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
total = sum(parameter.full_tensor().double().sum() for parameter in model.parameters())
print(f"loss {rank} weights {total.item().hex()}\n", end="")
dist.destroy_process_group()
