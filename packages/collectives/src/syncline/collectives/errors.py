"""The errors that Syncline raises on purpose form three families. All are RuntimeErrors.

    SynclineError
    ├── MisuseError                  the call is wrong, whatever the other ranks do
    │   ├── InvalidArgumentError     a value that no rank may pass (also a ValueError)
    │   │   └── InvalidTypeError     not a function, or a group that cannot be copied (also a TypeError)
    │   ├── NotInitializedError      there is no default group
    │   ├── GroupClosedError         the group was closed or aborted
    │   ├── UnknownBackendError      no backend with this name is installed
    │   ├── BackendUnavailableError  something that the backend needs is missing
    │   ├── SiteFileError            the site file is missing, or has an unknown key or a wrong value
    │   └── LaunchError              launcher, arguments and MPI contradict one another, or ranks cannot find each other
    ├── DisagreementError            the calls of the ranks do not match
    └── TransportError               the communication between the ranks failed
        ├── RankLostError            processes of the group ended; the error names their ranks
        ├── RankGivenUpError         the other ranks go on without this rank
        ├── CollectiveTimeout        a collective did not finish within its time limit (also a TimeoutError)
        └── StoreError               a store is gone or full, or its reply is not understood
            ├── StoreTimeout               a key was never set, or the store did not answer (also a TimeoutError)
            ├── StoreUnavailableError      a store cannot be opened: its port is in use, its path not writable
            └── StoreAuthenticationError   client and server do not hold the same secret

The first line of a message says what happened, where, and what to do. Details follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


HEADLINE_CHARACTERS = 200
_SHORTEST = 60  # a first line that ends earlier says too little


def with_details(headline: str, *details: str) -> str:
    """Return the text of an error: `headline` (what happened and what to do), then each detail on a line of its own."""
    return "\n  ".join([headline, *details])


def fitted(text: str) -> str:
    """Break the first line of an error's text in two if this line is longer than `HEADLINE_CHARACTERS`. A pure function."""
    first, newline, rest = text.partition("\n")
    if len(first) <= HEADLINE_CHARACTERS:
        return text
    for marks in ((". ", "; "), (": ",), (", ",), (" ",)):
        end = max(first.rfind(mark, 0, HEADLINE_CHARACTERS) for mark in marks)
        if end >= _SHORTEST:
            return f"{first[: end + 1].rstrip()}\n  {first[end + 1 :].lstrip()}{newline}{rest}"
    return text


def in_words(error: BaseException) -> str:
    """Return an error's text. If the error has no text, like a KeyboardInterrupt, return its class name."""
    return str(error) or type(error).__name__


def headline(error: BaseException) -> str:
    """The first line of what `in_words` returns."""
    return in_words(error).partition("\n")[0]


def text_of(error: BaseException) -> str:
    """Return the first argument of an error if it is a text, else an empty text. Unlike `str(error)`, this never fails."""
    return error.args[0] if error.args and isinstance(error.args[0], str) else ""


class SynclineError(RuntimeError):
    """Base class of every error that a Syncline package raises. A RuntimeError, as scripts for torch expect."""

    def reworded(self, message: str) -> Self:
        """Return a copy of the error that has another message, but the same type, attributes and cause."""
        made_by = OSError if issubclass(type(self), OSError) else RuntimeError  # an OSError has another layout in memory
        other: Self = made_by.__new__(type(self), message)  # not __init__: a subclass may take other arguments
        other.args = (message,)
        other.__dict__.update(self.__dict__)
        other.__cause__ = self.__cause__
        return other


class MisuseError(SynclineError):
    """The call is wrong, whatever the other ranks do."""


class InvalidArgumentError(MisuseError, ValueError):
    """An argument has a value that no rank may pass."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument should be a function, but is not. Or a group was copied or pickled. Also a TypeError, as in torch."""


class NotInitializedError(MisuseError):
    """There is no default process group: `init_process_group` was not called yet, or the group was destroyed."""


class GroupClosedError(MisuseError):
    """A group was used after it was closed, aborted or replaced by a newer group, or a forked child used its parent's group."""


class UnknownBackendError(MisuseError):
    """No installed package offers a backend with this name."""


class BackendUnavailableError(MisuseError):
    """The backend exists, but something that it needs (a package, a library, a launcher) is missing."""


class SiteFileError(MisuseError):
    """The site file cannot be read, or holds an unknown key or a value of the wrong type."""


class LaunchError(MisuseError):
    """The launcher, `init_process_group`'s arguments and MPI contradict one another, or the ranks cannot find each other."""


class DisagreementError(SynclineError):
    """The ranks of a group made different calls, or passed different arguments or options."""


class TransportError(SynclineError):
    """The communication between the ranks failed: a peer is gone, a connection broke, or a library reported an error."""


class RankLostError(TransportError):
    """Some ranks have ended or cannot be reached, and other ranks wait for them.

    Attributes:
        ranks: the known lost ranks of the group, in ascending order. In an error of `Elastic`, the numbers of the lost
            processes (see `ProcessGroup.members`). Empty if a newcomer finds that all other processes have ended, or if all
            ranks with the training state are lost.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class RankGivenUpError(TransportError):
    """The other ranks go on without this rank, for example because this rank was silent for too long. End this process."""


class CollectiveTimeout(TransportError, TimeoutError):
    """A collective did not finish within its time limit."""


class StoreError(TransportError):
    """A store could not carry out a call: its server is gone, its file system is full, or its reply is not understood."""


class StoreTimeout(StoreError, TimeoutError):
    """A key was not set in time, or the store itself did not answer in time."""


class StoreUnavailableError(StoreError):
    """A store cannot be opened: its port is in use, its address is not of this host, or its path is not writable."""


class StoreAuthenticationError(StoreError):
    """The client and the server of a store do not hold the same secret."""
