"""Unused parameters: which a backward reaches here, and which are used on any rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp, Work

from .graph import Graph
from .outermost_backward import enclosing_node

# What torch.autograd.graph.get_gradient_edge(...).node is.
GraphNode = torch.autograd.graph.Node


class UsedMap:
    """One byte for each parameter, agreed between the ranks: is it used anywhere? A higher level than 1 may say how."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = torch.device("cpu") if "cpu" in group.device_types else device
        self._work: Work | None = None
        self._anywhere: Sequence[int] | None = None

    def agree(self, used: bytes) -> None:
        """Start an all_reduce of these bytes (MAX). A collective, unless this rank is alone and need not ask anybody."""
        if self._group.size == 1:
            self._anywhere = used
            return
        self._anywhere = None
        self._bytes = torch.frombuffer(bytearray(used), dtype=torch.uint8).to(self._device)
        self._work = self._group.all_reduce(self._bytes, ReduceOp.MAX, async_op=True)

    def unused(self, indices: Collection[int], level: int = 1) -> frozenset[int]:
        """Those of the parameters that no rank uses, at this level or a higher one; waits for the agreement."""
        if self._anywhere is None:
            assert self._work is not None, "agree() comes first"
            self._work.wait()
            self._anywhere = self._bytes.tolist()
        anywhere = self._anywhere
        return frozenset(index for index in indices if anywhere[index] < level)


def without(indices: Collection[int], used: set[int], count: int) -> frozenset[int]:
    """Those of the parameters that are not used; mostly none, which takes no look at each if all `count` that there are are."""
    if len(used) == count or used.issuperset(indices):
        return frozenset()
    return frozenset(indices) - used


class ChangingGraph(Graph):
    """Each backward may reach other parameters, on each rank others (`find_unused_parameters=True`).

    Note [Unused parameters without a walk]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    When backward starts, autograd itself computes which nodes it will execute. So when the first gradient of a backward
    arrives, one question for each parameter (0.2 microseconds) tells which will never come; they count as ready at once.
    The graph is not walked, and the model's outputs need not be known: one that is not part of the loss is not reached.
    The question can be asked only while backward runs, and it answers for the innermost backward: hence no re-entrant
    checkpoints here.

    A parameter counts as used if it was given a gradient since the last reduction, also by a backward that was not
    synchronised. Which are used on any rank is known when all gradients of all ranks have come: the map is agreed after
    the last bucket has started, and overlaps with it.

    Cost: an all_reduce of one byte for each parameter in each backward; with `skip_unused` another one at its beginning,
    for which a rank waits only when it has a bucket that it does not use at all.
    """

    order_recurs = False
    one_hook_may_do = True
    minds_unsynchronized = True
    advice_missing = "Autograd announced them when backward began: was the graph changed by a hook while backward ran?"
    advice_twice = (
        "It was not to be reached by this backward, or is reached more than once: with find_unused_parameters=True a "
        "re-entrant checkpoint cannot be seen into. Use use_reentrant=False, or static_graph=True if the graph never changes"
    )

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup, *, skip_unused: bool) -> None:
        # Held, because autograd makes a new node if nobody holds the old one, and asking for it costs ten times the question.
        self._nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        self._used: set[int] = set()
        self._waiting: set[int] = set()
        self._map = UsedMap(group, parameters[0].device)
        self._forecast = UsedMap(group, parameters[0].device) if skip_unused else None
        self._unreached: set[int] = set()

    def begin(self) -> Sequence[int]:
        """Ask autograd; see Note [Unused parameters without a walk].

        Raises:
            MisuseError: the gradient comes from within a re-entrant checkpoint.
        """
        if enclosing_node() is not None:
            raise MisuseError(
                "find_unused_parameters=True cannot see into a re-entrant checkpoint, in which this backward began. "
                "Use use_reentrant=False there, or static_graph=True if the graph never changes"
            )
        will_execute = torch._C._will_engine_execute_node
        unreached: list[int] = []
        if not all(map(will_execute, self._nodes)):  # in half the time
            unreached = [index for index, node in enumerate(self._nodes) if not will_execute(node)]
        self._unreached = set(unreached)
        if self._forecast is not None:
            silent = self._unreached - self._used
            self._forecast.agree(bytes(index not in silent for index in range(len(self._nodes))))
        return unreached

    def sit_out(self) -> None:
        """Reach nothing; what was accumulated here waits for a backward of this rank."""
        self._waiting, self._used = self._used, set()
        self._unreached = set(range(len(self._nodes)))
        if self._forecast is not None:
            self._forecast.agree(bytes(len(self._nodes)))

    def needed(self, indices: Collection[int]) -> int:
        """All that will be reached."""
        return len(indices) - len(self._unreached.intersection(indices)) if self._unreached else len(indices)

    def once(self, indices: Collection[int]) -> Sequence[int]:
        """All that will be reached."""
        return list(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Each is final; an undefined one is no use."""
        self.accumulated(indices, undefined)
        return indices

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Count as uses in the backward that will reduce them."""
        self._used.update(indices)
        if undefined:
            self._used.difference_update(undefined)

    def ended(self) -> Sequence[int]:
        """None."""
        return ()

    def may_skip(self, indices: Collection[int]) -> bool:
        """Only asks the others about a bucket of which nothing is used here."""
        if self._forecast is None or not self._used.isdisjoint(indices) or not self._unreached.issuperset(indices):
            return False
        return len(self._forecast.unused(indices)) == len(indices)

    def agree(self) -> None:
        """One all_reduce of the map."""
        count = len(self._nodes)
        self._map.agree(b"\1" * count if len(self._used) == count else bytes(map(self._used.__contains__, range(count))))

    def unused_here(self, indices: Collection[int]) -> frozenset[int]:
        """Those that were given no gradient since the last reduction."""
        return without(indices, self._used, len(self._nodes))

    def untouched(self, indices: Collection[int]) -> frozenset[int]:
        """What is used here is used; for the rest, the map says."""
        doubtful = self.unused_here(indices)
        return self._map.unused(doubtful) if doubtful else frozenset()

    def forget(self) -> None:
        """All uses are reduced, but those that waited while this rank sat out."""
        self._used, self._waiting = self._waiting, set()
        self._unreached = set()
