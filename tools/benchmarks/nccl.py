"""NCCL through CuPy and torch's own NCCL side by side, on the GPUs of one machine.

    python tools/benchmarks/nccl.py [--ranks N] [--rounds 60] [--json PATH] [--trace PATH]

Every rank is a process. With fewer GPUs than ranks they share one, through a testing aid that uses sockets; such figures say
nothing about either. The contenders take turns in one process, so that disturbances hit both alike. It prints medians with
their quartiles, ours divided by torch's, and the share of the communication that computation hides.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, ReduceOp, destroy_process_group
from syncline.ddp import DistributedDataParallel
from test_support.gpu_ranks import choose_gpu, connect

WARM_UP = 10
# With the small batch, the CPU is busy for longer than the GPU; with the large one, the GPU is.
BATCHES = (8, 64)
ALL_REDUCE_BYTES = {"4 B": 4, "1 MiB": 1 << 20, "25 MiB": 25 << 20, "256 MiB": 256 << 20}


def transformer() -> torch.nn.Module:
    """Six layers of 512: 72 MiB of gradients."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call by the GPU's own clock, in turns."""
    taken_ms: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP + rounds):
        for name in random.Random(number).sample(list(calls), len(calls)):  # the same order on every rank
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                taken_ms[name].append(start.elapsed_time(end))
    return taken_ms


def slowest(taken_ms: dict[str, list[float]], size: int) -> dict[str, list[float]]:
    """Each round's slowest rank."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, taken_ms)
    return {name: [max(values) for values in zip(*(entry[name] for entry in everyone), strict=True)] for name in taken_ms}


def all_reduces(group: ProcessGroup, device: torch.device, number_of_bytes: int) -> dict[str, Callable[[], object]]:
    """An average of float32."""
    tensor = torch.ones(number_of_bytes // 4, device=device)
    return {
        "ours": lambda: group.all_reduce(tensor, ReduceOp.AVG, async_op=True).wait(),
        "torch": lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
    }


def steps(group: ProcessGroup, device: torch.device, batch: int) -> dict[str, Callable[[], object]]:
    """A training step: forward, backward, optimizer."""
    torch.manual_seed(0)
    model = transformer().to(device)
    data = torch.randn(batch, 128, 512, device=device)
    modules: dict[str, torch.nn.Module] = {
        "ours": DistributedDataParallel(copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True),
        "torch": torch.nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), device_ids=[device], gradient_as_bucket_view=True
        ),
        "none": copy.deepcopy(model),
    }

    def step_of(module: torch.nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            module(data).square().mean().backward()
            optimizer.step()

        return step

    return {name: step_of(module) for name, module in modules.items()}


def hidden_share(step: Callable[[], object], trace: Path | None) -> float:
    """The share of NCCL's time on the GPU in which another kernel ran, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    talking = [(event["ts"], event["ts"] + event["dur"]) for event in kernels if "nccl" in event["name"].lower()]
    computing = [(event["ts"], event["ts"] + event["dur"]) for event in kernels if "nccl" not in event["name"].lower()]
    total = sum(end - start for start, end in talking)
    return common(talking, computing) / total if total else 0.0


def common(these: list[tuple[float, float]], those: list[tuple[float, float]]) -> float:
    """For how long intervals of both lists overlap; those of `these` do not overlap each other. A pure function."""
    merged: list[list[float]] = []
    for start, end in sorted(those):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(max(0.0, min(end, e) - max(start, s)) for start, end in these for s, e in merged)


def row(case: str, taken_ms: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles."""
    medians = {name: statistics.median(values) for name, values in taken_ms.items()}
    quartiles = {name: [round(quartile, 3) for quartile in statistics.quantiles(values)] for name, values in taken_ms.items()}
    return {"case": case, "ours_vs_torch": round(medians["ours"] / medians["torch"], 3), "quartiles_ms": quartiles}


def measure(rank: int, size: int, folder: Path, rounds: int, trace: Path | None) -> list[dict[str, Any]]:
    """All cases, on one rank."""
    device = choose_gpu(rank, size)
    dist.init_process_group("nccl", init_method=f"file://{folder}/torch", rank=rank, world_size=size)
    group = connect("nccl", rank, size, folder)
    rows = []
    for name, number_of_bytes in ALL_REDUCE_BYTES.items():
        taken_ms = slowest(timed(all_reduces(group, device, number_of_bytes), rounds), size)
        rows.append(row(f"all_reduce, {name}", taken_ms))
        if size > 1:
            moved = number_of_bytes * 2 * (size - 1) / size
            bandwidths = {which: moved / statistics.median(values) / 1e6 for which, values in taken_ms.items()}
            rows[-1]["bus_gb_per_s"] = {which: round(value, 3) for which, value in bandwidths.items()}
    for batch in BATCHES:
        contenders = steps(group, device, batch)
        rows.append(row(f"step, transformer 6 x 512, batch {batch}", slowest(timed(contenders, rounds), size)))
        traces = {"ours": trace if rank == 0 else None, "torch": None}
        rows[-1]["hidden"] = {name: round(hidden_share(contenders[name], path), 3) for name, path in traces.items()}
    destroy_process_group()
    dist.destroy_process_group()
    return rows


def main() -> int:
    """Start the ranks; each runs this file again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="where rank 0 leaves a step of ours as a Chrome trace")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        return start_ranks(options.ranks)
    rows = measure(options.rank, options.ranks, options.folder, options.rounds, options.trace)
    if options.rank == 0:
        shared = torch.cuda.device_count() < options.ranks
        print(f"{options.ranks} ranks on {torch.cuda.get_device_name()}{', which they share' if shared else ''}")
        for entry in rows:
            print(entry)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2))
    return 0


def start_ranks(size: int) -> int:
    """One process each; the largest exit status."""
    with tempfile.TemporaryDirectory(prefix="syncline-nccl-") as folder:
        words = [sys.executable, *sys.argv, "--ranks", str(size), "--folder", folder]
        ranks = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(size)]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
