"""monitored_barrier for all groups of torch.distributed; torch itself has it only for Gloo groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..api.monitored_barrier import monitored_barrier as ours
from .torch_group import as_process_group


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return on any rank only after all ranks have called it. On a time-out, rank 0 names the missing ranks.

    Args:
        group: a group of torch.distributed's, the default one if None.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: name all missing ranks, rather than the first.

    Raises:
        CollectiveTimeout: on rank 0 it names the missing ranks; on the others it says that rank 0 did not answer.
    """
    ours(as_process_group(group), timeout, wait_all_ranks)
