"""One rank of a job that trains each model twice, under native DDP over Gloo and under ours over MPI, and compares.

Usage: mpiexec -n N python native_ddp_comparison.py RENDEZVOUS_FILE

Rank 0 prints a line "COMPARED {...}" for each model: its name, the number of steps, whether everything was bitwise equal, and
the largest difference of a gradient, relative to the gradient's largest value.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from syncline.collectives import destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel

STEPS = 4
SHARE = 6
CAP_MB = 0.005  # several buckets in each model
Tensors = dict[str, torch.Tensor]


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.GELU(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 5))


def cnn() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),  # a bias before a norm has a gradient of rounding errors
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2, bias=False),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 3 * 3, 5),
    )


class Transformer(torch.nn.Module):
    """Has dropout. Both runs draw the same masks, because each forward starts from the same seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(12, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(inputs)).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "cnn with batch norm": (cnn, (1, 8, 8)),
    "transformer": (Transformer, (7, 12)),
}


@dataclass
class Comparison:
    """The line that rank 0 prints for a model."""

    model: str
    dtype: str
    as_view: bool
    steps: int = 0
    is_bitwise: bool = True
    largest_gradient_difference: float = 0.0
    names: set[str] = field(default_factory=set)

    def compare(self, native: Tensors, ours: Tensors, *, rtol: float) -> None:
        assert native.keys() == ours.keys()
        assert native
        for name, expected in native.items():
            found, scale = ours[name], float(expected.abs().max())
            difference = float((found - expected).abs().max()) / scale if scale else 0.0
            assert difference <= rtol, f"{self.model}, {name}: {difference:.2e} in step {self.steps}"
            assert found.dtype == expected.dtype
            self.is_bitwise &= torch.equal(found, expected)
            self.largest_gradient_difference = max(self.largest_gradient_difference, difference)
            self.names.add(name)

    def line(self) -> str:
        return "COMPARED " + json.dumps({**vars(self), "names": len(self.names)})


def gradients(model: torch.nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Iterator[tuple[Tensors, Tensors]]:
    """The gradients and then the state, after every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 + rank)
    for step in range(STEPS):
        inputs = torch.randn(SHARE, *shape, generator=generator).to(dtype)
        targets = torch.randint(5, (SHARE,), generator=generator)
        optimizer.zero_grad()
        torch.manual_seed(step * 100 + rank)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        found = gradients(model)
        optimizer.step()
        yield found, {name: value.double() for name, value in model.state_dict().items()}


def compare(name: str, dtype: torch.dtype, as_view: bool, rank: int) -> Comparison:
    make_model, shape = MODELS[name]
    # Each rank begins with other weights, so that both have to broadcast rank 0's state.
    torch.manual_seed(rank)
    model = make_model().to(dtype)
    native = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=CAP_MB, gradient_as_bucket_view=as_view
    )
    ours = DistributedDataParallel(model, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=as_view)
    comparison = Comparison(name, str(dtype), as_view)
    rtol = 1e-12 if dtype is torch.float64 else 1e-5
    pairs = zip(train(native, shape, dtype, rank), train(ours, shape, dtype, rank), strict=True)
    for (native_gradients, native_state), (our_gradients, our_state) in pairs:
        comparison.compare(native_gradients, our_gradients, rtol=rtol)
        comparison.compare(native_state, our_state, rtol=rtol)
        comparison.steps += 1
    return comparison


def main() -> None:
    group = init_process_group("mpi", timeout=60)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=group.rank, world_size=group.size)
    for name in MODELS:
        for dtype in (torch.float32, torch.float64):
            for as_view in (False, True):
                comparison = compare(name, dtype, as_view, group.rank)
                if group.rank == 0:
                    print(comparison.line(), flush=True)
    dist.destroy_process_group()
    destroy_process_group()


if __name__ == "__main__":
    main()
