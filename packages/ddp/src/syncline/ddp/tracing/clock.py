"""Measure the difference between `time.perf_counter()` on each rank and on rank 0, by messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.internal import TRACE_CLOCK, message_device

ROUNDS = 16


@dataclass(frozen=True)
class ClockOffset:
    """One measurement of a rank's clock.

    Attributes:
        at: the time of the measurement on this rank's clock.
        offset_s: rank 0's clock minus this rank's clock, in seconds.
        error_s: the largest possible error of the offset in seconds: half of the shortest round trip.
    """

    at: float
    offset_s: float
    error_s: float


@dataclass(frozen=True)
class RoundTrip:
    """One message from rank 0 to another rank, and the answer. `answered` is a time of the other rank's clock."""

    sent: float
    answered: float
    received: float


def best_offset(rounds: Sequence[RoundTrip]) -> ClockOffset:
    """Return the clock offset of the rank that answered, from the shortest of one or more round trips.

    The function assumes that the answer came in the middle of the round trip (Cristian's algorithm). So the error is at most
    half of the round trip.
    """
    best = min(rounds, key=lambda one: one.received - one.sent)
    return ClockOffset(best.answered, (best.sent + best.received) / 2 - best.answered, (best.received - best.sent) / 2)


def measure_offset(group: ProcessGroup) -> ClockOffset:
    """Measure the offset from this rank's clock to rank 0's clock. Every rank of the group calls this function.

    Rank 0 measures one rank after the other, with `ROUNDS` round trips of 24 bytes each.
    """
    if group.rank == 0:
        for peer in range(1, group.size):
            _measure(group, peer)
        return ClockOffset(time.perf_counter(), 0.0, 0.0)
    return _answer(group)


def _measure(group: ProcessGroup, peer: int) -> None:
    ping, pong = _message(group), _message(group)
    rounds = []
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        group.send(ping, peer, _tag(group))
        group.recv(pong, peer, _tag(group))
        answered = float(pong[0])
        rounds.append(RoundTrip(sent, answered, time.perf_counter()))
    offset = best_offset(rounds)
    pong.copy_(torch.tensor([offset.at, offset.offset_s, offset.error_s], dtype=torch.float64, device=pong.device))
    group.send(pong, peer, _tag(group))


def _answer(group: ProcessGroup) -> ClockOffset:
    message = _message(group)
    for _ in range(ROUNDS):
        group.recv(message, 0, _tag(group))
        message[0] = time.perf_counter()
        group.send(message, 0, _tag(group))
    group.recv(message, 0, _tag(group))
    at, offset_s, error_s = message.tolist()
    return ClockOffset(at, offset_s, error_s)


def _message(group: ProcessGroup) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.float64, device=message_device(group))


def _tag(group: ProcessGroup) -> int:
    return TRACE_CLOCK if "cpu" in group.device_types else 0  # NCCL has no tags
