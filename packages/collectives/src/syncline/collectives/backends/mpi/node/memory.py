"""The memory that the ranks of a node share, as one group has it."""

from __future__ import annotations

import logging

import torch
from mpi4py import MPI

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ..library import mpi_errors
from ..meeting import Meeting
from .hierarchy import Hierarchy
from .segment import Segment
from .sharing import SharingError, share
from .windows import Place, Windows

logger = logging.getLogger("syncline.collectives")
_warned_of: set[str] = set()  # by this process: every group meets the same reasons


class NodeMemory:
    """Makes segments, and remembers those in which tensors lie: the windows.

    Args:
        hierarchy: who is on which node.
        communicator: of the whole group, private.
        meeting: of the whole group.
    """

    def __init__(self, hierarchy: Hierarchy, communicator: MPI.Intracomm, meeting: Meeting) -> None:
        self.windows = Windows()
        self._hierarchy = hierarchy
        self._communicator = communicator
        self._meeting = meeting
        self._has_windows = False

    @property
    def has_windows(self) -> bool:
        """Whether `allocate` was ever successful; the same on all ranks."""
        return self._has_windows

    def share(self, part_bytes: int, call: Collective, deadline: Deadline) -> Segment | None:
        """A segment with a part for each rank of a node; None, on all ranks, if it cannot be had. A collective of the group."""
        try:
            with mpi_errors():
                run = lambda start: self._meeting.run(call, start, deadline)  # noqa: E731
                return share(self._hierarchy, self._communicator, part_bytes, run)
        except SharingError as error:
            self._warn(error)
            return None

    def allocate(self, numel: int, dtype: torch.dtype, call: Collective, deadline: Deadline) -> torch.Tensor | None:
        """A window, filled with zeros; None, on all ranks, if it cannot be had."""
        segment = self.share(numel * dtype.itemsize, call, deadline)
        if segment is None:
            return None
        self.windows.add(segment)
        self._has_windows = True
        return segment.view(segment.mine, 0, numel, dtype).zero_()  # written, so that no first use pays for it

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies in a window, if it does."""
        return self.windows.find(tensor)

    def _warn(self, error: SharingError) -> None:
        reason = str(error)
        if self._communicator.Get_rank() == 0 and reason not in _warned_of:
            _warned_of.add(reason)
            logger.warning(
                "in a group of %d ranks those of a node cannot share memory (%s). They use MPI instead, which is slower; the "
                "results are equal up to rounding. Leave the job more memory, or start the ranks of a node in one container; "
                "`syncline doctor` tries whether they can share any",
                self._communicator.Get_size(),
                reason,
            )
