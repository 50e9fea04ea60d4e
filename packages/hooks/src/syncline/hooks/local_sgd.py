"""Post-local SGD: average gradients over all ranks in the first steps, and over a subgroup later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncline.collectives import InvalidArgumentError

from .allreduce import allreduce_hook
from .contract import Bucket, TensorFuture, check_state, communication_hook
from .saved_state import FORMAT, check_kind
from .stages import finished

_KIND = "post-local SGD"


class PostLocalSGDState:
    """The settings of `post_localSGD_hook`, and the number of steps so far.

    The arguments are those of torch's class. Every rank passes the same arguments, except for its own subgroup.

    Args:
        process_group: the group that averages gradients in the first `start_localSGD_iter` steps. None: the group of the DDP.
        subgroup: the group that averages gradients in all later steps, for example the ranks of a node. A group of Syncline or
            torch. Required (unlike in torch), unless `post_local_gradient_allreduce` is False.
        start_localSGD_iter: the number of first steps in which gradients are averaged over all ranks, 0 or above.
        post_local_gradient_allreduce: whether gradients are averaged in later steps.

    Raises:
        InvalidArgumentError: `start_localSGD_iter` is negative, or the subgroup is missing.
    """

    def __init__(
        self,
        process_group: Any,
        subgroup: Any,
        start_localSGD_iter: int,  # noqa: N803 - torch's name
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if start_localSGD_iter < 0:
            raise InvalidArgumentError(f"expected a start_localSGD_iter of 0 or above, found {start_localSGD_iter}")
        if subgroup is None and post_local_gradient_allreduce:
            raise InvalidArgumentError(
                "expected a subgroup to average in after the start, found None; make one with new_subgroups(), or pass "
                "post_local_gradient_allreduce=False"
            )
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: Bucket) -> None:
        """Count a step if `bucket` is the step's last bucket. Otherwise do nothing.

        `post_localSGD_hook` calls this method with every bucket.
        """
        if bucket.is_last():
            self.iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the number of steps so far, which is the same on all ranks."""
        return {"kind": _KIND, "format": FORMAT, "iter": self.iter}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether this object can load a saved state. If it can, return None. Nothing changes in either case.

        Raises:
            MisuseError: the state belongs to another kind of hook.
        """
        check_kind(state, _KIND)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: restore the number of steps.

        Raises:
            MisuseError: the state belongs to another kind of hook.
        """
        self.check_state_dict(state)
        self.iter = state["iter"]


@communication_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: Bucket) -> TensorFuture:  # noqa: N802 - torch's name
    """Average the bucket over all ranks in the first steps, and over a subgroup (or not at all) in later steps.

    In later steps, the replicas become different. `PostLocalSGDOptimizer` makes the replicas equal again.

    Source: Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", 2020.

    Args:
        state: the groups, the settings, and the number of steps so far.
        bucket: the gradients.

    Returns:
        A future of the bucket's buffer.

    Cost: one all_reduce of the bucket's bytes, in the group or in the subgroup, or nothing.

    Raises:
        MisuseError: the state is not a PostLocalSGDState.
    """
    check_state(state, PostLocalSGDState)
    # Decide before the step is counted, so that all buckets of a step are averaged in the same way.
    is_local = state.iter >= state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if not is_local:
        return allreduce_hook(state.process_group, bucket)
    if state.post_local_gradient_allreduce:
        return allreduce_hook(state.subgroup, bucket)
    return finished(bucket.buffer())
