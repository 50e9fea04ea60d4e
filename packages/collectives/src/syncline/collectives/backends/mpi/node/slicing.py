"""Who works on which elements: slices for the ranks of a node, chunks for the cache. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator


def slice_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Where slice `index` of `parts` begins and ends; the first `numel % parts` are one element longer."""
    length, longer = divmod(numel, parts)
    start = index * length + min(index, longer)
    return start, start + length + (index < longer)


def chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """From `start` to `stop` in pieces of `step` elements; the last may be shorter."""
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)
