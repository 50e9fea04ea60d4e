"""Everything that needs a GPU: tests with this mark and the benchmark, in parts, with this machine's Python, torch and CuPy.

Nothing is installed: the packages run from the source tree, so it works without a network. Backends and commands are found by
entry points, which belong to an installed distribution; a folder with a list of them stands in for it.

A machine with a GPU is often lent for some minutes, and shows only the end of a long output. So all parts together have a time
limit, and their output goes to a folder. The printed output is short: the summary comes last, and says what was not run.
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

LIMIT_S = 560.0
# A part that hangs must not use up all the time.
PART_LIMIT_S = 240.0
_SHOWN_CHARACTERS = 900
# Without these, Open MPI refuses to run as root, and refuses more ranks than cores.
MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
MARKERS = "ranks\nmpi\nlaunch\ngpu\ntimeout"
# Printed by the probe, one a line: the parts of this Python, and why NCCL does not work.
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
try:
    import syncline.collectives.torch_bridge
except Exception as error:
    print("skipped", "native DDP over our groups:", " ".join(str(error).split()))
"""


@dataclass(frozen=True)
class Part:
    """A part that is run in one go.

    Attributes:
        name: its name on the command line.
        path: the file of tests; None for the benchmark.
        select: which of its tests, as pytest's `-k`; empty for all.
        ranks: for the benchmark, how many; 0 for one on each GPU, at least 2.
    """

    name: str
    path: str | None
    select: str = ""
    ranks: int = 0


_NCCL, _TRAINING = "packages/collectives/tests/nccl/test_gpu.py", "integration_tests/test_gpu.py"
PARTS = (
    Part("nccl-one-rank", _NCCL, "one_rank"),
    Part("nccl-two-ranks", _NCCL, "not one_rank"),
    Part("staged", "packages/collectives/tests/devices/test_cuda.py"),
    Part("training-one-rank", _TRAINING, "one_rank"),
    Part("training-two-ranks", _TRAINING, "not one_rank"),
    Part("mpi", "integration_tests/test_collectives_mpi.py"),
    Part("benchmark-one-rank", None, ranks=1),
    Part("benchmark-all-gpus", None),
)


@dataclass(frozen=True)
class Row:
    """One line of the summary."""

    what: str
    verdict: str
    taken_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.what:22}{self.taken_s:7.1f} s  {self.verdict}"


def run_all(
    python: Path, names: Sequence[str] = (), results: Path | None = None, *, log: Path | None = None, limit_s: float = LIMIT_S
) -> int:
    """Run parts, and print one summary; returns how many failed. Without a GPU: only say why.

    Args:
        python: runs the parts.
        names: the parts' names; empty for all.
        results: a folder for the benchmark's figures and traces.
        log: a folder for the parts' output, one file each; None for a new one.
        limit_s: seconds for all parts together; a part that does not start in time is reported as not run.

    Raises:
        ToolError: an unknown name, or no pytest.
    """
    start_s = time.monotonic()
    known = {part.name: part for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise ToolError(f"unknown part {unknown[0]!r}; the parts are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="syncline-gpu-") as folder:
        env = environment(Path(folder))
        found = probe(python, env)
        if "nothing" not in found["missing"]:
            print(f"gpu: skipped, {found['missing'][0]}")
            return 0
        if found["pytest"][0].startswith("absent"):
            raise ToolError(f"{python} has no pytest, which runs the tests; install it there, or choose another by --python")
        logs = log or Path(tempfile.mkdtemp(prefix="syncline-gpu-log-"))
        logs.mkdir(parents=True, exist_ok=True)
        for line in found.get("skipped", []):
            print(f"skipped: {line}")
        print(f"what the parts print: {logs}", flush=True)
        machine = Machine(python, found, env, logs, results)
        rows = []
        for part in [known[name] for name in names] or PARTS:
            left_s = start_s + limit_s - time.monotonic()
            rows.append(machine.run(part, left_s) if left_s > 0 else Row(part.name, "not run: the time was over"))
            print(rows[-1], flush=True)
    print("\n=== summary ===")
    for name in ("gpu", "torch", "cuda", "cupy", "mpi4py", "skipped"):
        print(f"{name:10}{', '.join(found.get(name, ['none']))[:200]}")
    print(*rows, sep="\n")
    return sum(row.verdict.startswith(("FAILED", "hung")) for row in rows)


@dataclass(frozen=True)
class Machine:
    """Runs parts, and knows where their output goes."""

    python: Path
    found: dict[str, list[str]]
    env: dict[str, str]
    logs: Path
    results: Path | None

    def run(self, part: Part, left_s: float) -> Row:
        """Run one part, for at most this many seconds."""
        start_s, limit_s = time.monotonic(), min(left_s, PART_LIMIT_S)
        log, env = self.logs / f"{part.name}.log", self.env
        words = self._benchmark(part) if part.path is None else [self.python, *pytest_words(ROOT / part.path, part.select)]
        if part.path is not None and needs_mpi(ROOT / part.path):
            launcher = None if self.found["mpi4py"][0].startswith("absent") else _mpiexec(self.python)
            if launcher is None:
                return Row(part.name, "skipped: it needs mpi4py and mpiexec")
            words = [*launcher, *words, "-p", "syncline.collectives.testing.pytest_plugin"]
            env = {**env, **MPI_ENV}
        outcome = follow(words, timeout_s=limit_s, cwd=ROOT, env=env, log=log)
        text = log.read_text(errors="replace") if log.exists() else ""
        verdict = "hung" if outcome.timed_out else "passed" if outcome.status == 0 else "FAILED"
        if verdict != "passed" or part.path is None:
            print(text[-_SHOWN_CHARACTERS:].strip(), flush=True)
        said = "" if part.path is None else f", {counts(text)}"
        return Row(part.name, f"{verdict}{said}", time.monotonic() - start_s)

    def _benchmark(self, part: Part) -> list[str | Path]:
        ranks = part.ranks or max(2, len(self.found["gpu"]))
        words: list[str | Path] = [self.python, ROOT / "tools" / "benchmarks" / "nccl.py", "--ranks", str(ranks)]
        if self.results is not None:
            self.results.mkdir(parents=True, exist_ok=True)
            base = self.results.resolve() / f"nccl-{ranks}"
            words += ["--json", f"{base}.json", "--trace", f"{base}-trace.json"]
        return words


def counts(log: str) -> str:
    """Numbers of a part's tests by result, and of tests that were not run, from pytest's output. A pure function."""
    # Under mpiexec each rank has such a line, and all ranks run the same tests.
    last = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", log, re.MULTILINE)
    if last:
        return ", ".join(part for part in last[-1].split(", ") if "deselected" not in part and "warning" not in part)
    # pytest was ended before its last line.
    ended = re.findall(r"(?<!\w)(PASSED|FAILED|ERROR|SKIPPED)(?= +\[ *\d+%\])", log)
    chosen = re.search(r"collected (\d+) items?(?:.* (\d+) selected)?", log)
    said = [f"{ended.count(word)} {word.lower()}" for word in ("PASSED", "FAILED", "ERROR", "SKIPPED") if word in ended]
    missing = int(chosen[2] or chosen[1]) - len(ended) if chosen else 0
    return ", ".join([*said, *([f"{missing} not run"] if missing > 0 else [])]) or "no test was run"


def environment(folder: Path) -> dict[str, str]:
    """Variables by which the packages and backends are found in the source tree."""
    info = folder / "syncline_collectives-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline-collectives\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points((ROOT / "packages" / "collectives" / "pyproject.toml").read_text()))
    sources = [ROOT / "packages" / layer / "src" for layer in LAYERS]
    path = [folder, *sources, ROOT / "tools", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(map(str, path)), "PYTHONUNBUFFERED": "1"}


def entry_points(pyproject: str) -> str:
    """The backends and commands of a pyproject.toml, as a distribution's metadata lists them. (Python 3.10 reads no TOML.)"""
    sections = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n(.*?)(?:\n\n|\n\[|\Z)', pyproject, re.DOTALL)
    if "syncline.backends" not in dict(sections):
        raise ToolError("packages/collectives/pyproject.toml lists no backends")
    return "".join(f"[{name}]\n" + lines.replace('"', "") + "\n" for name, lines in sections)


def pytest_words(path: Path, select: str = "") -> list[str | Path]:
    """pytest's arguments for one file.

    The workspace's settings are left out: they turn every warning into an error, also those of a torch version that is not
    pinned.
    """
    settings = ("-c", "/dev/null", "--rootdir", ROOT, "-o", f"pythonpath={ROOT / 'tools'}", "-o", f"markers={MARKERS}")
    chosen = ("-k", select) if select else ()
    return [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",
        "-rA",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        *settings,
        *chosen,
        path,
    ]


def test_files() -> list[Path]:
    """The files with a test marked `gpu`. Other files are not imported, because they may need missing modules."""
    folders = [ROOT / "packages" / layer / "tests" for layer in LAYERS] + [ROOT / "integration_tests"]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [path for path, text in texts.items() if "pytest.mark.gpu" in text]


def needs_mpi(path: Path) -> bool:
    """Whether the file's tests are for ranks under mpiexec."""
    return "pytestmark = pytest.mark.mpi" in path.read_text(encoding="utf-8")


def probe(python: Path, env: dict[str, str]) -> dict[str, list[str]]:
    """The parts of a Python: for each word of `PROBE` its output."""
    outcome = capture((python, "-c", PROBE), timeout_s=300.0, cwd=ROOT, env=env)
    found: dict[str, list[str]] = {}
    for line in outcome.output.splitlines():
        word, _, rest = line.partition(" ")
        found.setdefault(word, []).append(rest)
    if outcome.status != 0 or "missing" not in found:
        last = outcome.output.strip().splitlines()[-1:] or ["it printed nothing"]
        return {"missing": [f"{python} cannot import what is needed: {last[0]}"]}
    return found


def _mpiexec(python: Path) -> tuple[str, ...] | None:
    """The launcher in the same folder as this Python, or else the site's, for two ranks."""
    found = shutil.which("mpiexec", path=os.pathsep.join((str(python.parent), os.environ.get("PATH", ""))))
    return None if found is None else (found, "-n", "2")


def default_python() -> Path:
    """The Python that runs this file: its torch and CuPy are the machine's."""
    return Path(sys.executable)
