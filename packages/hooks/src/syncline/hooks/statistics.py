"""Count the bytes that a hook saves, and its seconds of computation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class HookStatistics:
    """The bytes and the seconds of a hook on this rank: the sums over all steps so far.

    PowerSGD's steps without compression do not count.

    Attributes:
        bytes_before: the bytes of the gradients (in DiLoCo: of the parameters) before compression.
        bytes_sent: the bytes of the tensors that the hook passed to collectives.
        seconds_by_stage: the seconds of computation in each stage of the hook, such as "compress", without waits.
    """

    bytes_before: int = 0
    bytes_sent: int = 0
    seconds_by_stage: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The bytes before compression, divided by the bytes sent. Before the first send, the ratio is 1."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

    def sends(self, bytes_before: int, bytes_sent: int) -> None:
        """Add the bytes of a bucket, or of a part of a bucket, to the sums. A hook calls this method when it sends."""
        self.bytes_before += bytes_before
        self.bytes_sent += bytes_sent

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context manager that adds the duration of its `with` block to `seconds_by_stage[name]`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_by_stage[name] = self.seconds_by_stage.get(name, 0.0) + time.perf_counter() - began
