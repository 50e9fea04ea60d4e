"""Argument types for the commands' parsers (argparse). This module imports no torch, so that `syncline run` starts fast."""

from __future__ import annotations

import argparse
import math


def seconds(text: str) -> float:
    """Convert an option's text to a number of seconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a finite number above 0.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, found {text!r}")
    return found
