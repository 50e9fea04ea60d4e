"""How a training on these ranks would scale: traced here, predicted for more ranks on given networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from syncline.collectives import ProcessGroup
from syncline.collectives.internal import AlgorithmThresholds
from syncline.ddp import DistributedDataParallel
from syncline.ddp.prediction.compression import NONE
from syncline.ddp.prediction.cost_model import CostModel, Link
from syncline.ddp.prediction.forecast import MIB, Choice, Forecast, forecast
from syncline.ddp.prediction.replay import Workload
from syncline.ddp.prediction.workload_of_trace import workload_of
from syncline.ddp.tracing.trace_file import read_timeline

from .cases import Case
from .session import shared_folder
from .trainer import Trainer

RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
NETWORKS = {"10 Gbit/s, 50 us": Link(50e-6, 1.25e9), "100 Gbit/s, 10 us": Link(10e-6, 12.5e9)}
SIZES_MIB = (1, 25, 100)
_TRACED_CAP_MB = 1.0
"""Small buckets tell best when gradients come."""
_FIRST_STEPS = 3


def traced(case: Case, group: ProcessGroup, steps: int) -> Workload:
    """What a step of the model computes here, without communication; at least 2 steps. A collective of ranks of one machine."""
    model = DistributedDataParallel(case.model(), process_group=group, bucket_cap_mb=_TRACED_CAP_MB)
    trainer = Trainer(model, case, case.batch())
    for _ in range(_FIRST_STEPS):
        trainer.step()
    with shared_folder(group) as folder:
        with model.trace(folder):
            for _ in range(max(2, steps)):
                trainer.step()
        group.barrier()
        return workload_of(read_timeline(folder))


def on_networks(workload: Workload, ranks: Sequence[int] = RANKS) -> dict[str, Forecast]:
    """With a rank on each node. A pure function."""
    models = {name: CostModel(link, link, ring_bytes=AlgorithmThresholds.ring_bytes) for name, link in NETWORKS.items()}
    return {name: forecast(workload, model, ranks, [NONE]) for name, model in models.items()}


def efficiencies(found: Mapping[str, Forecast]) -> dict[str, dict[int, float]]:
    """For each network and bucket size the share of a rank's speed, by the number of ranks. A pure function."""
    return {
        f"{network}, {size} MiB": {ranks: one.efficiency(ranks, Choice(size * MIB, NONE.name)) for ranks in one.steps}
        for network, one in found.items()
        for size in SIZES_MIB
    }
