"""monitored_barrier for all groups of torch.distributed. torch's own function works only on Gloo groups."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ..api.monitored_barrier import monitored_barrier as ours
from .torch_group import as_process_group


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return on any rank only after all ranks have called this function. On a time-out, rank 0's error names missing ranks.

    Args:
        group: a group of torch.distributed; None means torch's default group.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: whether the error names all missing ranks, or only the first.

    Raises:
        CollectiveTimeout: not all ranks called in time. On rank 0 the message names missing ranks. On other ranks the message
            says that rank 0 did not answer.
    """
    ours(as_process_group(group), timeout, wait_all_ranks)
