"""Additional cases of a full run: `dev.py test --full`, or SYNCLINE_TEST_FULL=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")

FULL = os.environ.get("SYNCLINE_TEST_FULL") == "1"


def cases(usual: Sequence[Value], *, in_full: Sequence[Value]) -> list[Value]:
    """The parameters of a test. Those `in_full` cost much, and other cases cover most of them."""
    return [*usual, *(in_full if FULL else ())]
