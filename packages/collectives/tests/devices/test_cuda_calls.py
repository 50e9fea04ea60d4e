"""What `CudaRuntime` asks of torch and of CuPy, written down instead of done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from syncline.collectives.transports import cuda
from syncline.collectives.transports.cuda import StreamPool

DEVICE = torch.device("cuda", 1)
OWN = 77


class Recorded:
    """Streams and events by name; what is done with them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current_device = DEVICE.index
        recorded = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "of torch's pool", cuda_stream: int = 5) -> None:
                self.device, self.name, self.cuda_stream = device, name, cuda_stream
                recorded.log.append(f"stream {name}")

        class Event:
            def record(self, stream: Stream) -> None:
                self.name = stream.name

            def wait(self, stream: Stream) -> None:
                recorded.log.append(f"{stream.name} waits for {self.name}")

        @contextmanager
        def entered(stream: Stream) -> Iterator[None]:
            recorded.log.append(f"enter {stream.name}")
            yield

        self.stream, self.event = Stream, Event
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(device, f"own {handle}", handle))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current_device)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: recorded.log.append(f"enter {stream.name}"))
        monkeypatch.setattr(cuda, "handle_of_current_stream", lambda device: 0)
        monkeypatch.setattr(cuda, "_seen", {(DEVICE, 0): Stream(DEVICE, "the caller's")})
        self.log.clear()
        monkeypatch.setattr(cuda, "_own_streams", StreamPool(lambda device: OWN))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


class Future:
    """Notes that it was completed."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def set_result(self, tensors: Any) -> None:
        self.log.append("completed")


def test_nccl_has_a_stream_of_its_own(recorded: Recorded) -> None:
    stream = cuda.CudaStream(DEVICE, is_own=True)
    assert stream.handle == OWN
    after = cuda.CudaEvent(recorded.stream(DEVICE, "the caller's"))
    recorded.log.clear()
    stream.run(lambda: recorded.log.append("body"), after)
    assert recorded.log == ["own 77 waits for the caller's", "enter own 77", "body", "enter the caller's"]


def test_a_stream_of_another_device_is_left_to_torch(recorded: Recorded) -> None:
    """It sets the device, too, and sets both back."""
    stream = cuda.CudaStream(DEVICE, is_own=True)
    recorded.current_device = 0
    recorded.log.clear()
    with stream.current():
        recorded.log.append("body")
    assert recorded.log == ["enter own 77", "body"]


def test_a_group_of_the_host_shares_a_stream_of_torchs(recorded: Recorded) -> None:
    """It needs no CuPy."""
    stream = cuda.CudaRuntime().stream(DEVICE, is_own=False)
    assert recorded.log == ["stream of torch's pool"]
    assert stream.handle == 5


@pytest.mark.parametrize("captured", [False, True])
def test_a_future_in_a_capture_adds_no_stream(recorded: Recorded, captured: bool) -> None:
    """A stream that enters a capture must be joined; if nobody waits for the future, nobody would."""
    stream = cuda.CudaStream(DEVICE, is_own=True)
    done = cuda.CudaEvent(recorded.stream(DEVICE, "done"))
    recorded.log.clear()
    stream.complete(Future(recorded.log), [], done, captured=captured)
    elsewhere = ["stream of torch's pool", "of torch's pool waits for done", "enter of torch's pool", "completed"]
    assert recorded.log == (["enter own 77", "completed"] if captured else elsewhere)


# ---- streams that nobody shares ----


class User:
    """Whoever needs one."""


def test_no_two_users_share_a_stream() -> None:
    made: list[tuple[torch.device, int]] = []

    def make(device: torch.device) -> int:
        made.append((device, len(made)))
        return len(made) - 1

    pool = StreamPool(make)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    users = [User() for _ in range(40)]  # torch's pool has 32
    assert [pool.acquire(first, user) for user in users] == list(range(40))
    assert pool.acquire(second, users[0]) == 40
    users[7] = User()
    assert pool.acquire(first, users[7]) == 7
    assert pool.acquire(first, users[7]) == 41
    assert [device.index for device, _ in made] == [0] * 40 + [1, 0]
