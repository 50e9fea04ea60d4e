from __future__ import annotations

import threading

import pytest
import torch

from syncline.collectives import LaunchError, Placement, default_device, placement_of
from syncline.collectives.api import placement
from syncline.collectives.api.placement import assign_devices
from syncline.collectives.startup.nodes import HostIdentity, place
from syncline.collectives.transports.threads import create_groups

A, B = HostIdentity("a", "1"), HostIdentity("b", "2")
A_REBOOTED = HostIdentity("a", "3")
CONTAINER = HostIdentity("c", "1")


@pytest.mark.parametrize(
    ("rank", "hosts", "expected"),
    [
        (0, [A], Placement(0, 1, 0, 1, ("a",), (0,))),
        (1, [A, A, B, B], Placement(1, 2, 0, 2, ("a", "a", "b", "b"), (0, 0, 1, 1))),
        (3, [A, A, B, B], Placement(1, 2, 1, 2, ("a", "a", "b", "b"), (0, 0, 1, 1))),
        # Ranks dealt out in turn.
        (2, [A, B, A, B], Placement(1, 2, 0, 2, ("a", "b", "a", "b"), (0, 1, 0, 1))),
        # Nodes are numbered in the order of their ranks, not of their names.
        (0, [B, A, A], Placement(0, 1, 0, 2, ("b", "a", "a"), (0, 1, 1))),
        (2, [B, A, A], Placement(1, 2, 1, 2, ("b", "a", "a"), (0, 1, 1))),
        # One name on two machines; two containers on one machine.
        (1, [A, A_REBOOTED], Placement(0, 1, 1, 2, ("a", "a"), (0, 1))),
        (1, [A, CONTAINER], Placement(0, 1, 1, 2, ("a", "c"), (0, 1))),
    ],
)
def test_places(rank: int, hosts: list[HostIdentity], expected: Placement) -> None:
    assert place(rank, hosts) == expected


def test_ranks_on_node() -> None:
    assert place(0, [A, B, A, B]).ranks_on_node(1) == [1, 3]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ({0: []}, {0: None}),
        ({4: [], 5: []}, {4: None, 5: None}),
        # Each rank sees all.
        ({0: ["x", "y"], 1: ["x", "y"]}, {0: 0, 1: 1}),
        ({2: ["x", "y", "z"], 3: ["x", "y", "z"]}, {2: 0, 3: 1}),
        # --gpus-per-task=1: each sees its own, as number 0; local rank 3 too.
        ({4: ["w"], 5: ["x"], 6: ["y"], 7: ["z"]}, {4: 0, 5: 0, 6: 0, 7: 0}),
        # --gpus-per-task=2.
        ({0: ["w", "x"], 1: ["y", "z"]}, {0: 0, 1: 0}),
        # The same devices in another order.
        ({0: ["x", "y"], 1: ["y", "x"]}, {0: 0, 1: 0}),
    ],
)
def test_devices(visible: dict[int, list[str]], expected: dict[int, int | None]) -> None:
    assert assign_devices(visible, "a") == expected


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        (
            {4: ["x"], 5: ["x"]},
            ["rank 5 finds no CUDA device", "left for it on node7", "sees 1", "2 ranks there (4, 5)", "see 1."],
        ),
        ({0: ["x", "y"], 1: ["x", "y"], 2: ["x", "y"]}, ["rank 2", "3 ranks there (0, 1, 2)", "see 2.", "--gpus-per-task=1"]),
        ({0: ["x"], 1: []}, ["rank 1", "it sees 0", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_too_few_devices(visible: dict[int, list[str]], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        assign_devices(visible, "node7")
    for part in words:
        assert part in str(caught.value)


class Ranks:
    """Plays the ranks of a group as threads, each with a host and devices of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._me = threading.local()
        monkeypatch.setattr(placement, "host_identity", lambda: self._me.host)
        monkeypatch.setattr(placement, "host_identity", lambda: self._me.host)
        monkeypatch.setattr(placement, "visible_devices", lambda: self._me.devices)

    def run(self, body, hosts: list[HostIdentity], devices: list[list[str]]) -> list:
        results: list = [None] * len(hosts)

        def play(group) -> None:
            self._me.host, self._me.devices = hosts[group.rank], devices[group.rank]
            try:
                results[group.rank] = body(group)
            except LaunchError as error:
                results[group.rank] = error

        groups = create_groups(len(hosts), timeout_s=20.0)
        threads = [threading.Thread(target=play, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        for group in groups:
            group.close()
        return results


def test_placement_comes_from_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "9")
    found = Ranks(monkeypatch).run(placement_of, [A, B, A], [[], [], []])
    assert [(p.local_rank, p.local_world_size, p.node, p.nodes) for p in found] == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]


def test_default_devices_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node a shows all devices to all, node b one to each, under ids that node a uses too."""
    found = Ranks(monkeypatch).run(default_device, [A, B, A, B], [["x", "y"], ["x"], ["x", "y"], ["y"]])
    assert found == [torch.device("cuda", 0), torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]


def test_default_device_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch).run(default_device, [A, A], [[], []]) == [torch.device("cpu")] * 2


def test_all_ranks_of_a_node_with_too_few_devices_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Ranks(monkeypatch).run(default_device, [A, A, B], [["x"], ["x"], ["x"]])
    assert [type(result) for result in found] == [LaunchError, LaunchError, torch.device]


def test_alone() -> None:
    group = create_groups(1)[0]
    found = placement_of(group)
    assert (found.local_rank, found.local_world_size, found.nodes) == (0, 1, 1)
    assert found.hostnames[0]
    group.close()
