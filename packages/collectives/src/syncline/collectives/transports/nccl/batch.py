"""Several collectives as one call of NCCL."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ...health.recorder import Entry
from .algorithms import Body
from .communicator import Communicator


class Batch:
    """What one thread has issued inside `NcclGroup.coalescing`."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []
        self.reads: list[torch.Tensor] = []
        self._bodies: list[Body] = []
        self.calls: list[tuple[Collective, Entry]] = []
        self._thread = threading.get_ident()

    def is_here(self) -> bool:
        """Whether the calling thread is the one."""
        return self._thread == threading.get_ident()

    def add(
        self, call: Collective, entry: Entry, body: Body, outputs: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]
    ) -> None:
        """One more collective, and its entry in the group's record."""
        self._bodies.append(body)
        self.calls.append((call, entry))
        self.outputs += outputs
        self.reads += reads

    def run(self, comm: Communicator) -> None:
        """Call NCCL for all of them in one group, then do what remains for each."""
        with comm.group():
            remaining = [body(comm) for body in self._bodies]
        for deliver in remaining:
            if deliver is not None:
                deliver()
