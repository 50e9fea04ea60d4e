"""What a rank does between two looks at whether the others are there."""

from __future__ import annotations

import os


def give_way() -> None:
    """Let another thread have the core, if one wants it; called after a few looks in vain."""
    os.sched_yield()
