"""The tags of the messages that Syncline itself sends in a group, beside those of the program."""

from __future__ import annotations

#: A program may use no tag from the first to the second.
FIRST_RESERVED, LAST_RESERVED = 32_000, 32_767


class ReservedTag(int):
    """One of them. `send` and `recv` take it, and refuse a plain number of the same value."""


#: The messages of NCCL groups that agree over a host group: one of these for each topic.
FIRST_NCCL_AGREEMENT, NCCL_AGREEMENTS = FIRST_RESERVED, 700
CONTROL = ReservedTag(32_764)
MONITORED_BARRIER = ReservedTag(32_765)
TRACE_CLOCK = ReservedTag(32_766)


def is_reserved(tag: int) -> bool:
    """Whether a program may not use it."""
    return FIRST_RESERVED <= tag <= LAST_RESERVED and not isinstance(tag, ReservedTag)
