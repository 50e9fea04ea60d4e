"""How much Open MPI sends over TCP before the receiver has asked for it: more than by default, unless the user has chosen."""

from __future__ import annotations

import os
import sys

VARIABLE = "OMPI_MCA_btl_tcp_eager_limit"
HEADER_BYTES = 4 << 10  # more than Open MPI's own, which counts
RAISED_BYTES = (512 << 10) + HEADER_BYTES
_DEFAULT_BYTES = 64 << 10


def raise_eager_limit() -> None:
    """Set Open MPI's variable, if MPI is not loaded yet and the user has not set it. Other MPI libraries ignore it.

    What is larger is sent only when the receiver has asked for it, and over TCP the request waits in line behind all that its
    sender has sent: wire and ranks then move data in one direction at a time.
    """
    if "mpi4py.MPI" not in sys.modules:
        os.environ.setdefault(VARIABLE, str(RAISED_BYTES))


def eager_bytes() -> int:
    """The largest message that Open MPI sends at once, as far as the environment says; without its header."""
    given = os.environ.get(VARIABLE, "")
    limit = int(given) if given.isascii() and given.isdigit() else _DEFAULT_BYTES
    return max(limit - HEADER_BYTES, 0)
