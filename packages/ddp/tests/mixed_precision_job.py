"""One rank of a job that trains models in mixed precision, under native DDP and under ours, over one Gloo group, and compares.

Usage: mixed_precision_job.py RANK WORLD_SIZE FOLDER

Native DDP copies parameters on a stream of an accelerator. On the CPU nothing runs aside, so here its streams and events are
replaced by ones that do nothing; the rest is torch's own code.

There are things that native DDP (torch 2.13) does not do in mixed precision, and that are compared with local training in
test_mixed_precision: its first backward reduces buckets that it has not filled (so here both begin with one that does not
count), and shared parameters, parameters that no rank uses, and a second `no_sync` forward end in errors.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from native_ddp_job import Gradients, Recurrent, difference
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from syncline.ddp import DistributedDataParallel

STEPS = 4
SHARE = 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class NoStream:
    """A stream, or an event, where nothing runs aside."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    record = wait = wait_stream = _nothing


class WithBuffers(torch.nn.Module):
    """Two layers, a buffer that takes part, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.register_buffer("offset", torch.linspace(-1, 1, 8))
        self.frozen = torch.nn.Parameter(torch.linspace(0.5, 2, 8), requires_grad=False)

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        offset = self.offset.to(inputs.dtype)  # type: ignore[operator]
        return self.head(torch.tanh(self.first(inputs) * self.frozen + offset))  # type: ignore[no-any-return]


class Checkpointed(WithBuffers):
    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.first(x) * self.frozen), inputs, use_reentrant=False)
        return self.head(hidden)  # type: ignore[no-any-return]


class Ignoring(torch.nn.Module):
    """One layer is each rank's own, and stays in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["own.weight", "own.bias"])

    def forward(self, inputs: torch.Tensor, call: int) -> torch.Tensor:
        assert self.own.weight.dtype is FP32
        return self.shared(inputs) + self.own(inputs.float())  # type: ignore[no-any-return]


CASES: dict[str, tuple[type[torch.nn.Module], dict[str, Any], dict[str, Any]]] = {
    "all in bfloat16": (WithBuffers, {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}, {}),
    "parameters only": (WithBuffers, {"param_dtype": BF16}, {}),
    "reduced in full": (WithBuffers, {"param_dtype": BF16, "reduce_dtype": FP32}, {}),
    "float16": (WithBuffers, {"param_dtype": FP16, "reduce_dtype": BF16}, {}),
    "checkpointed": (Checkpointed, {"param_dtype": BF16}, {}),
    "recurrent": (Recurrent, {"param_dtype": BF16}, {}),
    "ignoring": (Ignoring, {"param_dtype": BF16}, {}),
}


def train(model: torch.nn.Module, rank: int) -> Iterator[tuple[Gradients, Gradients]]:
    """The gradients and then the state, after every step but the first, which is no step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1000 + rank)
    for step in range(1 + STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(SHARE, 6, generator=generator)
        targets = torch.randint(3, (SHARE,), generator=generator)
        outputs = model(inputs, call=step)
        torch.nn.functional.cross_entropy(outputs.float(), targets).backward()
        found: Gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        assert {p.dtype for p in model.parameters()} == {FP32}
        if step > 0:
            optimizer.step()
            yield found, {name: value.clone() for name, value in model.state_dict().items()}


def compare(case: str, rank: int) -> dict[str, float]:
    make_model, precision, options = CASES[case]
    models = []
    for _ in range(2):
        torch.manual_seed(rank)
        models.append(make_model())
    native = torch.nn.parallel.DistributedDataParallel(
        models[0], mixed_precision=_MixedPrecision(**precision), bucket_cap_mb=0.0005, **options
    )
    ours = DistributedDataParallel(models[1], mixed_precision=_MixedPrecision(**precision), bucket_cap_mb=0.0005, **options)
    result = {"steps": 0, "gradients": 0, "difference": 0.0}
    for number, (theirs, mine) in enumerate(zip(train(native, rank), train(ours, rank), strict=True)):
        for expected, found in zip(theirs, mine, strict=True):
            result["difference"] = max(result["difference"], difference(expected, found, f"{case}, step {number}"))
        result["steps"] += 1
        result["gradients"] += sum(gradient is not None for gradient in theirs[0].values())
    return result


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of native DDP
    torch.Stream = torch.Event = NoStream  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = lambda *_: NoStream()  # type: ignore[assignment, return-value]
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    found = {case: compare(case, rank) for case in CASES}
    (folder / f"compared-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
