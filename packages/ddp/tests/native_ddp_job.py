"""One rank of a job that trains each model under native DDP and under ours, over the same Gloo group, and compares.

Usage: native_ddp_job.py RANK WORLD_SIZE FOLDER

Each rank writes what it compared to a file in the folder, which test_native_ddp reads: for each case the number of steps, of
gradients, of gradients that are None, and the largest relative difference.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from syncline.ddp import DistributedDataParallel

STEPS = 5
SHARE = 4
Gradients = dict[str, "torch.Tensor | None"]


class Experts(torch.nn.Module):
    """Each batch goes to one expert, which depends on the rank and the step; the last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 8)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return self.head(self.experts[call % 3](hidden))  # type: ignore[no-any-return]


class SparseTable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 6, sparse=True)
        self.bag = torch.nn.EmbeddingBag(12, 6, mode="mean", sparse=True)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        rows = (inputs.abs() * 7).long() % 12
        return self.head(self.table(rows).mean(1) + self.bag(rows))  # type: ignore[no-any-return]


class Pair(NamedTuple):
    first: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


class SeveralOutputs(torch.nn.Module):
    """A named tuple with nested containers, of which the loss takes another part in each step, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(6, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(4))

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        outputs = Pair(self.heads[0](hidden), {"rest": [head(hidden) for head in self.heads[1:]]})
        flat = [outputs.first, *outputs.rest["rest"]]
        return flat[call % 3]


class Checkpointed(torch.nn.Module):
    """Re-entrant checkpoints, one block twice, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.head, self.unused = torch.nn.Linear(8, 3), torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.block, hidden, use_reentrant=True))
        return self.head(hidden)  # type: ignore[no-any-return]


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(self.lstm(inputs.view(SHARE, 2, 3))[0][:, -1])  # type: ignore[no-any-return]


class Tied(torch.nn.Module):
    """The embedding's weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 6)
        self.head = torch.nn.Linear(6, 3)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.head(torch.tanh(inputs + self.embedding(inputs.abs()[:, 0].long() % 3)))  # type: ignore[no-any-return]


class ChannelsLast(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 4, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        images = torch.cat([inputs, inputs], 1).view(SHARE, 2, 2, 3).to(memory_format=torch.channels_last)
        return self.head(self.norm(self.convolution(images)).flatten(1))  # type: ignore[no-any-return]


class Ignoring(torch.nn.Module):
    """One layer and one buffer are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self, ["own.weight", "own.bias", "count"]
        )

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        return self.shared(inputs) + self.own(inputs)  # type: ignore[no-any-return]


UNUSED = {"find_unused_parameters": True}
CASES: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "experts": (Experts, UNUSED),
    "experts, as view": (Experts, {**UNUSED, "gradient_as_bucket_view": True}),
    "experts, accumulated": (Experts, UNUSED),
    "several outputs": (SeveralOutputs, UNUSED),
    "sparse": (SparseTable, {}),
    "sparse, unused allowed": (SparseTable, UNUSED),
    "checkpointed": (Checkpointed, {"static_graph": True}),
    "checkpointed, as view": (Checkpointed, {"static_graph": True, "gradient_as_bucket_view": True}),
    "recurrent": (Recurrent, {"static_graph": True}),
    "tied": (Tied, {}),
    "tied, hooked": (Tied, {}),
    "tied, hooked, static, as view": (Tied, {"static_graph": True, "gradient_as_bucket_view": True}),
    "channels last": (ChannelsLast, {"bucket_cap_mb_list": [0.0001, 0.001]}),
    "ignoring": (Ignoring, {"forward_sync_buffers": True}),
}


def halve(parameter: torch.Tensor) -> None:
    """A user's hook, which runs after those that were registered before, on what native DDP reduces."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def train(case: str, model: torch.nn.Module, rank: int) -> Iterator[tuple[Gradients, Gradients]]:
    """The gradients and then the state, after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1000 + rank)
    if "hooked" in case:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2 if "accumulated" in case else 1):
            inputs = torch.randn(SHARE, 6, generator=generator).requires_grad_()
            targets = torch.randint(3, (SHARE,), generator=generator)
            is_last = "accumulated" not in case or micro == 1
            with nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                torch.nn.functional.cross_entropy(model(inputs, call=2 * step + rank + micro), targets).backward()
        found: Gradients = {name: None if p.grad is None else p.grad.to_dense().clone() for name, p in model.named_parameters()}
        assert all(p.grad is None or p.grad.layout is torch.sparse_coo for n, p in model.named_parameters() if ".table." in n)
        optimizer.step()
        yield found, {name: value.clone() for name, value in model.state_dict().items()}


def difference(native: Gradients, ours: Gradients, where: str) -> float:
    assert native.keys() == ours.keys(), where
    largest = 0.0
    for name, expected in native.items():
        found = ours[name]
        assert (found is None) == (expected is None), f"{where}: {name} is {found}, natively {expected}"
        if expected is not None and found is not None:
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride()
            scale = float(expected.abs().max()) or 1.0
            largest = max(largest, float((found - expected).abs().max()) / scale)
    return largest


def compare(case: str, rank: int) -> dict[str, Any]:
    make_model, options = CASES[case]
    torch.manual_seed(rank)  # each rank begins elsewhere, so that both have to broadcast rank 0's state
    model = make_model()
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters  # an older torch has fewer sizes to choose
    native_options = {name: value for name, value in {"bucket_cap_mb": 0.0005, **options}.items() if name in known}
    native = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), **native_options)
    caps = {} if "bucket_cap_mb_list" in options else {"bucket_cap_mb": 0.0005}
    ours = DistributedDataParallel(model, **caps, **options)
    result = {"steps": 0, "gradients": 0, "nones": 0, "difference": 0.0, "names": len(list(native.parameters()))}
    for number, (theirs, mine) in enumerate(zip(train(case, native, rank), train(case, ours, rank), strict=True)):
        for expected, found in zip(theirs, mine, strict=True):
            result["difference"] = max(result["difference"], difference(expected, found, f"{case}, step {number}"))
        result["steps"] += 1
        result["gradients"] += sum(gradient is not None for gradient in theirs[0].values())
        result["nones"] += sum(gradient is None for gradient in theirs[0].values())
    assert ours.logging_data().keys() >= {"world_size", "backward_compute_time", "num_buckets_reduced", "bucket_cap_bytes"}
    return result


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of native DDP
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found = {case: compare(case, rank) for case in CASES}
    (folder / f"compared-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
