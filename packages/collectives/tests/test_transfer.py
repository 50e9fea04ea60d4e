"""The work of a send or a receive whose request fails."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import DisagreementError
from syncline.collectives.contract.deadline import Deadline
from syncline.collectives.host.transfer import TransferWork
from syncline.collectives.host.transport import Request


class RequestThatFails(Request):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, deadline: Deadline) -> None:
        raise self._error

    def test(self) -> bool:
        return False

    def source(self) -> int | None:
        return None


def test_an_error_of_the_library_says_in_which_call_and_where() -> None:
    request = RequestThatFails(DisagreementError("rank 1 sent 8 bytes"))
    work = TransferWork(request, [torch.ones(1)], lambda: None, lambda: "recv(float32[1]) on rank 0 of 2 in group 'default'")
    for _ in range(2):  # every waiter gets it
        with pytest.raises(DisagreementError, match=r"^recv\(.*rank 0 of 2 in group 'default': rank 1 sent 8 bytes$"):
            work.wait()


def test_an_error_that_is_not_ours_is_raised_as_it_is() -> None:
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as raised:
        TransferWork(RequestThatFails(error), [torch.ones(1)], lambda: None, lambda: "recv").wait()
    assert raised.value is error
