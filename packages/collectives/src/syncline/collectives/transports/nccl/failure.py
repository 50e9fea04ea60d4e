"""What ends a group, and whether anybody knows."""

from __future__ import annotations


class Failure:
    """One error for all who ask the group for something.

    Attributes:
        error: what is raised.
        was_reported: whether it was raised to, or shown to, somebody who uses the group. If not, `close` must raise it:
            what the group has delivered since is garbage, and nobody knows.
    """

    __slots__ = ("error", "was_reported")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.was_reported = False

    def report(self) -> BaseException:
        """The error, for one who raises or shows it."""
        self.was_reported = True
        return self.error


class FatalError(Exception):
    """Carries an error that ends the group out of the locks under which it happened; never leaves the engine.

    Attributes:
        error: what ends the group.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error
