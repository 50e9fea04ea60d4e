"""Record this rank's collectives, sends and receives, except the all-reduces of buckets."""

from __future__ import annotations

import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.internal import ObservedCall, observe_calls
from syncline.reducer import Reducer

from .events import CallEvent


class CallLog:
    """Records this rank's collectives, sends and receives, from construction until `stop`.

    Args:
        group: a group of this rank. If ranks are threads, the log leaves out the calls of other ranks.
        reducer: the log leaves out this reducer's all-reduces of buckets, but not other calls of a communication hook.
    """

    def __init__(self, group: ProcessGroup, reducer: Reducer) -> None:
        self._rank = group.ranks[group.rank]
        self._reducer = reducer
        self._seen: list[tuple[ObservedCall, int]] = []
        self._stop = observe_calls(self._note)

    def take(self) -> list[CallEvent]:
        """Return the calls since the last `take`."""
        seen, self._seen = self._seen, []
        return [
            CallEvent(
                call.name, call.group.name, nbytes, call.started, call.started if call.finished is None else call.finished
            )
            for call, nbytes in seen
        ]

    def stop(self) -> None:
        """Stop recording."""
        self._stop()

    def _note(self, call: ObservedCall, tensor: torch.Tensor | None) -> None:
        # Ranks that are threads share the observers, so calls of other ranks come here, too.
        if call.group.ranks[call.group.rank] != self._rank:
            return
        # The trace shows buckets separately, so leave their all-reduces out.
        if call.name == "all_reduce" and self._is_bucket(tensor):
            return
        # The end of an asynchronous call is not known yet, so the call itself is kept until `take`.
        self._seen.append((call, 0 if tensor is None or tensor.is_sparse else tensor.nbytes))

    def _is_bucket(self, tensor: torch.Tensor | None) -> bool:
        started, buckets = self._reducer.statistics.buckets, self._reducer.buckets
        return bool(started) and started[-1].number < len(buckets) and tensor is buckets[started[-1].number].buffer
