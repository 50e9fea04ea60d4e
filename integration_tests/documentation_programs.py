"""Runs the programs of pages one after the other, as one rank of a job: python documentation_programs.py PAGE ..."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from mktestdocs.__main__ import grab_code_blocks


def run(page: Path) -> None:
    """Run each block of a page.

    A block with imports is a program of its own; another one continues with the names before it.
    """
    namespace: dict[str, Any] = {}
    for number, block in enumerate(grab_code_blocks(page.read_text()), 1):
        if "import " in block:
            namespace = {"__name__": "__main__"}
        exec(compile(block, f"{page.name}, program {number}", "exec"), namespace)


for path in sys.argv[1:]:
    run(Path(path))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a page sets it
    print(f"ran {path}\n", end="", flush=True)
