"""Whether what each rank sends in an all-to-all is what the others expect."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..contract.collective import Collective
from ..contract.running_call import RunningCall
from ..errors import DisagreementError
from .packing import empty_block
from .transport import Transport


def verify_splits(
    transport: Transport,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
    call: RunningCall,
) -> None:
    """Gather how much each rank sends and expects: an all-gather of two numbers for each rank.

    No rank can tell from its own counts, and libraries leave what never came unwritten, or end the process.

    Raises:
        DisagreementError: a rank sends another number of elements than its receiver expects; on all ranks.
    """
    mine = torch.tensor([*output_counts, *input_counts], dtype=torch.int64, device="cpu")
    block = empty_block(mine, len(output_counts))
    told = Collective("all_gather_splits", mine, detail=call.collective.name)
    transport.all_gather(block, mine, RunningCall(told, call.deadline))
    problem = different_splits(block.view(len(output_counts), 2, len(output_counts)).tolist())
    if problem is not None:
        raise DisagreementError(problem)


def different_splits(counts: Sequence[Sequence[Sequence[int]]]) -> str | None:
    """What is wrong, in words; None if nothing is. A pure function.

    Args:
        counts: for each rank how many elements it expects from each, then how many it sends to each.
    """
    for receiver, (expected, _) in enumerate(counts):
        for sender, (_, sent) in enumerate(counts):
            if sent[receiver] != expected[sender]:
                return (
                    f"rank {sender} sends {sent[receiver]} elements to rank {receiver}, which expects {expected[sender]}; make "
                    "the input splits of the senders equal the output splits of the receiver"
                )
    return None
