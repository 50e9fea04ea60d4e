"""A send or receive whose failure says which rank is lost."""

from __future__ import annotations

from typing_extensions import override

from ..contract.deadline import Deadline
from ..errors import TransportError
from ..failures.liveness import Liveness
from .transport import Request


class ExplainedRequest(Request):
    """A request of a transport; when it fails because a rank is lost, the error is a `RankLostError`."""

    def __init__(self, request: Request, liveness: Liveness) -> None:
        self._request = request
        self._liveness = liveness

    @override
    def wait(self, deadline: Deadline) -> None:
        try:
            self._request.wait(deadline)
        except TimeoutError:
            raise
        except TransportError as error:
            raise self._liveness.loss_behind(error) or error from error

    @override
    def test(self) -> bool:
        return self._request.test()

    @override
    def source(self) -> int | None:
        return self._request.source()
