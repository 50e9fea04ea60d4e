"""Where a reducer has its hooks: on each parameter, or on one for each bucket."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from .arrivals import Arrivals
from .bucket import Bucket
from .claims import Claim
from .flight import AnyBucket
from .graph import Graph
from .graph_task import node_of, reaches_any
from .listening import Listening
from .whole_buckets import WholeBuckets, have_none


class _Stage(enum.Enum):
    """What is known of the order in which gradients come."""

    LEARNING = enum.auto()
    BY_BUCKET = enum.auto()
    BY_PARAMETER = enum.auto()


class HookPlacement:
    """All hooks of a reducer, and when they move.

    Note [One hook for a bucket]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A hook on a parameter costs about a microsecond, most of it outside of the function that is called. Mostly the order of
    gradients is the same in each backward, too: the first one showed it to each rank. So from then on only that parameter of a
    bucket is hooked that is the last to get its gradient, and the one that is the first of all. The others are proven to have
    come by being there: their gradients were None in forward, and no other backward ran since. ::

        LEARNING       until the first backward that is reduced: each gradient is noted
            │
        BY_BUCKET      as long as that holds in each forward; if ever not, for good ──►  BY_PARAMETER: each gradient is noted

    Where a gradient is not there when its bucket's last one comes (the order has changed), the bucket waits for the end of
    backward, and from the next forward on each gradient is noted: it costs time and nothing else. So it does where gradients
    are kept between backwards, or added up without synchronisation, where forward gives no outputs to `watch`, and where
    another reducer has some of the parameters.

    A backward that reaches neither the first parameter nor the last one of any bucket is seen by the outputs of forward, of
    which a hook tells when a backward goes through them; static graphs have no such backward. Not seen is one that does not go
    through the outputs either: it is an error anyway unless parameters may be unused, and then its gradients are not averaged.

    A gradient that comes a second time when its bucket is reduced already is an error; see `LatenessGuard`.

    A parameter that ever had a hook of its own (`register_post_accumulate_grad_hook`) has the cost of it for good, even when it
    is removed, and so has a node of the graph, which lives as long as anybody holds a loss (measured with torch 2.13). So while
    the order is learnt, gradients are noted by hooks on what is accumulated (`register_hook`), which can go without a trace.

    Args:
        parameters: the reducer's.
        wake: called on the thread of backward when arrivals are worth a look.
        settled: called there after all hooks on a parameter, if `follow` asked for it.
        began: called there when a backward goes through outputs of a forward, on its way to any parameter.

    Attributes:
        whole: the buckets that have one hook.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        wake: Callable[[Arrivals], None],
        settled: Callable[[], None],
        began: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._claim = Claim(parameters)
        self._listening = Listening(parameters, wake=wake, settled=settled)
        self._began = began
        self._stage = _Stage.LEARNING
        self._nodes: list[torch.autograd.graph.Node] = []
        self._had_no_gradients = False
        self._is_watched = False
        self._precede = False
        self.whole = WholeBuckets.none()

    @property
    def precede_gradients(self) -> bool:
        """Whether hooks are called before their gradient is accumulated; it is when the next is called in the same backward."""
        return self._precede

    @property
    def noted(self) -> Mapping[int, Arrivals]:
        """For each bucket whose gradients are noted its arrivals, by its number."""
        return self._listening.noted

    # ---- around a forward ----

    def note_each(self, buckets: Sequence[AnyBucket], graph: Graph) -> None:
        """Note each gradient of these buckets, to learn the order."""
        self._listen(buckets, {}, for_now=graph.one_hook_may_do)

    def before_forward(
        self, buckets: Sequence[AnyBucket], graph: Graph, order: Sequence[int] | None, *, synchronizes: bool
    ) -> None:
        """Choose where hooks are in the backward of this forward.

        Args:
            buckets: as they are now.
            graph: what is known of it.
            order: the parameters as their gradients arrived on this rank; None if that is to be learnt.
            synchronizes: whether the backward will be reduced.
        """
        if self._stage is _Stage.BY_PARAMETER:
            return
        self._had_no_gradients = synchronizes and have_none(self._parameters)
        if self._stage is _Stage.LEARNING:
            if order is None:
                pass
            elif synchronizes and self._one_hook_will_do(graph):
                self._hook_buckets(buckets, graph, order)
            elif synchronizes or graph.minds_unsynchronized:
                self._hook_parameters(buckets)
        elif not self._one_hook_will_do(graph) if synchronizes else graph.minds_unsynchronized:
            self._hook_parameters(buckets)
        if synchronizes:
            self._is_watched = False

    def _one_hook_will_do(self, graph: Graph) -> bool:
        return (
            graph.one_hook_may_do
            and self._had_no_gradients
            and (self._is_watched or graph.never_changes)
            and self.whole.order_held
            and not self._claim.is_shared
        )

    def after_forward(self, buckets: Sequence[AnyBucket], graph: Graph, outputs: Iterable[torch.Tensor]) -> None:
        """Watch these outputs; see Note [One hook for a bucket]."""
        if self._stage is _Stage.BY_PARAMETER or graph.never_changes:
            return
        origins = {tensor.grad_fn for tensor in outputs if tensor.requires_grad}
        nodes = [node for node in origins if node is not None]
        self._is_watched = 0 < len(nodes) == len(origins)  # a parameter that is returned as it is has none
        if self._stage is _Stage.LEARNING:
            return
        if not self._is_watched:
            self._hook_parameters(buckets)
            return
        for node in nodes:
            node.register_prehook(self._on_outputs)

    def withdraw(self) -> None:
        """The latest forward failed: that it had no outputs says nothing."""
        self._is_watched = self._stage is not _Stage.LEARNING

    # ---- during a backward ----

    def begin(self, absent: Sequence[int]) -> None:
        """A backward has begun; these gradients will not come."""
        self.whole.begin(absent, none_before=self._had_no_gradients)

    def follow(self, index: int) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        self._listening.follow(index)

    def left_over(self) -> Iterator[list[int]]:
        """At the end of a backward: what was noted and not looked at."""
        for arrivals in self._listening.arrivals():
            if arrivals.indices:
                yield arrivals.take()

    def end(self) -> None:
        """A backward has ended and was reduced: what forward saw holds no more."""
        self._had_no_gradients = False

    def close(self) -> None:
        """Take the hooks off, for good."""
        self._stage = _Stage.BY_PARAMETER
        self._listening.close()
        self._claim.give_up()

    def _on_outputs(self, *_: object) -> None:
        if self._stage is _Stage.BY_BUCKET and reaches_any(self._nodes):
            self._began()

    # ---- placing ----

    def _hook_parameters(self, buckets: Sequence[AnyBucket]) -> None:
        self._stage = _Stage.BY_PARAMETER
        self._nodes = []
        self._listen(buckets, {})

    def _hook_buckets(self, buckets: Sequence[AnyBucket], graph: Graph, order: Sequence[int]) -> None:
        place = {index: position for position, index in enumerate(order)}
        once = {number: graph.once(bucket.indices) for number, bucket in enumerate(buckets) if isinstance(bucket, Bucket)}
        awaited = {number: sorted(indices, key=place.__getitem__) for number, indices in once.items() if indices}
        if not awaited:
            self._hook_parameters(buckets)
            return
        members = {index for indices in awaited.values() for index in indices}
        self._stage = _Stage.BY_BUCKET
        self._listen(buckets, awaited, next(index for index in order if index in members), advice=graph.advice_twice)
        self._nodes = [node_of(self._parameters[index]) for index in order if index in members]

    def _listen(
        self,
        buckets: Sequence[AnyBucket],
        awaited: Mapping[int, Sequence[int]],
        first: int | None = None,
        *,
        advice: str = "",
        for_now: bool = False,
    ) -> None:
        """With one hook for each bucket of which gradients are awaited, and one for each parameter of the others."""
        self._precede = for_now
        self.whole.close()
        whole = {number: bucket for number in awaited if isinstance(bucket := buckets[number], Bucket)}
        self.whole = WholeBuckets(whole, awaited, first, advice)
        self._listening.listen([bucket.indices for bucket in buckets], awaited, first, for_now=for_now)
