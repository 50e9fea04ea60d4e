"""Every error that Syncline raises on purpose, in three families. All are RuntimeErrors, as those of torch.distributed are.

    SynclineError
    ├── MisuseError                  this call cannot be right, whatever the other ranks do
    │   ├── InvalidArgumentError     a value that no rank may pass (also a ValueError)
    │   │   └── InvalidTypeError     what is no function where one is wanted (also a TypeError)
    │   ├── NotInitializedError      there is no default group yet, or not any more
    │   ├── GroupClosedError         the group was closed or aborted
    │   ├── UnknownBackendError      no backend of that name is installed
    │   ├── BackendUnavailableError  the backend is known, but something it needs is missing
    │   ├── SiteFileError            the site file is missing, misspelt or of the wrong type
    │   └── LaunchError              what the launcher says and what was asked for contradict
    ├── DisagreementError            each call may be right alone, but the ranks do not match
    └── TransportError               the machinery between the ranks failed
        ├── RankLostError            processes of the group ended; says which ranks
        ├── RankGivenUpError         the others have gone on without this rank, which was silent for too long
        ├── CollectiveTimeout        a bounded wait ran out (also a TimeoutError)
        └── StoreError               a store is gone, full or not understood
            ├── StoreTimeout               a key never came, or nobody answered (also a TimeoutError)
            ├── StoreUnavailableError      it cannot be opened: a port in use, an unwritable path
            └── StoreAuthenticationError   client and server do not hold the same secret

The first line of a message says what happened, where (rank, group, collective, parameter names), and what to do. Details
follow, each on a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


HEADLINE_CHARACTERS = 200
_SHORTEST = 60  # a first line that ends earlier says too little


def with_details(headline: str, *details: str) -> str:
    """The text of an error: what happened and what to do in the first line, then each detail on a line of its own."""
    return "\n  ".join([headline, *details])


def fitted(text: str) -> str:
    """As it is printed: the first line has `HEADLINE_CHARACTERS` at most, the rest of it becomes the second. A pure function.

    Names, calls and paths in an error have any length. The first line ends with a sentence if it can, else with a word.
    """
    first, newline, rest = text.partition("\n")
    if len(first) <= HEADLINE_CHARACTERS:
        return text
    for marks in ((". ", "; "), (": ",), (", ",), (" ",)):
        end = max(first.rfind(mark, 0, HEADLINE_CHARACTERS) for mark in marks)
        if end >= _SHORTEST:
            return f"{first[: end + 1].rstrip()}\n  {first[end + 1 :].lstrip()}{newline}{rest}"
    return text


def headline(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).partition("\n")[0]


class SynclineError(RuntimeError):
    """Base class of every error raised by a Syncline package. A RuntimeError: scripts written for torch catch that."""

    def reworded(self, message: str) -> Self:
        """The same error with another message: of the same type, with the same attributes and cause."""
        made_by = OSError if issubclass(type(self), OSError) else RuntimeError  # Python knows two kinds of their memory
        other: Self = made_by.__new__(type(self), message)  # not __init__: who knows what a third party's takes
        other.args = (message,)
        other.__dict__.update(self.__dict__)
        other.__cause__ = self.__cause__
        return other


class MisuseError(SynclineError):
    """The caller asked for something that cannot be right, whatever the other ranks do."""


class InvalidArgumentError(MisuseError, ValueError):
    """An argument has a value that no rank may pass."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument is no function, where torch raises a TypeError."""


class NotInitializedError(MisuseError):
    """The default process group was asked for before `init_process_group` or after `destroy_process_group`."""


class GroupClosedError(MisuseError):
    """A collective was called on a group that was closed or aborted, or in a fork of the rank that it belongs to."""


class UnknownBackendError(MisuseError):
    """No installed package offers a backend of that name."""


class BackendUnavailableError(MisuseError):
    """The backend exists, but something that it needs (a package, a library, a launcher) is missing."""


class SiteFileError(MisuseError):
    """The site file cannot be read, or holds an unknown key or a value of the wrong type."""


class LaunchError(MisuseError):
    """The launcher and the caller, or the launcher and the MPI library, contradict one another."""


class DisagreementError(SynclineError):
    """The ranks of a group did not do the same thing."""


class TransportError(SynclineError):
    """The machinery between the ranks failed: a peer is gone, a connection broke, a library reported an error."""


class RankLostError(TransportError):
    """Processes of the group ended, or cannot be reached, while others wait for them.

    Attributes:
        ranks: the ranks of the group that are known to be lost when the error is raised, ascending; never empty.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class RankGivenUpError(TransportError):
    """The other ranks took this one for lost and have gone on without it; it ends, and harms nobody."""


class CollectiveTimeout(TransportError, TimeoutError):
    """A collective did not finish within its time limit."""


class StoreError(TransportError):
    """A store could not do what was asked: its server is gone, its file system full, its answer not understood."""


class StoreTimeout(StoreError, TimeoutError):
    """A key that somebody should have set never came, or the store itself did not answer in time."""


class StoreUnavailableError(StoreError):
    """A store cannot be opened: its port is in use, its address not ours, its path unwritable."""


class StoreAuthenticationError(StoreError):
    """The client and the server of a store do not hold the same secret."""
