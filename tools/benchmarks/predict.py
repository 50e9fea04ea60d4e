"""The quality of `syncline predict`: predicted and measured steps on 2, 4 and 8 emulated hosts, from a trace on 2 of them.

    sudo python3 tools/dev.py bench predict [--rates 200mbit 1gbit] [--hosts 2 4 8] [--backward-ms 25] [--json PATH]

Needs Linux, root and iproute2, and starts MPICH's mpiexec itself. Each host has one rank. The model's layers sleep instead of
computing, like a processor that waits for an accelerator. So 8 ranks fit on 2 cores, and the time that can be hidden is known.

1. On two hosts `syncline bench` measures all-reduces, and a training is traced. The predictions use only these two.
2. The same training is measured on each number of hosts. A step is the median of the times from one forward to the next, on the
   slowest rank. All-reduces of one bucket's size, with nothing beside them, show whether the model of the network is right.

Eight hosts that all-reduce at 1 Gbit/s keep two cores busy, so other programs must not use them. The table says how many cores
other programs took, and how many were idle. With `--backward-ms 10` the cores limit such a training, not the wires. The rates
can be measured one at a time (two minutes each on an idle machine).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpi_runtimes
from commands import ToolError
from mpi_runtimes import MpiRuntime
from syncline.collectives.cli.bench.results import aligned
from syncline.collectives.internal import AlgorithmThresholds
from syncline.ddp.prediction.compression import NONE
from syncline.ddp.prediction.cost_model import CostModel
from syncline.ddp.prediction.forecast import forecast
from syncline.ddp.prediction.network import network_from
from syncline.ddp.prediction.workload_of_trace import workload_of
from syncline.ddp.tracing.trace_file import read_timeline

from . import session
from .emulated_hosts import EmulatedHosts
from .other_load import ProcessorTimes, cores_of_others, told
from .predict_job import BUCKET_BYTES

_TRACED = 2  # number of hosts in the trace
_SIZES = ("512K", "16M")


def main(arguments: Sequence[str] | None = None) -> int:
    """Started once, by root, without mpiexec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="2 to 8 (default: 2 4 8)")
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="of each wire, as tc has it")
    parser.add_argument("--steps", type=session.at_least_one, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument(
        "--backward-ms", type=float, default=25.0, metavar="MS", help="a layer's backward sleeps so long (default: %(default)g)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    options = parser.parse_args(arguments)
    try:
        _run(options, mpi_runtimes.find("mpich"))
    except ToolError as error:
        print(f"bench predict: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: argparse.Namespace, runtime: MpiRuntime) -> None:
    figures: dict[str, dict[str, Any]] = {}
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            for measured in _measure(rate, Path(folder), options, runtime):
                figures[rate] = {"measured": dict(measured), **_predict(Path(folder), sorted(measured))}
                _keep(figures, options.json)
    _show(figures)


def _keep(figures: Mapping[str, Any], path: Path | None) -> None:
    """Write the figures again after each measurement, so that a run that ends early leaves some."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def _show(figures: Mapping[str, Any]) -> None:
    rows = [
        (
            "wire",
            "hosts",
            "measured, ms",
            "predicted, ms",
            "error",
            "all-reduce of 2 MiB, ms",
            "modelled, ms",
            "cores idle in it",
        )
    ]
    for rate, kept in figures.items():
        for count, measured in kept["measured"].items():
            predicted = kept["predicted_s"][count]
            error = f"{100 * (predicted / measured['step_s'] - 1):+.1f} %"
            times = (measured["step_s"], predicted), (measured["all_reduce_s"], kept["all_reduce_s"][count])
            (step, expected), (alone, modelled) = ([f"{1e3 * seconds:.1f}" for seconds in pair] for pair in times)
            rows.append((rate, str(count), step, expected, error, alone, modelled, f"{measured['idle_cores']:.2f}"))
        print(
            f"{rate}: {1e6 * kept['latency_s']:.0f} us, {8e-6 * kept['bandwidth']:.0f} Mbit/s; "
            f"alone {1e3 * kept['alone_s']:.1f} ms; {told([one['cores_of_others'] for one in kept['measured'].values()])}"
        )
    print(aligned(rows))


def _measure(
    rate: str, folder: Path, options: argparse.Namespace, runtime: MpiRuntime
) -> Iterator[dict[int, dict[str, float]]]:
    """Yield the measurements so far after each number of hosts; the folder then has the files that predictions need."""
    found: dict[int, dict[str, float]] = {}
    for count in sorted({_TRACED, *options.hosts}):
        words: list[str | Path] = [sys.executable, "-m", "benchmarks.predict_job", "--steps", str(options.steps)]
        words += ["--backward-ms", str(options.backward_ms), "--json", folder / "steps.json"]
        before = ProcessorTimes.now()
        with EmulatedHosts(rate, count) as hosts:
            if count == _TRACED:
                words += ["--trace", _traces(folder)]
                bench = (sys.executable, "-m", "syncline.collectives", "bench", "--backends", "mpi", "--seconds", "1")
                _check(hosts.run(runtime, 1, (*bench, "--sizes", *_SIZES, "--json", _bench(folder))))
            _check(hosts.run(runtime, 1, words))
        found[count] = json.loads((folder / "steps.json").read_text())
        found[count]["cores_of_others"] = cores_of_others(before, ProcessorTimes.now())
        yield found


def _check(status: int) -> None:
    if status != 0:
        raise ToolError(f"ranks on the emulated hosts have failed, with status {status}")


def _predict(folder: Path, hosts: Sequence[int]) -> dict[str, Any]:
    ring_bytes = AlgorithmThresholds.ring_bytes
    link = network_from(str(_bench(folder)), ring_bytes)
    model = CostModel(link, link, ring_bytes=ring_bytes)
    found = forecast(workload_of(read_timeline(_traces(folder))), model, hosts, [NONE])
    predicted = {count: found.traced(count).step_s for count in hosts}
    return {
        "predicted_s": predicted,
        "all_reduce_s": {count: model.all_reduce_s(count, BUCKET_BYTES) for count in hosts},
        "alone_s": found.alone_s,
        "latency_s": link.latency_s,
        "bandwidth": link.bandwidth,
    }


def _traces(folder: Path) -> Path:
    return folder / "traces"


def _bench(folder: Path) -> Path:
    return folder / "bench.json"


if __name__ == "__main__":
    sys.exit(main())
