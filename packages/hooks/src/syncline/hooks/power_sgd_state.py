"""The state of the PowerSGD hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup

from .contract import Bucket
from .error_feedback import ErrorFeedback
from .parameter_names import ParameterNames
from .saved_state import FORMAT, Origin, check_kind, check_parameters, plain_number
from .seeds import SharedSeeds, check_seed
from .stages import Pipeline
from .statistics import HookStatistics

_KIND = "PowerSGD"
# These settings must be equal in a saved state and in the state that loads it: they decide which tensors a state holds.
_SHAPING = ("matrix_approximation_rank", "use_error_feedback", "warm_start")
_OTHERS = (
    "start_powerSGD_iter",
    "min_compression_rate",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)

_logger = logging.getLogger(__name__)


class PowerSGDState:
    """The state to register with a PowerSGD hook: settings, and the errors and factors that the hook keeps between steps.

    The arguments are those of torch's class, and additionally `named_parameters`. Every rank passes the same arguments. Use one
    state for each model.

    Args:
        process_group: a group of Syncline or torch; None: the group of the DDP.
        matrix_approximation_rank: the number of columns of the two factors (narrow matrices) whose product approximates a
            gradient, 1 or above, usually 1 to 4. More columns are more accurate, but cost more bytes and time.
        start_powerSGD_iter: the number of first steps without compression. At least 2 with error feedback or warm start.
        min_compression_rate: compress a gradient only if compression makes it smaller by more than this factor.
        use_error_feedback: keep the part of a gradient that was not sent (the error), and add it to the next step's gradient.
            The errors need as much memory as the compressed gradients.
        warm_start: begin each step with the factors of the previous step instead of random factors.
        orthogonalization_epsilon: keep the default. In torch, this number avoids a division by zero when a column of a factor
            has length 0; Syncline replaces such a column. The number is added to the length of each column in factors with at
            most two columns. In other factors it has no effect.
        random_seed: the seed of the random factors, 0 to 2**32 - 1.
        compression_stats_logging_frequency: the number of steps between two log lines with `compression_stats()`.
        batch_tensors_with_same_shape: multiply the matrices of all gradients with the same shape in one batched call. The
            batched call needs a copy of these gradients.
        named_parameters: pairs of a name and a parameter; `state_dict` uses these names. With Syncline's DDP you need not pass
            names, because its buckets have names. If you pass no names with torch's DDP, `state_dict` uses numbers.

    Raises:
        InvalidArgumentError: an argument is out of its range, or two parameters have one name.
    """

    def __init__(
        self,
        process_group: Any = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        _check(matrix_approximation_rank >= 1, "a matrix_approximation_rank of 1 or above", matrix_approximation_rank)
        _check(start_powerSGD_iter >= 0, "a start_powerSGD_iter of 0 or above", start_powerSGD_iter)
        _check(min_compression_rate > 0, "a min_compression_rate above 0", min_compression_rate)
        _check(orthogonalization_epsilon >= 0, "an orthogonalization_epsilon of 0 or above", orthogonalization_epsilon)
        check_seed("random_seed", random_seed)
        _check(
            start_powerSGD_iter >= 2 or not (use_error_feedback or warm_start),
            "a start_powerSGD_iter of 2 or above with use_error_feedback or warm_start (DDP rebuilds its buckets after the "
            "first "
            "step)",
            start_powerSGD_iter,
        )
        self.process_group = process_group
        # A saved state has these settings.
        self.matrix_approximation_rank: int = plain_number(matrix_approximation_rank)
        self.start_powerSGD_iter: int = plain_number(start_powerSGD_iter)
        self.min_compression_rate: float = plain_number(min_compression_rate)
        self.use_error_feedback = bool(use_error_feedback)
        self.warm_start = bool(warm_start)
        self.orthogonalization_epsilon: float = plain_number(orthogonalization_epsilon)
        self.compression_stats_logging_frequency: int = max(1, plain_number(compression_stats_logging_frequency))
        self.batch_tensors_with_same_shape = bool(batch_tensors_with_same_shape)
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.seeds = SharedSeeds(random_seed)
        self._begin(ParameterNames(named_parameters))

    def _begin(self, names: ParameterNames) -> None:
        self.names = names
        self.error_feedback = ErrorFeedback()
        self.factors: dict[str, torch.Tensor] = {}
        self.statistics = HookStatistics()
        self.pipeline = Pipeline()
        self.origin = Origin()
        self.next_stats_report = 0

    # ---- for the hooks ----

    @property
    def compresses(self) -> bool:
        """Whether the hook compresses the buckets of the present step.

        False in the first `start_powerSGD_iter` steps: then the hook averages the gradients without compression.
        """
        return self.iter >= self.start_powerSGD_iter

    def enter(self, group: ProcessGroup) -> None:
        """Check that a loaded state fits this rank and this group. Hooks call this method before they compress a bucket.

        If another rank saved the state, the method drops the state's errors and warns.

        Raises:
            MisuseError: the state has errors, and was saved in a group of another size.
        """
        self.origin.settle(group.rank, group.size, self.error_feedback)

    def maybe_increase_iter(self, bucket: Bucket) -> None:
        """Add 1 to `iter`, the number of steps, if `bucket` is the last bucket of a step. Otherwise do nothing."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                _logger.info("PowerSGD begins after %d steps of plain averaging", self.iter)

    def count(self, bucket: Bucket, numel_sent: int) -> None:
        """Count the elements of a bucket for `compression_stats()`. Hooks call this method for each compressed bucket.

        Every `compression_stats_logging_frequency` steps, the method also logs these numbers.

        Args:
            bucket: the bucket before compression.
            numel_sent: the number of elements that this rank sends for the bucket.
        """
        buffer = bucket.buffer()
        self.total_numel_before_compression += buffer.numel()
        self.total_numel_after_compression += numel_sent
        self.statistics.sends(buffer.nbytes, numel_sent * buffer.element_size())
        if bucket.is_last() and self.iter >= self.next_stats_report:
            _logger.info("PowerSGD at step %d: rate %.1f, %d numbers made %d", self.iter, *self.compression_stats())
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after compression), over all compressed buckets so far.

        The rate is the second number divided by the third number. Before the first compressed bucket, the rate is 0.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def random_factors(self, shapes: Sequence[Sequence[int]], like: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return one random factor for each shape, with standard normal numbers.

        The factors are the same on every rank, and different in every call. All ranks must call this method the same number of
        times. The factors have the dtype `dtype`, and are on the device of `like`.
        """
        generator = torch.Generator().manual_seed(self.seeds.next())
        drawn = [torch.randn(*shape, generator=generator, dtype=dtype, device="cpu") for shape in shapes]
        return [factor.to(like.device) for factor in drawn]

    # ---- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint. `torch.load(..., weights_only=True)` can load the state.

        With error feedback, the state differs between ranks, so save it on every rank. To continue with another number of
        ranks, see `merge_states`. The process group is not saved.
        """
        return {
            "kind": _KIND,
            "format": FORMAT,
            "iter": self.iter,
            "rank": self.origin.rank,
            "world_size": self.origin.world_size,
            "settings": {name: getattr(self, name) for name in (*_SHAPING, *_OTHERS)},
            "seeds": self.seeds.state(),
            "names": self.names.state_dict(),
            "errors": self.error_feedback.state_dict(),
            "factors": {name: factor.detach().clone() for name, factor in self.factors.items()},
            "numel": [self.total_numel_before_compression, self.total_numel_after_compression],
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether `load_state_dict` would accept this state, without loading it.

        If `load_state_dict` would raise an error, this method raises the same error. Otherwise it returns None.
        """
        check_kind(state, _KIND)
        for name in _SHAPING:
            if state["settings"][name] != getattr(self, name):
                raise MisuseError(
                    f"the saved PowerSGD state has {name}={state['settings'][name]}, this one {getattr(self, name)}; construct "
                    "it with the saved value"
                )
        # Without given names, the names are unknown until the first step. In this step `ParameterNames.of` compares the names.
        if self.names.are_given:
            check_parameters(_of_parameters(state["errors"]), self.names.shapes)
        self.names.check(state["names"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. If this method raises an error, nothing changes.

        Raises:
            MisuseError: the saved state comes from another kind of hook or another model. Or it was saved with other values of
                `matrix_approximation_rank`, `use_error_feedback` or `warm_start`. If you constructed this object without
                `named_parameters`, the method cannot always detect another model. Then the hook raises the error in the first
                step.
        """
        self.check_state_dict(state)
        self._take(state)

    def _take(self, state: Mapping[str, Any]) -> None:
        self.names.expect(state["names"])
        self.iter = state["iter"]
        self.origin = Origin(state["rank"], state["world_size"])
        self.seeds.restore(state["seeds"])
        self.error_feedback.load_state_dict(state["errors"])
        self.factors = {name: factor.detach().clone() for name, factor in state["factors"].items()}
        self.total_numel_before_compression, self.total_numel_after_compression = state["numel"]

    def __getstate__(self) -> dict[str, Any]:
        """Return the result of `state_dict`. So the group is left out, as in torch."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle. `process_group` becomes None: the DDP's group. To use another group, set `process_group`."""
        self.process_group = None
        for name, value in state["settings"].items():
            setattr(self, name, value)
        self.seeds = SharedSeeds(0)
        self._begin(ParameterNames())
        self._take(state)


def padding_of(names: Sequence[str]) -> str:
    """Return the key for a bucket's factor, and for the error of its padding, in `batched_powerSGD_hook`."""
    return f"[{', '.join(names)}]"


def _of_parameters(errors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # The names of `padding_of` stand for whole buckets, not for parameters.
    return {name: error for name, error in errors.items() if not name.startswith("[")}


def _check(holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise InvalidArgumentError(f"expected {expected}, found {found}")
