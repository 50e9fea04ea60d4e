"""What needs a GPU: the tests marked so, then the benchmark, with the Python, torch and CuPy that are there.

Nothing is installed: the packages are run from the source tree, so it works without a network. Entry points, by which backends
are found, come with an installed distribution; a folder with their list stands for it.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import ROOT, ToolError, capture
from environment import LAYERS

PYTEST_TIMEOUT_S = 3600.0
BENCHMARK_TIMEOUT_S = 600.0
MARKERS = "ranks\nmpi\nlaunch\ngpu\ntimeout"
# Printed by the probe, one a line: what this Python has, and what keeps NCCL from working.
PROBE = """
import importlib, torch
for name in ("cupy", "pytest"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "present"))
    except Exception as error:
        print(name, "absent:", " ".join(str(error).split()))
print("torch", torch.__version__)
print("cuda", torch.version.cuda)
for index in range(torch.cuda.device_count()):
    print("gpu", torch.cuda.get_device_name(index))
from syncline.collectives.backends.nccl import backend
print("missing", backend.missing() or "nothing")
"""


@dataclass(frozen=True)
class Row:
    """One line of the summary."""

    what: str
    verdict: str
    taken_s: float


def run_all(python: Path) -> int:
    """Run the tests and the benchmark, and print one summary; how many failed. Without a GPU: say why, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="syncline-gpu-") as folder:
        env = environment(Path(folder))
        found = probe(python, env)
        if "nothing" not in found["missing"]:
            print(f"gpu: skipped, {found['missing'][0]}")
            return 0
        if found["pytest"][0].startswith("absent"):
            raise ToolError(f"{python} has no pytest, which runs the tests; install it there, or choose another by --python")
        rows = [
            *(_row(str(path.relative_to(ROOT)), (python, *pytest_words(path)), env) for path in test_files()),
            _row("benchmark", (python, ROOT / "tools" / "benchmarks" / "nccl.py"), env),
        ]
    print("\n=== summary ===")
    for name in ("gpu", "torch", "cuda", "cupy"):
        print(f"{name:10}{', '.join(found.get(name, ['none']))}")
    for row in rows:
        print(f"{row.what:50}{row.verdict}{row.taken_s:8.1f} s")
    return sum(row.verdict != "passed" for row in rows)


def environment(folder: Path) -> dict[str, str]:
    """Variables with which the packages are found in the source tree, and the backends with them."""
    info = folder / "syncline_collectives-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline-collectives\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points((ROOT / "packages" / "collectives" / "pyproject.toml").read_text()))
    sources = [ROOT / "packages" / layer / "src" for layer in LAYERS]
    path = [folder, *sources, ROOT / "tools", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(map(str, path)), "PYTHONUNBUFFERED": "1"}


def entry_points(pyproject: str) -> str:
    """The backends of a pyproject.toml, as a distribution's metadata lists them. (Python 3.10 reads no TOML.)"""
    section = re.search(r'\[project\.entry-points\."(syncline\.backends)"\]\n(.*?)(?:\n\n|\n\[|\Z)', pyproject, re.DOTALL)
    if section is None:
        raise ToolError("packages/collectives/pyproject.toml lists no backends")
    return f"[{section[1]}]\n" + section[2].replace('"', "") + "\n"


def pytest_words(path: Path) -> list[str | Path]:
    """pytest's arguments for one file.

    The workspace's settings are left out: they turn any warning into an error, also those of a torch that we do not pin.
    """
    settings = ("-c", "/dev/null", "--rootdir", ROOT, "-o", f"pythonpath={ROOT / 'tools'}", "-o", f"markers={MARKERS}")
    return ["-m", "pytest", "-m", "gpu", "-rA", "--import-mode=importlib", "-p", "no:cacheprovider", *settings, path]


def test_files() -> list[Path]:
    """Those with a test marked `gpu`; importing others may need what is not there. What needs mpirun is for `ranks`."""
    folders = [ROOT / "packages" / layer / "tests" for layer in LAYERS] + [ROOT / "integration_tests"]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [path for path, text in texts.items() if "pytest.mark.gpu" in text and "pytestmark = pytest.mark.mpi" not in text]


def probe(python: Path, env: dict[str, str]) -> dict[str, list[str]]:
    """What a Python has: for each word of `PROBE` what it printed."""
    outcome = capture((python, "-c", PROBE), timeout_s=300.0, cwd=ROOT, env=env)
    found: dict[str, list[str]] = {}
    for line in outcome.output.splitlines():
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest)
    if outcome.status != 0 or "missing" not in found:
        last = outcome.output.strip().splitlines()[-1:] or ["it printed nothing"]
        return {"missing": [f"{python} cannot import what is needed: {last[0]}"]}
    return found


def _row(what: str, command: Sequence[str | Path], env: dict[str, str]) -> Row:
    start_s = time.monotonic()
    limit_s = BENCHMARK_TIMEOUT_S if what == "benchmark" else PYTEST_TIMEOUT_S
    outcome = capture(command, timeout_s=limit_s, cwd=ROOT, env=env)
    print(outcome.output, flush=True)
    verdict = "hung" if outcome.timed_out else "passed" if outcome.status == 0 else "FAILED"
    return Row(what, verdict, time.monotonic() - start_s)


def default_python() -> Path:
    """The one that runs this: its torch and CuPy are the machine's."""
    return Path(sys.executable)
