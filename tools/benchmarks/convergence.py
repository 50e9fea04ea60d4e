"""The cost of compression in accuracy: trains the digits task with each hook, compares test accuracy and bytes sent.

    python tools/benchmarks/convergence.py [--epochs 20] [--seeds 0 1 2 3 4] [--json PATH] [--picture PATH]

Two ranks, which are threads of this process. So the result does not depend on a machine's network, and a seed always gives the
same training. Network, data, batch and learning rates are those of packages/ddp/examples/digits. Bytes are those that one rank
hands to collectives, from the first step to the last; between two ranks it sends the same number. PowerSGD begins after 10
plain steps.

Needs `pip install 'syncline-ddp[examples]' syncline-hooks`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from syncline import hooks
from syncline.collectives import ProcessGroup
from syncline.collectives.engine.call import Signature
from syncline.collectives.engine.composed import DelegatingGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.work import Work
from syncline.ddp import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "ddp" / "examples" / "digits"))

from data import load, loader_of_rank
from model import BUCKET_CAP_MB, DigitsNetwork

RANKS = 2
BATCH_SIZE = 96
MAX_LEARNING_RATE = 0.1
START = 10  # plain steps before PowerSGD
TOLERANCE_POINTS = 0.5

Named = list[tuple[str, torch.Tensor]]


def power(rank: int) -> Callable[[Named], Any]:
    return lambda named: hooks.PowerSGDState(None, rank, START, named_parameters=named)


def compressed(compressor: hooks.Compressor) -> Callable[[Named], Any]:
    return lambda named: hooks.CompressionState(compressor, named_parameters=named)


def phases(named: Named) -> hooks.ScheduleState:
    plain, halves = hooks.Phase(0, hooks.allreduce_hook), hooks.Phase(10, hooks.bf16_compress_hook)
    return hooks.ScheduleState([plain, halves, hooks.Phase(30, hooks.powerSGD_hook, power(2)(named))])


UNCOMPRESSED = "uncompressed"
HOOKS: dict[str, tuple[Any, Callable[[Named], Any]]] = {
    UNCOMPRESSED: (hooks.allreduce_hook, lambda _: None),
    "fp16": (hooks.fp16_compress_hook, lambda _: None),
    "bf16": (hooks.bf16_compress_hook, lambda _: None),
    "int8": (hooks.compression_hook, compressed(hooks.Int8())),
    "int8 per channel": (hooks.compression_hook, compressed(hooks.Int8(per_channel=True))),
    "one bit": (hooks.compression_hook, compressed(hooks.OneBit())),
    "top 1 %": (hooks.compression_hook, compressed(hooks.TopK(0.01))),
    "random 5 %": (hooks.compression_hook, compressed(hooks.RandomK(0.05))),
    "PowerSGD rank 1": (hooks.powerSGD_hook, power(1)),
    "PowerSGD rank 2": (hooks.powerSGD_hook, power(2)),
    "PowerSGD rank 4": (hooks.powerSGD_hook, power(4)),
    "batched PowerSGD rank 2": (hooks.batched_powerSGD_hook, power(2)),
    "plain, bf16, PowerSGD rank 2": (hooks.schedule_hook, phases),
}


class CountingGroup(DelegatingGroup):
    """Passes everything to one group, and counts the bytes."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__([group])
        self._group = group
        self.nbytes = 0

    @property
    def backend_name(self) -> str:
        return self._group.backend_name

    @property
    def device_types(self) -> frozenset[str]:
        return self._group.device_types

    def describe(self) -> str:
        return self._group.describe()

    def _choose(self, device_type: str) -> ProcessGroup:  # noqa: ARG002 - there is one
        return self._group

    def _issue(
        self, signature: Signature, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], async_op: bool
    ) -> Work:
        self.nbytes += signature.nbytes
        return super()._issue(signature, reads, writes, async_op)

    def _split(self, color: int | None, key: int, timeout_s: float) -> ProcessGroup | None:
        return self._group.split(color, key, timeout_s=timeout_s)


@dataclass(frozen=True)
class Training:
    """The result of one training: percent of the test images recognised, and bytes that one rank has sent."""

    accuracy_percent: float
    bytes_sent: int


def train(name: str, seed: int, epochs: int) -> Training:
    """Train on two ranks; deterministic."""
    torch.manual_seed(seed)
    networks = [DigitsNetwork() for _ in range(RANKS)]  # here, because ranks that are threads share the random numbers
    train_set, test_set = load()

    def body(group: ProcessGroup) -> Training:
        counting, network = CountingGroup(group), networks[group.rank]
        hook, make_state = HOOKS[name]
        model = DistributedDataParallel(network, process_group=group, bucket_cap_mb=BUCKET_CAP_MB, forward_sync_buffers=False)
        state = make_state(list(network.named_parameters()))
        if state is None:
            state = counting
        else:
            _give_group(state, counting)
        model.register_comm_hook(state, hook)
        loader = loader_of_rank(train_set, group.rank, RANKS, BATCH_SIZE, seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=MAX_LEARNING_RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LEARNING_RATE, total_steps=epochs * len(loader))
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # the loader's type does not say which it has
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
        images, labels = test_set.tensors
        with torch.no_grad():
            correct = network.eval()(images).argmax(dim=1) == labels
        return Training(100 * float(correct.double().mean()), counting.nbytes)

    return run_ranks(RANKS, body, timeout_s=600)[0]


def _give_group(state: Any, group: ProcessGroup) -> None:
    if not isinstance(state, hooks.ScheduleState):
        state.process_group = group
        return
    phases_with_group = []
    for phase in state.phases:
        if phase.state is not None:
            phase.state.process_group = group
        phases_with_group.append(hooks.Phase(phase.first_step, phase.hook, phase.state or group))
    state.phases = phases_with_group


def summary(name: str, trainings: Sequence[Training], uncompressed: Sequence[Training]) -> dict[str, Any]:
    """Means over the seeds, the spread, and the differences from uncompressed training."""
    accuracies = [training.accuracy_percent for training in trainings]
    lost = statistics.mean(training.accuracy_percent for training in uncompressed) - statistics.mean(accuracies)
    return {
        "hook": name,
        "accuracy_percent": statistics.mean(accuracies),
        "lowest_percent": min(accuracies),
        "highest_percent": max(accuracies),
        "points_lost": lost,
        "bytes_sent": trainings[0].bytes_sent,
        "ratio": uncompressed[0].bytes_sent / trainings[0].bytes_sent,
        "trainings": [asdict(training) for training in trainings],
    }


def line(entry: dict[str, Any]) -> str:
    """One line of the table."""
    spread = f"[{entry['lowest_percent']:.2f} {entry['highest_percent']:.2f}]"
    sent = f"{entry['bytes_sent'] / 2**20:8.2f} MiB  {entry['ratio']:6.1f}x"
    return f"{entry['hook']:<30} {entry['accuracy_percent']:6.2f} {spread:<17} {entry['points_lost']:+6.2f}  {sent}"


def draw(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against bytes, a point for each hook with a bar from the lowest to the highest seed."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for number, entry in enumerate(entries):
        x, y = entry["bytes_sent"] / 2**20, entry["accuracy_percent"]
        below, above = y - entry["lowest_percent"], entry["highest_percent"] - y
        marker, label = "os^vDPX"[number % 7], f"{entry['hook']}, {entry['ratio']:.1f}x"
        axes.errorbar(x, y, yerr=[[below], [above]], marker=marker, linestyle="none", capsize=3, alpha=0.8, label=label)
    base = entries[0]["accuracy_percent"]
    axes.axhspan(base - TOLERANCE_POINTS, base, alpha=0.1, label=f"within {TOLERANCE_POINTS} points of uncompressed")
    axes.set_xscale("log")
    axes.set_xlabel("MiB sent by each rank, logarithmic")
    axes.set_ylabel("test accuracy, percent")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'hook':<30} accuracy, % [lowest, highest]  lost    sent by each rank   ratio", flush=True)
    entries: list[dict[str, Any]] = []
    uncompressed: list[Training] = []
    for name in HOOKS:
        trainings = [train(name, seed, options.epochs) for seed in options.seeds]
        uncompressed = uncompressed or trainings
        entries.append(summary(name, trainings, uncompressed))
        print(line(entries[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"epochs": options.epochs, "seeds": options.seeds, "hooks": entries}, indent=2))
        if options.picture:
            draw(entries, options.picture)


if __name__ == "__main__":
    main()
