"""Transport errors, and what the `then` of torch's futures makes of them."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import CollectiveTimeout, MisuseError, RankLostError, TransportError
from syncline.reducer import error_messages


class TwoArgumentsError(TransportError):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} ({code})")


def through_futures(error: Exception, times: int) -> Exception:
    future: torch.futures.Future[None] = torch.futures.Future()
    last = future
    for _ in range(times):
        last = last.then(lambda done: done.value())
    future.set_exception(error)  # type: ignore[arg-type]  # torch says "result: T"
    with pytest.raises(RuntimeError) as caught:
        last.wait()
    return caught.value


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("kind", [TransportError, CollectiveTimeout])
def test_type_and_text_are_found_again(kind: type[TransportError], times: int) -> None:
    found = error_messages.with_parameter_names(through_futures(kind("rank 1 is silent:\nno word"), times), ["a", "b"])
    assert type(found) is kind
    assert str(found) == "rank 1 is silent:\nno word\n  It was the reduction of the gradients of 'a', 'b'"


def test_many_names_are_shortened() -> None:
    found = error_messages.with_parameter_names(CollectiveTimeout("late."), [f"p{i}" for i in range(9)])
    assert str(found) == "late.\n  It was the reduction of the gradients of 'p0', 'p1', 'p2' and 6 more parameters"


def test_type_and_attributes_are_kept() -> None:
    found = error_messages.with_parameter_names(RankLostError("rank 2 is gone", [2]), ["a"])
    assert isinstance(found, RankLostError)
    assert found.ranks == (2,)
    assert str(found) == "rank 2 is gone\n  It was the reduction of the gradients of 'a'"


def test_of_an_error_that_was_told_and_has_attributes_the_family_is_kept() -> None:
    found = error_messages.with_parameter_names(through_futures(TwoArgumentsError("broken", 3), 1), ["a"])
    assert type(found) is TransportError
    assert str(found) == "broken (3)\n  It was the reduction of the gradients of 'a'"


@pytest.mark.parametrize("error", [MisuseError("no"), RuntimeError("CUDA error"), ValueError("TransportError: not that one")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert error_messages.with_parameter_names(error, ["a"]) is None
