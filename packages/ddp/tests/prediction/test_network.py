"""A network in words, and one fitted to the figures of `syncline bench --json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.ddp.prediction.cost_model import Link, between_s
from syncline.ddp.prediction.network import link_in_words, network_from

RING_BYTES = 256 << 10
SIZES = (4, 1 << 16, 1 << 20, 1 << 24, 1 << 26)


def figures(link: Link, nodes: int, sizes: Sequence[int] = SIZES, backend: str = "mpi", ranks: int = 0) -> dict[str, Any]:
    """What a bench measures where the model holds exactly."""
    rows = [
        {
            "collective": "all_reduce",
            "dtype": "float32",
            "size_bytes": size,
            "backend": name,
            "median_s": factor * between_s(nodes, size, link, RING_BYTES) if size > 4 else 7.0,
        }
        for size in sizes
        for name, factor in (("raw-mpi", 9.0), (backend, 1.0))
    ]
    return {"environment": {"nodes": nodes, "world_size": ranks or nodes}, "measurements": rows}


def written(content: object, folder: Path) -> str:
    path = folder / "bench.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("text", "latency_s", "bandwidth"),
    [("latency_us=50,bandwidth_gbps=10", 50e-6, 1.25e9), (" latency_us = 0 , bandwidth_gbps = 0.2 ", 0.0, 25e6)],
)
def test_in_words(text: str, latency_s: float, bandwidth: float) -> None:
    assert link_in_words(text, "--network") == Link(pytest.approx(latency_s), pytest.approx(bandwidth))


@pytest.mark.parametrize(
    "text",
    [
        "latency_us=5",
        "latency_us=5,bandwidth_gbps=0",
        "latency_us=-1,bandwidth_gbps=1",
        "latency_us=e,bandwidth_gbps=1",
        "bandwidth_gbps=1,latency_us=1",
        "latency_us=1,bandwidth_gbps=1,loss=2",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"such as latency_us=50,bandwidth_gbps=10"):
        network_from(text, RING_BYTES)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_what_the_model_says_is_found_again(nodes: int, tmp_path: Path) -> None:
    link = Link(80e-6, 110e6)
    found = network_from(written(figures(link, nodes), tmp_path), RING_BYTES)
    assert found.latency_s == pytest.approx(link.latency_s)
    assert found.bandwidth == pytest.approx(link.bandwidth)


def test_a_baseline_is_taken_only_if_it_is_asked_for(tmp_path: Path) -> None:
    path = written(figures(Link(80e-6, 90e6), 2), tmp_path)
    assert network_from(path, RING_BYTES, "raw-mpi").bandwidth == pytest.approx(10e6)
    with pytest.raises(InvalidArgumentError, match=r"^--backend: expected one of those .*raw-mpi, mpi; found 'gloo'"):
        network_from(path, RING_BYTES, "gloo")


def test_no_latency_is_below_0(tmp_path: Path) -> None:
    content = figures(Link(0.0, 1e8), 2)
    for row in content["measurements"]:
        row["median_s"] *= 1 + row["size_bytes"] / 2**27  # large ones take longer than bytes alone
    found = network_from(written(content, tmp_path), RING_BYTES)
    assert found.latency_s == 0.0
    assert 5e7 < found.bandwidth < 1e8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is no file of `syncline bench --json`"),
        ({"environment": {}}, "is no file of `syncline bench --json`"),
        (figures(Link(1e-6, 1e9), 2, ranks=4), r"4 rank\(s\) on 2 node\(s\)"),
        (figures(Link(1e-6, 1e9), 1, ranks=2), r"2 rank\(s\) on 1 node\(s\)"),
        (figures(Link(1e-6, 1e9), 2, sizes=[4, 1 << 20]), "of two sizes or more"),
        (figures(Link(1e-6, 1e9), 2, backend="torch-gloo"), "^--network: expected all-reduces of a backend"),
    ],
)
def test_figures_of_something_else_are_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        network_from(written(content, tmp_path), RING_BYTES)


def test_a_backend_without_a_file_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--backend: expected a file for --network, .*leave --backend mpi out"):
        network_from("latency_us=50,bandwidth_gbps=10", RING_BYTES, "mpi")


def test_the_option_with_the_wrong_link_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^--within: expected microseconds"):
        link_in_words("fast", "--within")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'no/such.json' is neither"):
        network_from("no/such.json", RING_BYTES)
