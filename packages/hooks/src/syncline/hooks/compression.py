"""`compression_hook` averages gradients through any `Compressor`, with error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from syncline.collectives import MisuseError

from .compressor import Compressor, check_compressor, start_exchange
from .contract import Bucket, TensorFuture, communication_hook, floating_buffer, group_of
from .error_feedback import ErrorFeedback
from .low_precision import math_dtype, plain_math, saturated
from .parameter_names import ParameterNames
from .saved_state import FORMAT, Origin, check_kind, check_parameters
from .seeds import SharedSeeds, check_seed
from .stages import finished
from .statistics import HookStatistics

_KIND = "compression"


class CompressionState:
    """The state to register with `compression_hook`: a compressor, and the parts of gradients that compression left out.

    Every rank passes the same arguments. Use one state for each model.

    Args:
        compressor: `Int8()`, `OneBit()`, `TopK(0.01)`, `RandomK(0.01)`, or your own.
        process_group: a group of Syncline or torch; None: the group of the DDP.
        use_error_feedback: keep the part of a gradient that was not sent, and add it to the next step's gradient. Needs as much
            memory as the gradients.
        random_seed: the seed for compressors that choose at random, such as `RandomK`, 0 to 2**32 - 1.
        named_parameters: pairs of a name and a parameter; `state_dict` uses these names. With Syncline's DDP you need not pass
            names, because its buckets have names. If you pass no names with torch's DDP, `state_dict` uses numbers.

    Raises:
        InvalidArgumentError: `compressor` is not a compressor, the seed is out of range, or two parameters have one name.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: Any = None,
        *,
        use_error_feedback: bool = True,
        random_seed: int = 0,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        check_compressor(compressor)
        check_seed("random_seed", random_seed)
        self.compressor = compressor
        self.process_group = process_group
        self.use_error_feedback = use_error_feedback
        self.iter = 0
        self.seeds = SharedSeeds(random_seed)
        self.names = ParameterNames(named_parameters)
        self.error_feedback = ErrorFeedback()
        self.statistics = HookStatistics()
        self.origin = Origin()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint. `torch.load(..., weights_only=True)` can load the state.

        With error feedback, the state differs between ranks, so save it on every rank. To continue with another number of
        ranks, see `merge_states`. The process group is not saved.
        """
        return {
            "kind": _KIND,
            "format": FORMAT,
            "compressor": self.compressor.name,
            "iter": self.iter,
            "rank": self.origin.rank,
            "world_size": self.origin.world_size,
            "seeds": self.seeds.state(),
            "names": self.names.state_dict(),
            "errors": self.error_feedback.state_dict(),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether `load_state_dict` would accept this state, without loading it.

        If `load_state_dict` would raise an error, this method raises the same error. Otherwise it returns None.
        """
        check_kind(state, _KIND)
        if state["compressor"] != self.compressor.name:
            raise MisuseError(f"the saved state is of compressor '{state['compressor']}', this one of '{self.compressor.name}'")
        # The errors would never be sent.
        if state["errors"] and not self.use_error_feedback:
            raise MisuseError(
                "the saved state has error feedback, this one has use_error_feedback=False; construct it with True, or load "
                "{**state, 'errors': {}} to drop the errors"
            )
        self.names.check(state["names"])
        # Without given names, parameters get their names with the first bucket. Then `ParameterNames.of` compares the names.
        if self.names.are_given:
            check_parameters(state["errors"], self.names.shapes)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. If this method raises an error, nothing changes.

        Raises:
            MisuseError: the saved state comes from another kind of hook, another compressor or another model. Or it has errors
                of error feedback, and this object has `use_error_feedback=False`. If you constructed this object without
                `named_parameters`, the method cannot always detect another model. Then the hook raises the error in the first
                step.
        """
        self.check_state_dict(state)
        self.names.expect(state["names"])
        self.iter = state["iter"]
        self.seeds.restore(state["seeds"])
        self.error_feedback.load_state_dict(state["errors"])
        self.origin = Origin(state["rank"], state["world_size"])

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes, for pickle, with None as `process_group`. To use a group, set `process_group` of the copy."""
        return {**self.__dict__, "process_group": None}


@communication_hook
def compression_hook(state: CompressionState, bucket: Bucket) -> TensorFuture:
    """Average gradients over the ranks in compressed form, by the compressor of your choice.

    All ranks get the same bits. With error feedback, the hook keeps the parts that compression left out, and adds them to the
    next step's gradients. The result for NaN and infinity depends on the compressor. The parts for the next step never contain
    NaN or infinity. If a float16 gradient plus its part from earlier steps is above 65,504, the limit of float16, the hook
    sends this limit. The rest is sent in later steps.

    With `find_unused_parameters`, DDP drops the result for a parameter that no rank used in this step. Then a part of this
    parameter's error feedback is lost. In Syncline's DDP, `skip_all_reduce_unused_params=True` reduces this loss.

    Args:
        state: the compressor, and the parts that compression left out in earlier steps.
        bucket: the gradients, dense and of a floating-point dtype. 16-bit gradients are computed in float32.

    Returns:
        A future of the bucket's buffer.

    Cost: one all_gather of the message (one all_reduce for a `LinearCompressor`), and extra memory for the messages of all
    ranks.

    Raises:
        MisuseError: the state is not a CompressionState. Or the state was saved with another model or another number of ranks.
            Or the bucket holds integers or a sparse gradient.
    """
    if not isinstance(state, CompressionState):
        raise MisuseError(f"expected a CompressionState as the hook's state, found {type(state).__name__}")
    buffer = floating_buffer(bucket, "to compress")
    # Count the step before the return below: an empty bucket may be the last bucket of a step.
    if bucket.is_last():
        state.iter += 1
    # The bucket is empty on all ranks, so none of them communicates.
    if buffer.numel() == 0:
        return finished(buffer)
    group = group_of(state.process_group, bucket)
    # Do this before the error feedback is used, because `settle` drops errors that another rank saved.
    state.origin.settle(group.rank, group.size, state.error_feedback)
    seed = state.seeds.next()
    with plain_math(buffer.device), state.statistics.stage("compress"):
        message, gradients = _compressed(state, bucket, seed)
    state.statistics.sends(buffer.nbytes, message.nbytes)
    work, messages = start_exchange(state.compressor, group, message, seed)

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        with plain_math(buffer.device), state.statistics.stage("decompress"):
            for gradient, mean in zip(gradients, state.compressor.mean(messages, gradients, seed), strict=True):
                gradient.copy_(mean)
        return buffer

    return work.get_future().then(decompress)


def _compressed(state: CompressionState, bucket: Bucket, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    named = zip(state.names.of(bucket), bucket.gradients(), strict=True)
    names, gradients = zip(*[(name, gradient) for name, gradient in named if gradient.numel() > 0], strict=True)
    if not state.use_error_feedback:
        return state.compressor.compress(gradients, seed), list(gradients)
    # Errors are added in float32 or float64. In 16 bits small errors would be rounded away.
    given = [gradient.to(math_dtype(gradient.dtype), copy=True) for gradient in gradients]
    state.error_feedback.add_to(names, given)
    # A gradient and its error may together exceed the range of float16. The part that `saturated` cuts off stays in the error.
    wholes = [saturated(whole, gradient.dtype) for whole, gradient in zip(given, gradients, strict=True)]
    message = state.compressor.compress(wholes, seed)
    sent = state.compressor.decompress(message, gradients, seed)
    state.error_feedback.remember(names, [_finite(whole.sub_(part)) for whole, part in zip(given, sent, strict=True)])
    return message, list(gradients)


def _finite(error: torch.Tensor) -> torch.Tensor:
    # One bad step must not spoil all later steps.
    return torch.nan_to_num_(error, nan=0.0, posinf=0.0, neginf=0.0)
