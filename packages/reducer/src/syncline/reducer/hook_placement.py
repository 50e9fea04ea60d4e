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
from .outermost_backward import enclosing_node
from .output_watch import OutputWatch
from .weakly import weakly
from .whole_buckets import WholeBuckets


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
    bucket is hooked that is the last to get its gradient, at its node of the graph; and the one that is the first of all. The
    others are proven to have come by being there: their gradients were None in forward, and no other backward ran since; or
    they look new (see `Evidence`). ::

        LEARNING       until the first backward that is reduced: each gradient is noted
            │
        BY_BUCKET      as long as that holds in each forward; if ever not, for good ──►  BY_PARAMETER: each gradient is noted

    Where a gradient is not there when its bucket's last one comes (the order has changed), the bucket waits for the end of
    backward, and from the next forward on each gradient is noted: it costs time and nothing else. So it does where gradients
    are kept between backwards, or added up without synchronisation, and where another reducer has some of the parameters.

    A backward that reaches neither the first parameter nor the last one of any bucket is seen where it begins, by hooks on the
    outputs of all forwards (`OutputWatch`); static graphs have no such backward. Each gradient is noted where a forward gives
    no outputs to `watch`, and where a backward is seen that did not go through any: what it reached is looked at as ever, but
    the next one may reach less. So not seen is one that goes neither through outputs nor to a hooked parameter, if none of its
    kind was seen before. Its gradients are not averaged. Parameters that had no gradient in the backward from which the order
    was learnt are hooked, too, which costs nothing as long as they get none.

    A gradient of a gradient (`create_graph=True`), as in a penalty, leads to parameters past the outputs, too: each is noted.

    What autograd says of a parameter it does not say of those inside of re-entrant checkpoints, so with these each is noted,
    unless the graph is static.

    A gradient that comes a second time when its bucket is reduced already is an error; see `LatenessGuard`.

    A parameter that ever had a hook of its own (`register_post_accumulate_grad_hook`) has the cost of it for good, even when it
    is removed, and so has a node of the graph, which lives as long as anybody holds a loss (measured with torch 2.13). So while
    the order is learnt, gradients are noted by hooks on what is accumulated (`register_hook`), which can go without a trace.

    Args:
        parameters: the reducer's.
        in_place: whether their gradients are averaged where they are.
        wake: called on the thread of backward when arrivals are worth a look.
        settled: called there after all hooks on a parameter, if `follow` asked for it.
        passed: called there when a backward comes to the first of the outputs of forwards. All three are methods, and are
            held weakly: hooks do not keep the reducer alive.

    Attributes:
        whole: the buckets that have one hook.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        in_place: bool,
        wake: Callable[[Arrivals], None],
        settled: Callable[[], None],
        passed: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._claim = Claim(parameters, in_place=in_place)
        self._listening = Listening(parameters, wake=weakly(wake), settled=weakly(settled))
        self._watch = OutputWatch(weakly(passed))
        self._stage = _Stage.LEARNING
        self._nodes: dict[int, torch.autograd.graph.Node] = {}
        self._had_no_gradients = False
        self._unused: frozenset[int] | None = None
        self._precede = False
        self.whole = WholeBuckets.none(parameters)

    @property
    def precede_gradients(self) -> bool:
        """Whether a gradient is noted before it is accumulated. It has been when the next one of the same backward is noted."""
        return self._precede

    def are_disturbed(self) -> bool:
        """Whether another reducer has some of the parameters, and one reads what the other averages in place."""
        return self._claim.is_disturbed

    @property
    def noted(self) -> Mapping[int, Arrivals]:
        """For each bucket whose gradients are noted its arrivals, by its number."""
        return self._listening.noted

    # ---- around a forward ----

    def note_each(self, buckets: Sequence[AnyBucket], graph: Graph) -> None:
        """Note each gradient of these buckets, to learn the order."""
        self._place(buckets, WholeBuckets.none(self._parameters), for_now=graph.one_hook_may_do)

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
        self._watch.expect()
        if not synchronizes:
            self.whole.evidence.forget()
        self._had_no_gradients = synchronizes and self.whole.evidence.none_before()
        if self._stage is _Stage.LEARNING:
            if order is None:
                pass
            elif synchronizes and self._one_hook_will_do(graph):
                self._hook_buckets(buckets, graph, order)
            elif synchronizes or graph.minds_unsynchronized:
                self._hook_parameters(buckets)
        elif not self._one_hook_will_do(graph) if synchronizes else graph.minds_unsynchronized:
            self._hook_parameters(buckets)

    def _one_hook_will_do(self, graph: Graph) -> bool:
        return (
            graph.one_hook_may_do
            and self._had_no_gradients
            and self._sees_all(graph)
            and self.whole.order_held
            and not self._claim.is_shared
        )

    @property
    def want_outputs(self) -> bool:
        """Whether any hook depends on what forwards return."""
        return self._stage is not _Stage.BY_PARAMETER

    def after_forward(self, buckets: Sequence[AnyBucket], graph: Graph, outputs: Iterable[torch.Tensor]) -> None:
        """Watch these outputs; see Note [One hook for a bucket]."""
        if not self.want_outputs:
            return
        self._watch.watch(outputs)
        self._hook_parameters_if_blind(buckets, graph)

    def withdraw(self) -> None:
        """The latest forward failed: that it gives no outputs says nothing."""
        self._watch.withdraw()

    # ---- during a backward ----

    def pass_outputs(self, buckets: Sequence[AnyBucket], graph: Graph) -> bool:
        """A backward goes through outputs, and no gradient of it was seen.

        Returns:
            Whether it has to be reduced when it ends, if none is seen until then.
        """
        if self._stage is not _Stage.BY_BUCKET:
            return False
        if enclosing_node() is not None:
            self._watch.lose_sight()
        if self._sees_all(graph):
            return reaches_any(self._nodes.values()) or (self._find_other_nodes() and reaches_any(self._nodes.values()))
        self._hook_parameters(buckets)
        return False

    def _find_other_nodes(self) -> bool:
        """Parameters that were converted have other nodes, and no hooks there. Returns whether hooked ones were."""
        hooked = [index for index in self.whole.hooked if index in self._nodes]
        if all(node_of(self._parameters[index]) is self._nodes[index] for index in hooked):
            return False
        self._nodes = {index: node_of(self._parameters[index]) for index in self.whole}
        return True

    def begin(self, absent: Sequence[int]) -> None:
        """A backward has begun; these gradients will not come."""
        if not self._watch.has_seen:
            self._watch.lose_sight()
        if self._unused is None:
            self._unused = frozenset(absent)
        self.whole.begin(absent, none_before=self._had_no_gradients)

    def meet_inner_backward(self) -> None:
        """While the order is learnt, one that runs within another, in a re-entrant checkpoint, say, has given a gradient."""
        self._watch.lose_sight()

    def follow(self, index: int) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        self._listening.follow(index)

    def left_over(self) -> Iterator[list[int]]:
        """At the end of a backward: what was noted and not looked at."""
        for arrivals in self._listening.left_over():
            yield arrivals.take()

    def end(self, buckets: Sequence[AnyBucket], graph: Graph) -> None:
        """A backward has ended and was reduced: what forward saw holds no more."""
        self._had_no_gradients = False
        self._hook_parameters_if_blind(buckets, graph)

    def close(self) -> None:
        """Take the hooks off, for good."""
        self._stage = _Stage.BY_PARAMETER
        self._nodes = {}
        self._listening.close()
        self._claim.give_up()

    # ---- placing ----

    def _sees_all(self, graph: Graph) -> bool:
        return graph.never_changes or not self._watch.is_blind

    def _hook_parameters_if_blind(self, buckets: Sequence[AnyBucket], graph: Graph) -> None:
        if self._stage is _Stage.BY_BUCKET and not self._sees_all(graph):
            self._hook_parameters(buckets)

    def _hook_parameters(self, buckets: Sequence[AnyBucket]) -> None:
        self._stage = _Stage.BY_PARAMETER
        self._nodes = {}
        self._place(buckets, WholeBuckets.none(self._parameters))

    def _hook_buckets(self, buckets: Sequence[AnyBucket], graph: Graph, order: Sequence[int]) -> None:
        place = {index: position for position, index in enumerate(order)}
        once = {number: graph.once(bucket.indices) for number, bucket in enumerate(buckets) if isinstance(bucket, Bucket)}
        awaited = {number: sorted(indices, key=place.__getitem__) for number, indices in once.items() if indices}
        if not awaited:
            self._hook_parameters(buckets)
            return
        members = {index for indices in awaited.values() for index in indices}
        unused = self._unused or frozenset()
        used = members - unused or members
        first = next(index for index in order if index in used)
        lasts = {indices[-1] for indices in awaited.values()}
        self._stage = _Stage.BY_BUCKET
        self._place(
            buckets,
            WholeBuckets(
                self._parameters,
                {number: bucket for number in awaited if isinstance(bucket := buckets[number], Bucket)},
                awaited,
                {first, *unused, *lasts},
                # One call, not two; but a change of dtype and back takes these hooks away. So the first one is elsewhere, and
                # each last one where a backward may leave out the first.
                lasts - {first} if graph.order_recurs else (),
                advice=graph.advice_twice,
                inner_backwards=graph.never_changes and self._watch.is_blind,
                is_regular=graph.order_recurs,
            ),
        )
        self._nodes = {index: node_of(self._parameters[index]) for index in self.whole}

    def _place(self, buckets: Sequence[AnyBucket], whole: WholeBuckets, *, for_now: bool = False) -> None:
        self._precede = for_now
        self.whole.close()
        self.whole = whole
        self._listening.listen([bucket.indices for bucket in buckets], whole, for_now=for_now)
