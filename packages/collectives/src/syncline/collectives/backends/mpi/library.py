"""The MPI library itself: its name, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from ...errors import TransportError


def library_name() -> str:
    """The MPI library in a few words: "MPICH 5.0.2", "Open MPI 5.0.11"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


@contextmanager
def mpi_errors() -> Iterator[None]:
    """Raise what MPI reports as a `TransportError`."""
    try:
        yield
    except MPI.Exception as error:
        raise mapped(error) from error


def mapped(error: MPI.Exception) -> TransportError:
    """An error of MPI as one of ours."""
    return TransportError(f"{library_name()} reported: {error.Get_error_string()}")
