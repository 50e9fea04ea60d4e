"""Reads and writes sizes such as "64M". Pure functions."""

from __future__ import annotations

import re

from ...errors import InvalidArgumentError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Turn a size such as "64M" into bytes. K, M and G are binary, and "64MiB" is the same as "64M".

    Raises:
        InvalidArgumentError: the text does not have this form, or is zero.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE)
    if found is None or int(found[1]) == 0:
        raise InvalidArgumentError(f"expected a size such as 4, 64K, 25M or 1G, found {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def ladder(smallest: int, largest: int, factor: int) -> list[int]:
    """Return sizes from the smallest to the largest. Each size is `factor` times the size before. The last size is the largest.

    Raises:
        InvalidArgumentError: the largest is below the smallest, or the factor is below 2.
    """
    if largest < smallest or factor < 2:
        raise InvalidArgumentError(
            f"expected a smallest and a largest size and a factor of 2 or above, found {smallest}, {largest} and {factor}"
        )
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor
    return [*sizes, largest]


def in_words(size: int) -> str:
    """Format bytes so that `parse_size` can read them: 64M for 64 MiB, 12 for 12 bytes."""
    for unit in ("G", "M", "K"):
        if size >= _UNITS[unit] and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
