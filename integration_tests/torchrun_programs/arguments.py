"""Arguments as scripts took them from torch.distributed.launch: `--local-rank`, with LOCAL_RANK as its default."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("rest", nargs="*")
    return parser.parse_args()


args = parse()
args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
assert args.distributed
assert args.steps == 4, "the options after the script are the script's"
assert args.rest == ["-n", "--backend"], args.rest
dist.init_process_group(
    backend="gloo", init_method="env://", world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"])
)
assert args.local_rank == int(os.environ["RANK"]) % int(os.environ["LOCAL_WORLD_SIZE"])
torch.manual_seed(5)
model = DistributedDataParallel(torch.nn.Linear(30, 3), device_ids=None, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for step in range(args.steps):
    inputs = torch.arange(60.0).view(2, 30).mul(dist.get_rank() + step + 1).sin()
    loss = model(inputs).square().sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"loss {dist.get_rank()} {step} {loss.item().hex()}\n", end="")
dist.barrier()
dist.destroy_process_group()
