"""Write a forecast as an HTML page with plots by Plotly. The page needs no other file."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from syncline.collectives import InvalidArgumentError

from ..tracing.rendering import figure, script
from .forecast import MIB, Choice, Forecast, advice


def write(found: Forecast, path: Path) -> None:
    """Write a page with plots of the efficiency, and of the duration of a step."""
    page = _page(found)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write the page {path}: {error.strerror}") from error


def _page(found: Forecast) -> str:
    figures = [
        figure(
            "predict-efficiency",
            _efficiencies(found),
            "Efficiency, best buckets",
            {"title": "ranks", "type": "log"},
            {"title": "% of a rank's speed"},
        ),
        figure(
            "predict-buckets",
            _by_size(found),
            "Step by bucket size, without compression",
            {"title": "MiB", "type": "log"},
            {"title": "ms"},
        ),
    ]
    words = f"<h1>Predicted steps</h1>\n<p>{html.escape(advice(found))}</p>"
    body = "\n".join([words, script(), *figures])
    head = '<head><meta charset="utf-8"><title>Predicted steps</title></head>'
    return f'<!DOCTYPE html>\n<html lang="en">{head}\n<body>{body}</body></html>\n'


def _efficiencies(found: Forecast) -> list[dict[str, Any]]:
    counts = list(found.steps)
    names = dict.fromkeys(choice.compression for choice in found.steps[counts[0]])
    return [
        _line(
            "no compression" if name == "none" else name,
            [float(count) for count in counts],
            [100 * found.efficiency(count, found.best(count, name)) for count in counts],
        )
        for name in names
    ]


def _by_size(found: Forecast) -> list[dict[str, Any]]:
    lines = []
    for count, steps in found.steps.items():
        sized: list[tuple[int, Choice]] = [
            (one.cap_bytes, one) for one in steps if one.cap_bytes is not None and one.compression == "none"
        ]
        sizes = [cap_bytes / MIB for cap_bytes, _ in sized]
        lines.append(_line(f"{count} ranks", sizes, [1e3 * steps[one].step_s for _, one in sized]))
    return lines


def _line(name: str, x: list[float], y: list[float]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y}
