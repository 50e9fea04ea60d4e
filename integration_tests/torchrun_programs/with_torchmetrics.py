"""Metrics of torchmetrics, whose states are gathered and summed over the ranks."""

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix

dist.init_process_group("gloo")
rank = dist.get_rank()
metrics = MetricCollection({"auroc": BinaryAUROC()})
confusion, mean = MulticlassConfusionMatrix(3), MeanMetric()
for step in range(3):
    generator = torch.Generator().manual_seed(31 * rank + step)
    rows = 4 + rank  # another number of rows on each rank
    scores = torch.rand(rows, generator=generator)
    metrics.update(scores, (scores + torch.rand(rows, generator=generator) > 1).long())
    confusion.update(torch.randint(3, (rows,), generator=generator), torch.randint(3, (rows,), generator=generator))
    mean.update(scores.mean(), rows)
found = metrics.compute()["auroc"].item(), mean.compute().item()
print(f"loss {rank} {found[0].hex()} {found[1].hex()} {confusion.compute().tolist()}\n", end="")
dist.destroy_process_group()
