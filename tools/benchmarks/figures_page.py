"""Draw the pictures of docs/figures.md from its tables, so that a picture and its table cannot disagree.

PYTHONPATH=tools .venv/bin/python -m benchmarks.figures_page
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURE = DOCS / "pictures" / "figures.svg"
STEPS, SIZES = "Steps, against torch's DDP", "All-reduce by size"
BYTES = {"KiB": 2**10, "MiB": 2**20}

Table = list[list[str]]


def table_below(page: str, heading: str) -> Table:
    """The cells of the first table below a heading, its own head first.

    Raises:
        ValueError: the page has no such heading, or no table below it.
    """
    found = re.search(rf"^## {re.escape(heading)}$.*?((?:^\|[^\n]*\n)+)", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"expected a table below the heading {heading!r}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return [row for row in rows if not set(row[0]) <= set("-: ")]


def ratios(table: Table) -> dict[str, list[float]]:
    """The runs for each row and column of the steps."""
    head, *rows = table
    return {
        f"{row[0]}\n({column.strip('`')})": [float(run) for run in cell.split(",")]
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


def times_us(table: Table) -> tuple[list[int], dict[str, list[float]]]:
    """The sizes of the all-reduces in bytes, and for each contender a time in microseconds for each size."""
    head, *rows = table
    sizes = [int(number) * BYTES[unit] for number, unit in (row[0].split() for row in rows)]
    return sizes, {name: [float(row[column]) for row in rows] for column, name in enumerate(head[1:], start=1)}


def draw(page: str, path: Path) -> None:
    """Write the picture: steps against torch's on the left, all-reduces by size on the right."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "syncline"  # so that the same tables give the same file
    mpl.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)

    runs = ratios(table_below(page, STEPS))
    for row, values in enumerate(runs.values()):
        left.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.7)
    left.axvline(1, color="black", linewidth=1)
    left.set_yticks(range(len(runs)), list(runs), fontsize=8)
    left.invert_yaxis()
    left.set_xlim(left=0)
    left.set_xlabel("Syncline's time / torch's time, one dot for each run; less is better")

    sizes, contenders = times_us(table_below(page, SIZES))
    for name, times in contenders.items():
        right.loglog(sizes, times, marker=".", label=name)
    right.set_xticks(sizes, [f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" for size in sizes], fontsize=7)
    right.minorticks_off()
    right.set_xlabel("size of the all-reduce")
    right.set_ylabel("microseconds; less is better")
    right.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Description": description(page)})


def description(page: str) -> str:
    """The numbers of the picture, which are kept in the file. A test compares them with the page."""
    return f"{ratios(table_below(page, STEPS))}; {times_us(table_below(page, SIZES))}"


if __name__ == "__main__":
    draw((DOCS / "figures.md").read_text(), PICTURE)
