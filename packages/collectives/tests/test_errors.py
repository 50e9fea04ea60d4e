from __future__ import annotations

import inspect
import pickle
import re

import pytest

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    RankLostError,
    SynclineError,
    TransportError,
    errors,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_in_the_tree_at_its_place(kind: type[Exception]) -> None:
    """The picture in the module's docstring is the class hierarchy."""
    lines = (errors.__doc__ or "").splitlines()
    depth = {}
    for line in lines:
        found = re.match(r"^([ │├└─]*)(\w+)(?: {2,}|$)", line)
        if found and found[2].endswith(("Error", "Timeout")):
            depth[found[2]] = len(found[1])
    assert kind.__name__ in depth
    parents = [parent.__name__ for parent in kind.__mro__[1:] if issubclass(parent, SynclineError)]
    assert [depth[name] for name in parents] == sorted((depth[name] for name in parents), reverse=True)
    assert all(depth[name] < depth[kind.__name__] for name in parents)


def test_three_families_that_do_not_overlap() -> None:
    families = (MisuseError, DisagreementError, TransportError)
    for kind in ALL:
        assert sum(issubclass(kind, family) for family in families) == (kind is not SynclineError)


def test_builtin_bases() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(CollectiveTimeout, TimeoutError)


def test_public_errors_are_all_exported() -> None:
    import syncline.collectives as package

    assert {kind.__name__ for kind in ALL} <= set(package.__all__)


def test_a_lost_rank_is_named_in_order_once_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RankLostError("ranks 1 and 3 are gone", [3, 1, 3])))
    assert isinstance(error, RankLostError)
    assert (str(error), error.ranks) == ("ranks 1 and 3 are gone", (1, 3))


class TwoArgumentsError(TransportError):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


def test_other_words_keep_type_attributes_and_cause() -> None:
    cause = KeyError("first")
    error = TwoArgumentsError("broken", 3)
    error.__cause__ = cause
    other = error.reworded("in other words")
    assert (type(other), str(other), other.code, other.__cause__) == (TwoArgumentsError, "in other words", 3, cause)
    assert RankLostError("gone", [2]).reworded("lost").ranks == (2,)
    assert str(CollectiveTimeout("late").reworded("later")) == "later"


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("short: do this", "short: do this", ""),
        ("a" * 150 + ". " + "b" * 100, "a" * 150 + ".", "b" * 100),
        ("a" * 100 + "; " + "b" * 50 + ": " + "c" * 100, "a" * 100 + ";", "b" * 50 + ": " + "c" * 100),
        ("a. " + "b" * 150 + ": " + "c" * 100, "a. " + "b" * 150 + ":", "c" * 100),
        ("word " * 60, ("word " * 40)[:-1], ("word " * 20)),
        ("a" * 300, "a" * 300, ""),  # such as a path: nowhere to break it
    ],
)
def test_a_first_line_is_printed_with_200_characters(text: str, first: str, second: str) -> None:
    rest = f"\n  {second}" if second else ""
    assert errors.fitted(f"{text}\n  a detail") == f"{first}{rest}\n  a detail"
    assert errors.fitted(text) == f"{first}{rest}"
    assert errors.fitted(errors.fitted(text)) == errors.fitted(text)
