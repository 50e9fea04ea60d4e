"""Bytes on the wire between hosts: a network interface's count, and the minimum for an all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from syncline.collectives import ProcessGroup, exchange_objects, placement_of

_COUNTERS = Path("/proc/self/net/dev")  # counts of the reader's network namespace
_SENT = 8  # after eight columns for received bytes


def minimum_bytes(nbytes: int, hosts: int) -> float:
    """The bytes that each host must send so that all have the sum of `nbytes` from each, for any number of its ranks.

    Each host sends its sums of the others' shares, (H-1)/H of the bytes, and its own finished share to the others, or other
    messages of the same size. A pure function.
    """
    return 2 * (hosts - 1) / hosts * nbytes


def sent_bytes(counters: str, device: str) -> int:
    """The bytes that the device has sent, from the text of /proc/net/dev. A pure function.

    Raises:
        ValueError: there is no such device.
    """
    for line in counters.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == device:
            return int(figures.split()[_SENT])
    raise ValueError(f"no device {device!r} in {counters!r}")


def device_sent_bytes(device: str) -> int:
    """The bytes that the device of this host has sent since it was made."""
    return sent_bytes(_COUNTERS.read_text(), device)


def measure_sent(action: Callable[[], object], repeats: int, device: str, group: ProcessGroup) -> float:
    """The bytes that one run of `action` makes a host send, counted on the host that sends most. A collective.

    Headers and acknowledgements count, and so do the two barriers around all repetitions.
    """
    group.barrier()
    before = device_sent_bytes(device)
    group.barrier()
    for _ in range(repeats):
        action()
    group.barrier()
    sent = device_sent_bytes(device) - before
    by_rank: list[int] = exchange_objects(sent, group=group)
    return max(by_rank) / repeats


def host_count(group: ProcessGroup) -> int:
    """How many hosts the ranks are on."""
    return placement_of(group).nodes
