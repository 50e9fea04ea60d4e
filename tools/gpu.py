"""What needs a GPU: the tests marked so, then the benchmark, with the Python, torch and CuPy that are there.

Nothing is installed: the packages are run from the source tree, so it works without a network. Entry points, by which backends
are found, come with an installed distribution; a folder with their list stands for it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commands import ROOT, ToolError, capture, follow
from environment import LAYERS

PYTEST_TIMEOUT_S = 3600.0
BENCHMARK_TIMEOUT_S = 600.0
# Open MPI refuses root and more ranks than cores unless it is told.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
MARKERS = "ranks\nmpi\nlaunch\ngpu\ntimeout"
# Printed by the probe, one a line: what this Python has, and what keeps NCCL from working.
PROBE = """
import importlib, torch
for name in ("cupy", "pytest", "mpi4py"):
    try:
        module = importlib.import_module(name)
        print(name, getattr(module, "__version__", "present"))
    except Exception as error:
        print(name, "absent:", " ".join(str(error).split()))
print("torch", torch.__version__)
print("cuda", torch.version.cuda)
for index in range(torch.cuda.device_count()):
    print("gpu", torch.cuda.get_device_name(index))
from syncline.collectives.transports.nccl import backend
print("missing", backend.missing() or "nothing")
"""


@dataclass(frozen=True)
class Row:
    """One line of the summary."""

    what: str
    verdict: str
    taken_s: float = 0.0


def run_all(python: Path, paths: Sequence[Path] = (), results: Path | None = None) -> int:
    """Run the tests and the benchmark, and print one summary; how many failed. Without a GPU: say why, and nothing else.

    Args:
        python: what runs them.
        paths: files of tests; if there are any, only these are run, and no benchmark.
        results: a folder for the benchmark's figures and traces.
    """
    with tempfile.TemporaryDirectory(prefix="syncline-gpu-") as folder:
        env = environment(Path(folder))
        found = probe(python, env)
        if "nothing" not in found["missing"]:
            print(f"gpu: skipped, {found['missing'][0]}")
            return 0
        if found["pytest"][0].startswith("absent"):
            raise ToolError(f"{python} has no pytest, which runs the tests; install it there, or choose another by --python")
        launcher = None if found["mpi4py"][0].startswith("absent") else _mpiexec(python)
        rows = [_tests(path.resolve(), python, launcher, env) for path in paths or test_files()]
        rows += [] if paths else [_benchmark(python, ranks, results, env) for ranks in (1, max(2, len(found["gpu"])))]
    print("\n=== summary ===")
    for name in ("gpu", "torch", "cuda", "cupy", "mpi4py"):
        print(f"{name:10}{', '.join(found.get(name, ['none']))}")
    for row in rows:
        print(f"{row.what:50}{row.verdict}{row.taken_s:8.1f} s")
    return sum(row.verdict in ("FAILED", "hung") for row in rows)


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
    return ["-m", "pytest", "-m", "gpu", "-v", "-rA", "--import-mode=importlib", "-p", "no:cacheprovider", *settings, path]


def test_files() -> list[Path]:
    """Those with a test marked `gpu`; importing others may need what is not there."""
    folders = [ROOT / "packages" / layer / "tests" for layer in LAYERS] + [ROOT / "integration_tests"]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [path for path, text in texts.items() if "pytest.mark.gpu" in text]


def needs_mpi(path: Path) -> bool:
    """Whether the file's tests are for ranks under mpiexec."""
    return "pytestmark = pytest.mark.mpi" in path.read_text(encoding="utf-8")


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


def _tests(path: Path, python: Path, launcher: Sequence[str] | None, env: dict[str, str]) -> Row:
    what, words = str(path.relative_to(ROOT)), pytest_words(path)
    if not needs_mpi(path):
        return _row(what, (python, *words), env, PYTEST_TIMEOUT_S)
    if launcher is None:
        return Row(what, "skipped: it needs mpi4py and mpiexec")
    plugin = ("-p", "syncline.collectives.testing.pytest_plugin")
    return _row(what, (*launcher, python, *words, *plugin), {**env, **MPI_ENV}, PYTEST_TIMEOUT_S)


def _mpiexec(python: Path) -> tuple[str, ...] | None:
    """The launcher beside that Python, else the site's, for two ranks."""
    found = shutil.which("mpiexec", path=os.pathsep.join((str(python.parent), os.environ.get("PATH", ""))))
    return None if found is None else (found, "-n", "2")


def _benchmark(python: Path, ranks: int, results: Path | None, env: dict[str, str]) -> Row:
    words: list[str | Path] = [python, ROOT / "tools" / "benchmarks" / "nccl.py", "--ranks", str(ranks)]
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        words += ["--json", results.resolve() / f"nccl-{ranks}.json", "--trace", results.resolve() / f"nccl-{ranks}-trace.json"]
    return _row(f"benchmark, {ranks} rank(s)", words, env, BENCHMARK_TIMEOUT_S)


def _row(what: str, command: Sequence[str | Path], env: dict[str, str], limit_s: float) -> Row:
    start_s = time.monotonic()
    outcome = follow(command, timeout_s=limit_s, cwd=ROOT, env=env)
    verdict = "hung" if outcome.timed_out else "passed" if outcome.status == 0 else "FAILED"
    return Row(what, verdict, time.monotonic() - start_s)


def default_python() -> Path:
    """The one that runs this: its torch and CuPy are the machine's."""
    return Path(sys.executable)
