"""`NodePlan` runs the calls of one signature, on ranks that may share a node. An `Algorithm` moves the data."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import torch

from ....engine.call import Call, Signature
from ....engine.transport import LibraryPlan, LibraryTransport, Plan
from ..sync import NOWHERE
from .memory import Node

logger = logging.getLogger("syncline.collectives")


class Algorithm(ABC):
    """Moves the data of calls of one signature. The tensors may be in any memory.

    `name` is for logs. If `compares` is True, the ranks must compare the call before `run`. Otherwise `run` compares the call
    itself, or the group compares the call later.
    """

    name: str
    compares = True

    def prepare(self, call: Call) -> bool:
        """At the first call, make the shared memory that the algorithm needs. Return whether the algorithm has this memory.

        All ranks call this method together, and get the same answer.
        """
        return True

    @abstractmethod
    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """See `Plan.run`."""


class ByMPI(Algorithm):
    """Runs a collective of an `MPITransport`, without shared memory. `name` is "MPI" or "ring"."""

    def __init__(self, transport: LibraryTransport, signature: Signature, name: str, *, compares: bool) -> None:
        self.name = name
        self.compares = compares
        self._plan = LibraryPlan(transport, signature)

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """See `Plan.run`."""
        self._plan.run(part, whole, call)


class WindowAlgorithm(ABC):
    """Runs calls of one signature. The tensors of all ranks must be in a window, at the same place. `name` is for logs."""

    name: str

    @abstractmethod
    def run(self, place_key: int, part: torch.Tensor, call: Call) -> None:
        """See `Plan.run`. Instead of the argument `whole`, this method takes the key of a place in a window.

        `place_key` is from `Windows.key_of`, and equal on all ranks. An all-reduce ignores `part`, because its tensor is at the
        place.
        """


class NodePlan(Plan):
    """Runs the calls of one signature, for ranks that may share memory.

    [1] The ranks compare the call and the places of their tensors. They skip this step if no tensor can be in a window, and
        `outside.compares` is False (see `Algorithm`).
    [2] If all tensors are at the same place of a window, `in_window` moves the data.
    [3] Otherwise `outside` moves the data. If the shared memory of `outside` cannot be made, `by_mpi` replaces `outside` for
        ever.

    If `in_window` is None, the ranks do not compare places.
    """

    def __init__(self, node: Node, outside: Algorithm, by_mpi: Algorithm, in_window: WindowAlgorithm | None = None) -> None:
        self._node = node
        self._outside = outside
        self._by_mpi = by_mpi
        self._in_window = in_window
        self._latest = outside.name

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that the latest run used."""
        return self._latest

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`."""
        assert whole is not None
        node, algorithm = self._node, self._outside
        # Until `allocate` has made a window, no tensor can be in a window, so the ranks need not compare places.
        looks = self._in_window is not None and node.has_windows
        is_compared = looks or algorithm.compares
        if is_compared:
            place_key = node.windows.key_of(whole) if looks else NOWHERE
            # `compare` raises an error if the calls differ. It returns whether all tensors are at the same place of a window.
            if node.sync(call).compare(call, place_key):  # [1]
                assert self._in_window is not None
                self._latest = self._in_window.name
                self._in_window.run(place_key, part, call)  # [2]
                return
        # Call `prepare` only here: if all tensors are in windows, the memory of the other algorithms is never made.
        if not algorithm.prepare(call):
            logger.debug("no shared memory for %s (%s): %s from now on", call.signature.name, algorithm.name, self._by_mpi.name)
            algorithm = self._outside = self._by_mpi
            # The first algorithm might have compared the call itself. MPI's collective does not, so compare the call now.
            if algorithm.compares and not is_compared:
                node.sync(call).compare(call)
        self._latest = algorithm.name
        algorithm.run(part, whole, call)  # [3]
