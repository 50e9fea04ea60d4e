"""Measures how a package is divided: python3 tools/structure.py [--root CHECKOUT] [PACKAGE]; with --way, the way of one call.

Prints files, lines, files for 1,000 lines, the median length of a function, and the share of comment lines. With `--way`, under
mpiexec with two or more ranks, prints the files through which a warm `all_reduce` of a tensor in a window passes.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure a package, or trace a call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", default="collectives", help="default: collectives")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout; default: this one")
    parser.add_argument("--way", action="store_true", help="trace a warm all_reduce in a window; run it under mpiexec")
    arguments = parser.parse_args()
    if arguments.way:
        print_way()
    else:
        print_measures(arguments.root / "packages" / arguments.package / "src")


def print_measures(folder: Path) -> None:
    """Print the measures of all modules below a folder."""
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    lines = sum(text.count("\n") for text in texts)
    functions = [length for text in texts for length in function_lengths(ast.parse(text))]
    comments = sum(comment_lines(text) for text in texts)
    print(f"files                    {len(texts)}")
    print(f"lines                    {lines}")
    print(f"files for 1,000 lines    {1000 * len(texts) / lines:.1f}")
    print(f"median function          {statistics.median(functions):g} lines")
    print(f"comment lines            {100 * comments / lines:.1f} %")


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """The lines of each function's body, without its docstring. Functions without a body, as in a contract, do not count."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body and not (isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1


def comment_lines(text: str) -> int:
    """The number of lines with nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def print_way() -> None:
    """Print the files of collectives through which a warm all_reduce passes, in their order."""
    import torch

    from syncline.collectives import all_reduce, init_process_group

    group = init_process_group("mpi")
    window = group.allocate(1 << 20, torch.float32)
    for _ in range(3):
        all_reduce(window)
    met: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and "collectives" in path.parts:
            met.setdefault("/".join(path.parts[path.parts.index("collectives") + 1 :]))

    sys.setprofile(note)
    all_reduce(window)
    sys.setprofile(None)
    if group.rank == 0:
        files = [name.rpartition("collectives/")[2] or name for name in met]
        print(f"{len(files)} files: {', '.join(files)}")
    group.close()


if __name__ == "__main__":
    main()
