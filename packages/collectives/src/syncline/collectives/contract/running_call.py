"""RunningCall: a collective while it runs, as those who carry it out hand it on."""

from __future__ import annotations

from typing import NamedTuple

from .collective import Collective
from .deadline import Deadline


class RunningCall(NamedTuple):
    """What everyone who carries out a collective may need to know of it.

    Attributes:
        collective: which one it is, to compare the ranks and for messages.
        deadline: when to give up waiting for other ranks.
    """

    collective: Collective
    deadline: Deadline
