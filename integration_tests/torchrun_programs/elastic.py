"""What scripts ask of torchelastic: whether it launched them, the run's id, how often it restarted; and `record`."""

import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main():
    assert dist.is_torchelastic_launched()
    assert os.environ["TORCHELASTIC_RUN_ID"]
    assert int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0
    assert int(os.environ["GROUP_RANK"]) * int(os.environ["LOCAL_WORLD_SIZE"]) + int(os.environ["LOCAL_RANK"]) == int(
        os.environ["RANK"]
    )
    assert int(os.environ["GROUP_WORLD_SIZE"]) * int(os.environ["LOCAL_WORLD_SIZE"]) == int(os.environ["WORLD_SIZE"])
    assert (os.environ["ROLE_RANK"], os.environ["ROLE_NAME"]) == (os.environ["RANK"], "default")
    assert dist.get_node_local_rank() == int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    dist.init_process_group()  # no backend named
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    loss = model(torch.full((2, 8), 0.1 + dist.get_rank())).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(f"loss {dist.get_rank()} {loss.item().hex()} {norm.item().hex()}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
