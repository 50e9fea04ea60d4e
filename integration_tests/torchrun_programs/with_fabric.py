"""Lightning Fabric: launched from outside, it finds the ranks."""

import os

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
)
fabric.launch()
fabric.seed_everything(9, verbose=False)
module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(192.0).view(32, 6).cos()), 4, shuffle=True))
for index, (batch,) in enumerate(loader):
    optimizer.zero_grad()
    loss = module(batch).square().mean()
    fabric.backward(loss)
    optimizer.step()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    print(f"loss {fabric.global_rank} {index} {loss.item().hex()} {mean.item().hex()}\n", end="")
assert fabric.broadcast({"from": fabric.global_rank}) == {"from": 0}
