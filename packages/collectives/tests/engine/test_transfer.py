"""The work of a send or a receive whose request fails."""

from __future__ import annotations

import threading

import pytest
import torch

from syncline.collectives import CollectiveTimeout, DisagreementError
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.transfer import TransferWork
from syncline.collectives.engine.transport import Request


class RequestThatFails(Request):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, scope: CancelScope) -> None:
        raise self._error

    def test(self) -> bool:
        return False

    def source(self) -> int | None:
        return None


def test_an_error_of_the_library_says_in_which_call_and_where() -> None:
    request = RequestThatFails(DisagreementError("rank 1 sent 8 bytes"))
    work = TransferWork(
        request, [torch.ones(1)], lambda: None, lambda: "recv(float32[1]) on rank 0 of 2 in group 'default'", 60.0
    )
    for _ in range(2):  # every waiter gets it
        with pytest.raises(DisagreementError, match=r"^recv\(.*rank 0 of 2 in group 'default': rank 1 sent 8 bytes$"):
            work.wait()


def test_an_error_that_is_not_ours_is_raised_as_it_is() -> None:
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as raised:
        TransferWork(RequestThatFails(error), [torch.ones(1)], lambda: None, lambda: "recv", 60.0).wait()
    assert raised.value is error


def test_a_wait_without_a_limit_ends_with_the_groups() -> None:
    class RequestThatIsNeverOver(RequestThatFails):
        def wait(self, scope: CancelScope) -> None:
            raise TimeoutError(f"{scope.timeout_s:g} s went by")

    work = TransferWork(RequestThatIsNeverOver(ValueError()), [torch.ones(1)], lambda: None, lambda: "recv", 8.0)
    with pytest.raises(CollectiveTimeout, match=r"^recv was not over within 8 s \(timeout\)"):
        work.wait()
    with pytest.raises(CollectiveTimeout, match=r"within 0\.5 s"):
        work.wait(0.5)


def test_who_asks_whether_it_is_over_does_not_get_the_error_bare() -> None:
    class RequestWhoseTestFails(RequestThatFails):
        def test(self) -> bool:
            raise self._error

    request = RequestWhoseTestFails(DisagreementError("rank 1 sent 8 bytes"))
    work = TransferWork(request, [torch.ones(1)], lambda: None, lambda: "recv(float32[1]) on rank 0", 60.0)
    assert work.is_completed()
    assert str(work.exception()) == "recv(float32[1]) on rank 0: rank 1 sent 8 bytes"
    with pytest.raises(DisagreementError, match=r"^recv"):
        work.wait()


def test_a_transfer_that_was_given_up_is_not_finished_again() -> None:
    """The future waits as long as the group allows; another thread waits for longer, and the message comes."""
    waits, comes = threading.Event(), threading.Event()

    class RequestThatIsLate(RequestThatFails):
        def wait(self, scope: CancelScope) -> None:
            waits.set()
            assert comes.wait(60)

    delivered: list[int] = []
    work = TransferWork(RequestThatIsLate(ValueError()), [torch.ones(1)], lambda: delivered.append(1), lambda: "recv", 0.1)
    errors: list[BaseException] = []

    def wait_for_longer() -> None:
        try:
            work.wait(60)
        except RuntimeError as error:  # also what torch says of a future that is set twice
            errors.append(error)

    waiter = threading.Thread(target=wait_for_longer)
    waiter.start()
    assert waits.wait(60)
    with pytest.raises(CollectiveTimeout):
        work.get_future().wait()
    comes.set()
    waiter.join(60)
    assert [type(error) for error in errors] == [CollectiveTimeout]
    assert not delivered
