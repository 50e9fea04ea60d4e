"""Handle parameters that a backward does not reach on some ranks or on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp, Work
from syncline.collectives.internal import message_device

from .torch_internals import CAN_FORESEE_NODES, accumulation_node, enclosing_function, unreached
from .usage import UsageModel


class UsedMap:
    """A map of used parameters, on which the ranks agree.

    The map has one byte for each parameter: the parameter's highest level on any rank. Level 0 means unused. In `StaticUsage`,
    level 2 means that the first backward with averaging used the parameter. Level 1 means that only an earlier backward used
    the parameter. `DynamicUsage` has only levels 0 and 1.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = message_device(group, device)
        self._work: Work | None = None
        self._anywhere: Sequence[int] | None = None

    def sync(self, used: bytes) -> None:
        """Start an all_reduce (MAX) of the map's bytes. If the group has several ranks, this is a collective."""
        if self._group.size == 1:
            self._anywhere = used
            return
        self._anywhere = None
        self._bytes = torch.frombuffer(bytearray(used), dtype=torch.uint8).to(self._device)
        self._work = self._group.all_reduce(self._bytes, ReduceOp.MAX, async_op=True)

    def unused(self, indices: Collection[int], level: int = 1) -> frozenset[int]:
        """Return the given parameters whose level is below `level` on every rank.

        The first call after `sync` waits for the other ranks.
        """
        # The first question waits for the other ranks; the answer stays until the next `sync`.
        if self._anywhere is None:
            assert self._work is not None, "sync() comes first"
            self._work.wait()
            self._anywhere = self._bytes.tolist()
        anywhere = self._anywhere
        return frozenset(index for index in indices if anywhere[index] < level)


def without(indices: Collection[int], used: set[int], count: int) -> frozenset[int]:
    """Return those of the given parameters that are not in `used`. The call is fast if all `count` parameters are in `used`."""
    if len(used) == count or used.issuperset(indices):
        return frozenset()
    return frozenset(indices) - used


class DynamicUsage(UsageModel):
    """A usage model for `find_unused_parameters=True`: each backward may reach different parameters, on each rank.

    Args:
        parameters: the reducer's parameters.
        group: the group whose ranks average their gradients.
        skip_unused: leave out a bucket if no rank uses its parameters.

    Cost: in each backward, one all_reduce of one byte for each parameter. `skip_unused` adds such an all_reduce at the
    beginning of backward. A rank waits for this all_reduce only if this rank uses none of the parameters of some bucket.

    Raises:
        MisuseError: this version of torch cannot tell which nodes a backward will execute.
    """

    # Note [Unused parameters without a walk]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # When backward starts, autograd itself computes which nodes it will execute. So at the first gradient of a backward, one
    # question for each parameter (0.2 microseconds) tells which gradients will not come in this backward. These gradients count
    # as ready at once. The reducer need not walk the graph from the model's outputs. The question can be asked only while
    # backward runs, and the answer is about the innermost backward. So re-entrant checkpoints are an error here.
    #
    # A parameter counts as used if it got a gradient since the last reduction, also from a backward that was not synchronised.
    # Each rank knows which parameters it uses only when all its gradients have come. So the all_reduce of `UsedMap` starts
    # after the last bucket, and overlaps with the reduction of this bucket.

    order_recurs = False
    hint_missing = "Autograd announced them when backward began: was the graph changed by a hook while backward ran?"
    hint_twice = (
        "It was not to be reached by this backward, or is reached more than once: with find_unused_parameters=True a "
        "re-entrant checkpoint cannot be seen into (use use_reentrant=False, or static_graph=True if the graph never changes), "
        "nor a parameter that was converted to another dtype and back since construction (wrap the module anew)"
    )

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup, *, skip_unused: bool) -> None:
        if not CAN_FORESEE_NODES:
            raise MisuseError(
                f"find_unused_parameters=True: this version of torch ({torch.__version__}) does not tell which parameters a "
                "backward will reach. Install one that syncline-reducer was tested with, or use static_graph=True"
            )
        self._parameters = parameters
        self.find_nodes_again()
        self._used: set[int] = set()
        self._waiting: set[int] = set()
        self._map = UsedMap(group, parameters[0].device)
        self._forecast = UsedMap(group, parameters[0].device) if skip_unused else None
        self._unreached: set[int] = set()

    def find_nodes_again(self) -> None:
        self._nodes = [accumulation_node(parameter) for parameter in self._parameters]  # hold them; see `accumulation_node`

    def begin(self) -> Sequence[int]:
        """Ask autograd which parameters this backward will not reach.

        Raises:
            MisuseError: the backward began inside a re-entrant checkpoint.
        """
        # See Note [Unused parameters without a walk].
        if enclosing_function() is not None:
            raise MisuseError(
                "find_unused_parameters=True cannot see into a re-entrant checkpoint, in which this backward began. "
                "Use use_reentrant=False there, or static_graph=True if the graph never changes"
            )
        never = unreached(self._nodes)
        self._unreached = set(never)
        # With `skip_unused`, the ranks agree now which buckets no rank uses.
        if self._forecast is not None:
            # `_used` has the parameters with gradients of earlier, not synchronised backwards. Do not skip their buckets.
            silent = self._unreached - self._used
            self._forecast.sync(bytes(index not in silent for index in range(len(self._nodes))))
        return never

    def shadow_backward(self) -> None:
        """Begin a backward that this rank does not run itself: no parameter is reached on this rank.

        Parameters that earlier backwards in `no_sync` have used do not count as used here. These parameters count in the next
        backward that this rank runs itself.
        """
        self._waiting, self._used = self._used, set()
        self._unreached = set(range(len(self._nodes)))
        if self._forecast is not None:
            self._forecast.sync(bytes(len(self._nodes)))

    def needed(self, indices: Collection[int]) -> int:
        # The usual case: all parameters are reached, so no sets are compared.
        return len(indices) - len(self._unreached.intersection(indices)) if self._unreached else len(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Return all given parameters, because a parameter gets only one gradient in a backward.

        A parameter whose gradient is None does not count as used.
        """
        self.accumulated(indices, undefined)
        return indices

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Count these parameters as used in the next backward with averaging, except parameters whose gradient is None."""
        self._used.update(indices)
        if undefined:
            self._used.difference_update(undefined)

    def ended(self) -> Sequence[int]:
        return ()

    def may_skip(self, indices: Collection[int]) -> bool:
        """Whether no rank uses any of these parameters. Always False without `skip_unused`.

        Waits for the other ranks only if this rank uses none of these parameters.
        """
        # Without `skip_unused`, no bucket is skipped. If this rank uses the bucket, it need not wait for the other ranks.
        if self._forecast is None or not self._used.isdisjoint(indices) or not self._unreached.issuperset(indices):
            return False
        return len(self._forecast.unused(indices)) == len(indices)

    def sync_used_map(self) -> None:
        count = len(self._nodes)
        self._map.sync(b"\1" * count if len(self._used) == count else bytes(map(self._used.__contains__, range(count))))

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:
        return without(indices, self._used, len(self._nodes))

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:
        """Return those of the given parameters that no rank uses.

        The method waits for other ranks, unless this rank uses all given parameters.
        """
        doubtful = self.locally_unused(indices)
        return self._map.unused(doubtful) if doubtful else frozenset()

    def reset(self) -> None:
        """Forget which parameters this backward has used, because it is over.

        After a `shadow_backward`, count the parameters again that earlier backwards in `no_sync` have used.
        """
        self._used, self._waiting = self._waiting, set()
        self._unreached = set()
