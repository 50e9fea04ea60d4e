"""One rank that trains on a GPU: RANK SIZE FOLDER. The part to run is named in FOLDER/part.

The oracle is torch's own DDP over torch's own NCCL, in the same process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, destroy_process_group
from syncline.ddp import DistributedDataParallel, convert_sync_batchnorm
from syncline.hooks import PowerSGDState, allreduce_hook, bf16_compress_hook, fp16_compress_hook, powerSGD_hook
from test_support.gpu_ranks import choose_gpu, connect

STEPS = 4
LONG_CYCLES = 400_000_000


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(12, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(inputs)).mean(1))  # type: ignore[no-any-return]


def train(model: torch.nn.Module, device: torch.device, rank: int) -> list[torch.Tensor]:
    """The gradients of every step, then the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 + rank)
    kept = []
    for _ in range(STEPS):
        inputs = torch.randn(6, 7, 12, generator=generator).to(device)
        targets = torch.randint(5, (6,), generator=generator).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return kept + [p.detach().clone() for p in model.parameters()]


def expect_close(found: list[torch.Tensor], expected: list[torch.Tensor], rtol: float, atol: float = 0.0) -> None:
    """Compare each tensor, relative to its largest element. `atol` is for gradients that are zero but for rounding."""
    assert len(found) == len(expected) > 0
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        scale = float(theirs.abs().max())
        difference = float((mine - theirs).abs().max())
        assert difference <= rtol * scale + atol, f"tensor {number} of {len(found)}: {difference:.2e} of {scale:.2e}"


def models(rank: int, device: torch.device) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(rank)  # so that only rank 0's state makes the ranks equal
    model = Transformer().to(device)
    return model, copy.deepcopy(model)


def ddp(group: ProcessGroup, device: torch.device) -> None:
    for as_view in (False, True):
        mine, native = models(group.rank, device)
        options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": as_view}
        expected = train(torch.nn.parallel.DistributedDataParallel(native, [device], **options), device, group.rank)
        found = train(DistributedDataParallel(mine, process_group=group, **options), device, group.rank)
        expect_close(found, expected, 1e-5)


def ddp_by_device(group: ProcessGroup, device: torch.device) -> None:
    """Objects over the host's backend, gradients over NCCL."""
    ddp(group, device)


def hooks(group: ProcessGroup, device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as native_power_sgd

    rank_1 = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    pairs: list[tuple[Callable[[], tuple[Any, Any]], Callable[[], tuple[Any, Any]], float]] = [
        (lambda: (group, allreduce_hook), lambda: (None, default_hooks.allreduce_hook), 1e-5),
        (lambda: (group, fp16_compress_hook), lambda: (None, default_hooks.fp16_compress_hook), 2e-3),
        (lambda: (group, bf16_compress_hook), lambda: (None, default_hooks.bf16_compress_hook), 2e-2),
        (
            lambda: (PowerSGDState(group, **rank_1), powerSGD_hook),
            lambda: (native_power_sgd.PowerSGDState(None, **rank_1), native_power_sgd.powerSGD_hook),
            1e-3,
        ),
    ]
    for ours, theirs, rtol in pairs:
        mine, native = models(group.rank, device)
        wrapped = torch.nn.parallel.DistributedDataParallel(native, [device])
        wrapped.register_comm_hook(*theirs())
        expected = train(wrapped, device, group.rank)
        my_wrapped = DistributedDataParallel(mine, process_group=group)
        my_wrapped.register_comm_hook(*ours())
        expect_close(train(my_wrapped, device, group.rank), expected, rtol)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv1d(7, 8, 3),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Conv1d(8, 4, 3),
            torch.nn.BatchNorm1d(4),
        )
        self.head = torch.nn.Linear(4, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs).mean(2))  # type: ignore[no-any-return]


def sync_batch_norm(group: ProcessGroup, device: torch.device) -> None:
    """Ours against torch's. The bias of a layer before a batch norm has no influence, so its gradient is rounding only."""
    torch.manual_seed(group.rank)
    model = Convolutions().to(device)
    native = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    expected = train(torch.nn.parallel.DistributedDataParallel(native, [device]), device, group.rank)
    mine = DistributedDataParallel(convert_sync_batchnorm(model, group), process_group=group)
    expect_close(train(mine, device, group.rank), expected, 1e-4, atol=1e-6)


def native_ddp_over_ours(group: ProcessGroup, device: torch.device) -> None:
    """torch's DDP, once over torch's NCCL and once over ours through torch.distributed."""
    import syncline.collectives.torch_backend  # noqa: F401 - registers the backend

    ours = dist.new_group(backend="syncline-nccl")
    over_ours, over_torchs = models(group.rank, device)
    expected = train(torch.nn.parallel.DistributedDataParallel(over_torchs, [device]), device, group.rank)
    found = train(torch.nn.parallel.DistributedDataParallel(over_ours, [device], process_group=ours), device, group.rank)
    expect_close(found, expected, 1e-5)
    dist.destroy_process_group(ours)


def ddp_over_torchs_nccl(group: ProcessGroup, device: torch.device) -> None:
    """Our DDP over torch's own group: its future and its stream are torch's."""
    for as_view in (False, True):
        mine, native = models(group.rank, device)
        options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": as_view}
        expected = train(torch.nn.parallel.DistributedDataParallel(native, [device], **options), device, group.rank)
        found = train(DistributedDataParallel(mine, process_group=dist.group.WORLD, **options), device, group.rank)
        expect_close(found, expected, 1e-5)


def a_captured_step(group: ProcessGroup, device: torch.device) -> None:
    """Forward and backward in a CUDA graph, replayed with other data; the graph is dropped before the group."""
    mine, native = models(group.rank, device)
    wrapped = DistributedDataParallel(mine, process_group=group, gradient_as_bucket_view=True)
    native_wrapped = torch.nn.parallel.DistributedDataParallel(native, [device])
    inputs = torch.randn(6, 7, 12, device=device)

    def step(model: torch.nn.Module) -> None:
        model.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step(wrapped)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(wrapped)
    for seed in range(3):
        torch.manual_seed(10 * seed + group.rank)
        inputs.copy_(torch.randn(6, 7, 12))
        graph.replay()
        step(native_wrapped)
        found, expected = ([p.grad for p in model.parameters() if p.grad is not None] for model in (mine, native))
        expect_close(found, expected, 1e-5)
    graph.reset()


def a_step_does_not_wait_for_the_gpu(group: ProcessGroup, device: torch.device) -> None:
    """The CPU issues a whole step while the GPU is busy with other work; torch raises at its own calls that wait."""
    model = DistributedDataParallel(models(group.rank, device)[0], process_group=group, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(6, 7, 12, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "a step waited for the GPU"
    torch.cuda.synchronize()


def forward_on_another_stream(group: ProcessGroup, device: torch.device) -> None:
    """The module is built on one stream and used on another, which is late; gradients are those of torch's DDP."""
    mine, native = models(group.rank, device)
    wrapped = DistributedDataParallel(mine, process_group=group, bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    native_wrapped = torch.nn.parallel.DistributedDataParallel(native, [device])
    inputs = torch.randn(6, 7, 12, device=device)
    side = torch.cuda.Stream()
    for number in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG_CYCLES // 20)
            loss = wrapped(inputs + number).square().mean()
            torch.cuda._sleep(LONG_CYCLES // 20)
            loss.backward()
            found = [p.grad.clone() for p in mine.parameters() if p.grad is not None]
            wrapped.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        native_wrapped.zero_grad()
        native_wrapped(inputs + number).square().mean().backward()
        expect_close(found, [p.grad for p in native.parameters() if p.grad is not None], 1e-5)


def main(rank: int, size: int, folder: Path) -> None:
    device = choose_gpu(rank, size)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # TF32 rounds to 10 bits, and its kernels are chosen again for each shape. Both are off; for cuDNN TF32 is on by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    part = (folder / "part").read_text()
    dist.init_process_group("nccl", init_method=f"file://{folder}/torch", rank=rank, world_size=size)
    group = connect("cpu:gloo,cuda:nccl" if part == "ddp_by_device" else "nccl", rank, size, folder)
    globals()[part](group, device)
    print(f"rank {rank}: {part} passed", flush=True)
    destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
