"""Skip tests on MPI versions that have a known bug."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import InvalidArgumentError
from ..startup.launch import detect_launch

if TYPE_CHECKING:
    import pytest

_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_PREDICATE = re.compile(r"(?P<name>[a-z][a-z0-9 ]*?)\s*(?P<conditions>(?:[<>=!]=?\s*\d+(?:\.\d+)*\s*,?\s*)*)", re.IGNORECASE)
_CONDITION = re.compile(r"([<>=!]=?)\s*(\d+(?:\.\d+)*)")


def mpi_matches(predicate: str, name: str, version: tuple[int, ...]) -> bool:
    """Return whether an MPI library fits a predicate such as "openmpi<5.0.0".

    Args:
        predicate: the name of a library and conditions on its version, which must all hold, such as "mpich>=4.1,<4.2". Case and
            spaces in the name do not matter.
        name: the library's name, from `mpi4py.MPI.get_vendor`.
        version: the library's version, from `mpi4py.MPI.get_vendor`.

    Raises:
        InvalidArgumentError: the predicate does not have this form.
    """
    parsed = _PREDICATE.fullmatch(predicate.strip())
    conditions = _CONDITION.findall(parsed["conditions"]) if parsed else []
    if parsed is None or any(comparison not in _COMPARE for comparison, _ in conditions):
        raise InvalidArgumentError(
            f"expected an MPI library and conditions on its version, such as 'openmpi<5.0.0', found {predicate!r}"
        )
    if _plain(parsed["name"]) != _plain(name):
        return False
    return all(_holds(version, comparison, tuple(map(int, bound.split(".")))) for comparison, bound in conditions)


def skip_mpi(predicate: str, reason: str) -> pytest.MarkDecorator:
    """Return a pytest mark that skips a test on an MPI library with a known bug. Without MPI, the test runs.

    Args:
        predicate: the library and the versions that have the bug, such as "openmpi<5.0.0"; see `mpi_matches`.
        reason: describes the bug, and refers to a bug report. pytest prints this text.
    """
    import pytest

    return pytest.mark.skipif(_is_running_on(predicate), reason=f"{predicate}: {reason}")


def _is_running_on(predicate: str) -> bool:
    mpi_matches(predicate, "", ())
    launch = detect_launch(os.environ)
    if launch is None or not launch.is_mpi:
        return False
    from mpi4py import MPI

    return mpi_matches(predicate, *MPI.get_vendor())


def _plain(name: str) -> str:
    return name.replace(" ", "").lower()


def _holds(version: tuple[int, ...], comparison: str, bound: tuple[int, ...]) -> bool:
    # The shorter version is padded with zeros: 5.0 is 5.0.0.
    length = max(len(version), len(bound))
    return _COMPARE[comparison](_padded(version, length), _padded(bound, length))


def _padded(version: tuple[int, ...], length: int) -> tuple[int, ...]:
    return version + (0,) * (length - len(version))
