"""Predict the duration of a step for each number of ranks, bucket size and compression, and give advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .compression import Compression
from .cost_model import CostModel
from .replay import Prediction, Workload, rebucket, replay

MIB = 1 << 20
CAPS_BYTES = tuple(int(cap * MIB) for cap in (0.5, 1, 2, 4, 8, 16, 25, 50, 100))
_WORTH = 1.05
"""Advice is given only for a gain of at least this factor."""


@dataclass(frozen=True)
class Choice:
    """A way to reduce gradients.

    Attributes:
        cap_bytes: the size limit of each bucket in bytes. None: the traced buckets.
        compression: the compression's name.
    """

    cap_bytes: int | None
    compression: str

    def __str__(self) -> str:
        buckets = "the traced buckets" if self.cap_bytes is None else f"buckets of {self.cap_bytes / MIB:g} MiB"
        return buckets if self.compression == "none" else f"{buckets} and {self.compression}"


@dataclass(frozen=True)
class Forecast:
    """All predictions for one trace.

    Attributes:
        alone_s: the seconds of a step on one rank.
        steps: the predictions, by the number of ranks and the `Choice`.
    """

    alone_s: float
    steps: Mapping[int, Mapping[Choice, Prediction]]

    def traced(self, ranks: int) -> Prediction:
        """Return the prediction for the traced buckets without compression."""
        return self.steps[ranks][AS_TRACED]

    def best(self, ranks: int, compression: str) -> Choice:
        """Return the choice with the shortest step among all choices with this compression.

        Among equal choices, the traced buckets come first.
        """
        steps = self.steps[ranks]
        return min((one for one in steps if one.compression == compression), key=lambda one: steps[one].step_s)

    def gain(self, ranks: int, choice: Choice) -> float:
        """Return the duration of a step with the traced buckets, divided by the duration with this choice."""
        return self.traced(ranks).step_s / self.steps[ranks][choice].step_s

    def efficiency(self, ranks: int, choice: Choice) -> float:
        """Return the duration of a step on one rank, divided by the predicted duration on `ranks` ranks."""
        return self.alone_s / self.steps[ranks][choice].step_s


AS_TRACED = Choice(None, "none")


def forecast(workload: Workload, model: CostModel, ranks: Sequence[int], compressions: Sequence[Compression]) -> Forecast:
    """Predict a step for each number of ranks, each bucket size in `CAPS_BYTES`, and each compression."""
    workloads: dict[int | None, Workload] = {None: workload}
    for cap_bytes in CAPS_BYTES:
        workloads[cap_bytes] = rebucket(workload, [cap_bytes])
    steps = {
        count: {
            Choice(cap_bytes, one.name): _predict(changed, model, count, one)
            for one in compressions
            for cap_bytes, changed in workloads.items()
        }
        for count in ranks
    }
    return Forecast(workload.alone_s, steps)


def _predict(workload: Workload, model: CostModel, ranks: int, compression: Compression) -> Prediction:
    return replay(workload, lambda bucket: compression.reduce_s(bucket, lambda nbytes: model.all_reduce_s(ranks, nbytes)))


def advice(found: Forecast) -> str:
    """Return one sentence: the efficiency of the traced buckets, and the choices that are clearly faster."""
    most = max(found.steps)
    said = [f"at {most} ranks the traced buckets keep {100 * found.efficiency(most, AS_TRACED):.0f} % of a rank's speed"]
    before = _WORTH
    for compression in dict.fromkeys(choice.compression for choice in found.steps[most]):
        choice = found.best(most, compression)
        gain = found.gain(most, choice)
        # Name a further compression only if a step is clearly shorter than with the compressions that are named already.
        if choice != AS_TRACED and gain >= before:
            said.append(f"{choice} give {gain:.1f} times that{_from(found, compression, most)}")
            before = gain * _WORTH
    if len(said) == 1:
        said.append("no other bucket size or compression gives much more")
    text = "; ".join(said) + "."
    return text[0].upper() + text[1:]


def _from(found: Forecast, compression: str, most: int) -> str:
    """Return a text that names the smallest number of ranks with a clear gain.

    The text is empty if this number is `most`, or if no number has a clear gain.
    """
    paying = [count for count in sorted(found.steps) if found.gain(count, found.best(count, compression)) >= _WORTH]
    return f" (and more than {_WORTH:.2f} times from {paying[0]} ranks on)" if paying and paying[0] != most else ""
