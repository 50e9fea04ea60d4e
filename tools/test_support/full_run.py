"""What only a full run does: `dev.py test --full`, or SYNCLINE_TEST_FULL=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

FULL = os.environ.get("SYNCLINE_TEST_FULL") == "1"


def cases(usual: Sequence[Value], *, in_full: Sequence[Value]) -> list[Value]:
    """The parameters of a test; further cases of it cost much, and others cover most of what they see."""
    return [*usual, *(in_full if FULL else ())]
