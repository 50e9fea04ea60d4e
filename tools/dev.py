"""The developer's verbs: python3 tools/dev.py VERB; without one, it lists them.

Needs only Python 3.10 or newer with pip. The first run makes `.venv`, and installs into it what a verb needs. Nothing is
installed again until a requirement changes.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036, the one place that may meet an older Python
    sys.exit(f"dev.py needs Python 3.10 or newer; this is {sys.version.split()[0]}")

import argparse
import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import changed
import gpu as on_gpu
import mpi_runtimes
import mutations as breaks
import wheels
from chaos import WAYS
from chaos import chaos as play_all
from commands import ROOT, TOOLS_ON_PATH, ToolError, capture, follow, run
from elastic_runs import WAYS as ELASTIC_WAYS
from elastic_runs import elastic as play_elastic
from environment import (
    DEEPSPEED,
    DOCS,
    IMPI,
    LAYERS,
    NCCL,
    OPENMPI,
    PACKAGES,
    PINNED_TORCH,
    PYTHON,
    TOOLS,
    TORCH,
    InstallSet,
    ensure,
    newest_torch,
    require,
)
from side_by_side import Ended, Job, cores, run_side_by_side
from test_support import rank_log
from test_support.preloaded import OPTIMIZERS, PreloadedPython

DIGITS = ROOT / "packages" / "ddp" / "examples" / "digits" / "digits.py"
JOBS = ROOT / "integration_tests"
PYTEST = (PYTHON, "-m", "pytest", "--quiet")
SIZES = (1, 2, 3, 4)
# Each size is tested on some MPI, and each MPI with some size. `--full` tests all sizes on all MPIs, with all tests.
DEFAULT_SIZES = {"mpich": (1, 2, 4), "openmpi": (3,), "impi": (2,), "system": (2,)}
# Not all files run everywhere. One rank has no other rank to talk to. Four ranks are needed for two nodes of two. Code above
# the transport (training, hooks, functions, torch's programs) does not know its MPI: all of it runs on MPICH, and training on
# Open MPI, too. Intel MPI belongs to MPICH's family, and the system's MPI mostly to one of the two: both run collectives only.
DEFAULT_FILES = {
    ("mpich", 1): ("test_collectives_mpi.py", "test_ddp_mpi.py"),
    ("mpich", 4): (
        "test_shared_memory_mpi.py",
        "test_sharing_mpi.py",
        "test_timeout_report_mpi.py",
        "test_transport_mpi.py",
    ),
    ("openmpi", 3): (
        "test_collectives_mpi.py",
        "test_ddp_mpi.py",
        "test_shared_memory_mpi.py",
        "test_sharing_mpi.py",
        "test_transport_mpi.py",
    ),
    ("impi", 2): ("test_collectives_mpi.py", "test_sharing_mpi.py", "test_transport_mpi.py"),
    ("system", 2): ("test_collectives_mpi.py", "test_transport_mpi.py"),
}
# All files except these, which wait for time limits: four ranks test them better.
DEFAULT_WITHOUT = {("mpich", 2): ("test_timeout_report_mpi.py",)}
# Forks of one Python share the seed of `hash`. If code depends on the order of a set of strings, only plain ranks show it.
PLAIN_PYTHON = {("mpich", 2)}
# Long files of tests that start jobs are parts of their own. The longest come first, so that none is left over at the end.
UNIT_PARTS = ("collectives", "reducer", "ddp", "tools", "hooks")
LONG_LAUNCHES = (
    "test_slurm.py",
    "test_launching.py",
    "test_torch_suite.py",
    "test_torch_ecosystem.py",
    "test_run.py",
    "test_run_programs.py",
    "test_examples.py",
)
LONGEST = (
    "launch others",
    "unit collectives",
    "launch test_run_programs",
    "launch test_torch_ecosystem",
    "launch test_run",
    "launch test_slurm",
    "launch test_examples",
    "unit ddp",
    "unit tools",
    "wheels",
    "unit reducer",
    "unit hooks",
)
# Folders and files whose spelling is checked; `pyproject.toml` has the words that are right.
SPELLED = (
    *(ROOT / name for name in ("docs", "examples", "integration_tests", "packages", "packaging", "tools")),
    *ROOT.glob("*.md"),
)
BENCHMARKS = ROOT / "tools" / "benchmarks"
TEST_SUPPORT = ROOT / "tools" / "test_support"
SCRIPTS = (ROOT / "tools", TEST_SUPPORT, BENCHMARKS, DIGITS.parent, ROOT / "packaging" / "reframe" / "src")
# Modules of benchmarks: those under mpiexec, and those that start their ranks themselves.
UNDER_MPIEXEC = {
    "collectives": ("benchmarks.collectives",),
    "step": ("benchmarks.step",),
    "tune": ("benchmarks.tune",),
    "hooks": ("benchmarks.hooks",),
    "torch_backend": ("benchmarks.torch_backend",),
}
BENCH_LAUNCH = (2, "mpich")
ALONE = {
    "overhead": ("benchmarks.overhead",),
    "hosts": ("benchmarks.hosts",),
    "elastic": ("benchmarks.elastic",),
    "slow-links": ("benchmarks.slow_links",),
    "predict": ("benchmarks.predict",),
    "convergence": ("benchmarks.convergence",),
    "growth": ("benchmarks.growth",),
    "nccl": ("benchmarks.nccl",),
}
# Tests that depend on private parts of torch, which a new version may change. Elastic runs are about processes, and take
# minutes.
INNER = {
    "collectives": ("torch_bridge", "test_torch_internals.py", "engine/test_profiling.py"),
    "reducer": (".",),
    "ddp": (".",),
}
NEWEST_LIMITS_S = (480.0, 1800.0)  # to install the newest torch, and for its tests, which take about four minutes
RANKS_TIMEOUT_S = 600.0
# For a verb that runs as a part of `test`, and for every part of `test --full`, which has several times as many tests as usual.
FULL_LIMIT_S = 3600.0
# Unbuffered, so that a killed rank leaves its output; one thread, because ranks share cores. Tests provoke failures, so reports
# of them are off.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Then glibc gives every freed block of at least this size back to the system. By default it states no bound for what it keeps.
BOUNDED_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
RANKS_ENV = {**ONE_THREAD, "PYTHONUNBUFFERED": "1", "SYNCLINE_REPORT_DIR": ""}


def demo(options: argparse.Namespace) -> int:
    """Train the digits example under mpiexec, in the caller's folder."""
    runtime = mpi_runtimes.find(options.mpi)
    words = [*options.passed_on]
    if options.backend is not None:
        words += ["--backend", options.backend]
    if options.epochs is not None:
        words += ["--epochs", str(options.epochs)]
    return run((*runtime.command(options.ranks), PYTHON, DIGITS, *words), env=runtime.env)


def bench(options: argparse.Namespace) -> int:
    """Run a benchmark, in the caller's folder."""
    if options.benchmark in ALONE and (options.ranks, options.mpi) != BENCH_LAUNCH:
        raise ToolError(f"bench {options.benchmark} starts what it needs itself; leave out --ranks and --mpi")
    launcher: tuple[str, ...] = ()
    env = {**RANKS_ENV, **TOOLS_ON_PATH}
    if options.benchmark in UNDER_MPIEXEC:
        runtime = mpi_runtimes.find(options.mpi)
        launcher, env = runtime.command(options.ranks), {**env, **runtime.env}
    module = {**UNDER_MPIEXEC, **ALONE}[options.benchmark]
    return run((*launcher, PYTHON, "-m", *module, *options.words), env=env)


def lint(_: argparse.Namespace) -> int:
    """Check style, format, what imports what, where Notes are cited and private names of torch stand, and the English."""
    ruff = (PYTHON, "-m", "ruff")
    return _all_of(
        (*ruff, "check", ROOT),
        (*ruff, "format", "--check", ROOT),
        (PYTHON.parent / "lint-imports", "--config", ROOT / "tools" / "layers.toml", "--no-cache"),
        (PYTHON, ROOT / "tools" / "check_notes.py"),
        (PYTHON, ROOT / "tools" / "check_torch_internals.py"),
        (PYTHON, ROOT / "tools" / "check_prose.py"),
        (PYTHON, "-m", "codespell_lib", *SPELLED),
    )


def types(_: argparse.Namespace) -> int:
    """Check the types of each layer on its own, then of the tools and the example."""
    mypy = (PYTHON, "-m", "mypy", "--config-file", ROOT / "pyproject.toml")
    layers = [(*mypy, ROOT / "packages" / layer / "src") for layer in LAYERS]
    scripts = [path for folder in SCRIPTS for path in folder.glob("*.py")]
    return _all_of(*layers, (*mypy, *sorted(scripts)))


def docs(options: argparse.Namespace) -> int:
    """Build the site into `.site`; broken links and missing references are errors."""
    mkdocs = (PYTHON, "-m", "mkdocs")
    # Without --quiet: with it MkDocs neither prints nor counts a warning, and a broken link passes.
    words = ("serve",) if options.serve else ("build", "--strict")
    status = run((*mkdocs, *words), cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    if status == 0 and not options.serve:
        print(f"docs: open {ROOT / '.site' / 'index.html'}")
    return status


def unit(options: argparse.Namespace) -> int:
    """Run the tests without mpirun: one process per package, so that none depends on another."""
    return _failures(run_side_by_side(_unit_jobs(options.parts or UNIT_PARTS), options.jobs))


def launch(options: argparse.Namespace) -> int:
    """Run the tests that start jobs of their own."""
    return _failures(run_side_by_side(_launch_jobs(options.paths), options.jobs))


def torch_suite(options: argparse.Namespace) -> int:
    """Run torch's own tests with our backend and DDP; tests that need GPUs run on CPUs."""
    runtime = mpi_runtimes.find(options.mpi)
    *mpiexec, _, ranks = runtime.command(options.ranks)
    env = {
        **ONE_THREAD,
        **runtime.env,
        "SYNCLINE_TEST_PLAYED_GPUS": "1",
        "SYNCLINE_TEST_RANKS": ranks,
        "SYNCLINE_TEST_MPIEXEC": shlex.join(mpiexec),
    }
    return run((*PYTEST, "-m", "launch", JOBS / "test_torch_suite.py"), cwd=ROOT, env=env)


def ranks(options: argparse.Namespace) -> int:
    """Run the tests under mpiexec, on every requested runtime and size."""
    words = ["-k", options.expression] if options.expression else []
    failed = []
    runtimes = _runtimes(options.mpi)
    with _python_of_ranks() as fork:
        for runtime in runtimes:
            for size in options.sizes or (SIZES if options.full else DEFAULT_SIZES[runtime.name]):
                is_default = not (options.full or options.sizes or options.paths or words)
                paths = _default_paths(runtime.name, size) if is_default else options.paths or [JOBS]
                python = [] if (runtime.name, size) in PLAIN_PYTHON else fork
                if not _ranks_pass(runtime, size, python, (*words, *paths)):
                    failed.append(f"{runtime.name}, {size} ranks")
    for case in failed:
        print(f"failed: {case}")
    return len(failed)


def chaos(options: argparse.Namespace) -> int:
    """Kill, stop and delay random ranks, and print what the others did."""
    return 0 if play_all(options.kills, options.stops, options.delays, options.over, options.seed) else 1


def elastic(options: argparse.Namespace) -> int:
    """Train while ranks are killed, compare with undisturbed trainings, and print how long each recovery took."""
    return 0 if play_elastic(options.runs, options.stops, options.joins, options.over, options.seed) else 1


def soak(options: argparse.Namespace) -> int:
    """Print how much memory four ranks need under random collectives from three threads, and compare it with its bound."""
    runtime = mpi_runtimes.find(options.mpi)
    job = ROOT / "tools" / "test_support" / "soak_job.py"
    words = [str(options.seconds), str(options.seed)]
    allocator = {} if options.allocator == "default" else BOUNDED_ALLOCATOR
    environ = {**RANKS_ENV, **TOOLS_ON_PATH, **runtime.env, **allocator}
    return run((*runtime.command(4), PYTHON, job, *words), env=environ)


def build_wheels(options: argparse.Namespace) -> int:
    """Build the wheels and test each alone."""
    return wheels.build_and_test(all_tests=options.full)


def release(_: argparse.Namespace) -> int:
    """Check and build a release, and publish nothing."""
    import release as release_check  # needs tomli before Python 3.11; the other commands need nothing but Python

    return release_check.dry_run()


def gpu(options: argparse.Namespace) -> int:
    """Run the tests that need a GPU, with this machine's torch and CuPy."""
    return on_gpu.run_all(options.python, options.parts, options.results, log=options.log, limit_s=options.limit)


def test(options: argparse.Namespace) -> int:
    """Run everything, even after a failure, and end with a table.

    Parts with few processes run side by side. The ranks under mpiexec take all cores, so they run afterwards. With `--torch`,
    all tests run in an environment with this version; style, types and documentation do not depend on it.
    """
    full = ("--full",) if options.full else ()
    start_s = time.monotonic()
    jobs = [*_unit_jobs(UNIT_PARTS), *_launch_jobs([]), _verb("wheels", *full)]
    if not TORCH:
        jobs += [_verb("types"), _verb("docs"), _verb("lint")]
    jobs.sort(key=lambda job: LONGEST.index(job.name) if job.name in LONGEST else len(LONGEST))
    if options.full:
        jobs = [replace(job, timeout_s=FULL_LIMIT_S) for job in jobs]
    ended = run_side_by_side(jobs, options.jobs)
    ended += run_side_by_side([_verb("ranks", *full)], 1)
    _summarize(ended, time.monotonic() - start_s)
    return _failures(ended)


def install(_: argparse.Namespace) -> int:
    """Do nothing more: every verb installs before it starts."""
    return 0


def inner(options: argparse.Namespace) -> int:
    """Run the tests that depend on private parts of torch: the registered backends, the reducer, DDP, and torch's own tests."""
    start_s = time.monotonic()
    jobs = _launch_jobs([JOBS / "test_torch_suite.py"])
    for layer, names in INNER.items():
        paths = [ROOT / "packages" / layer / "tests" / name for name in names]
        jobs.append(Job(f"unit {layer}", (*PYTEST, "-m", "not mpi", "-k", "not elastic_processes", *paths), ONE_THREAD))
    ended = run_side_by_side(jobs, options.jobs)
    _summarize(ended, time.monotonic() - start_s)
    return _failures(ended)


def newest(_: argparse.Namespace) -> int:
    """Run `inner` with the newest torch. If it is the pinned one, or cannot be installed, say so without a failure."""
    version = newest_torch()
    if version is None:
        print("newest-torch: skipped, pip finds no torch")
        return 0
    if version == PINNED_TORCH:
        print(f"newest-torch: skipped, all tests run with torch {version}, and pip finds none that is newer")
        return 0
    dev = (sys.executable, ROOT / "tools" / "dev.py")
    install_limit_s, tests_limit_s = NEWEST_LIMITS_S
    if follow((*dev, "install", "--torch", version), timeout_s=install_limit_s, cwd=ROOT, env={}).status != 0:
        print(f"newest-torch: skipped, torch {version} could not be installed within {install_limit_s:.0f} s")
        return 0
    return follow((*dev, "inner", "--skip-install", "--torch", version), timeout_s=tests_limit_s, cwd=ROOT, env={}).status


def check(options: argparse.Namespace) -> int:
    """Run lint, types, and the tests of what changed since the branch left main; `changed.py` says which."""
    start_s = time.monotonic()
    files = changed.changed_files(options.since)
    selection = changed.select(files, changed.test_files())
    jobs = [_verb("lint"), _verb("types")] + ([_verb("docs")] if selection.docs else [])
    folders = {part: f"packages/{part}/tests" for part in LAYERS} | {"tools": "tools/tests"}
    for part, folder in folders.items():
        if paths := selection.below(folder):
            jobs.append(Job(f"unit {part}", (*PYTEST, "-m", "not mpi", *map(str, paths)), ONE_THREAD))
    under_mpi = selection.under_mpi
    if launches := [path for path in selection.below("integration_tests") if path not in under_mpi]:
        jobs += _launch_jobs([Path(path) for path in launches])
    ended = run_side_by_side(jobs, options.jobs)
    if under_mpi:
        ended += run_side_by_side([_verb("ranks", *map(str, under_mpi), "--mpi", "mpich", "--sizes", "2")], 1)
    _summarize(ended, time.monotonic() - start_s)
    print(f"{len(files)} files changed since {options.since}; {len(selection.tests)} files of tests ran")
    if selection.without:
        print(f"no test is chosen for {', '.join(map(str, selection.without))}: `dev.py test` runs all")
    return _failures(ended)


def mutations(options: argparse.Namespace) -> int:
    """Try the deliberate breaks of mutations.toml."""
    return breaks.run_all(options.name, options.jobs, options.table)


def _summarize(ended: Sequence[Ended], taken_s: float) -> None:
    print(f"\n=== summary ===\n{'':38}{'elapsed':>10}{'processor':>12}")
    for one in [*ended, Ended("all", _failures(ended), taken_s, sum(one.processor_s for one in ended))]:
        print(f"{one.name:32}{'passed' if one.status == 0 else 'FAILED'}{one.taken_s:8.1f} s{one.processor_s:10.1f} s")


def _verb(name: str, *words: str) -> Job:
    return Job(name, (sys.executable, ROOT / "tools" / "dev.py", name, "--skip-install", *words), timeout_s=FULL_LIMIT_S)


def _unit_jobs(parts: Sequence[str]) -> list[Job]:
    folders = {**{layer: ROOT / "packages" / layer / "tests" for layer in LAYERS}, "tools": ROOT / "tools" / "tests"}
    return [Job(f"unit {part}", (*PYTEST, "-m", "not mpi", folders[part]), ONE_THREAD) for part in parts]


def _launch_jobs(paths: Sequence[Path]) -> list[Job]:
    """Long files alone, then all others together; or the given `paths`."""
    pytest = (*PYTEST, "-m", "launch")
    if paths:
        return [Job("launch", (*pytest, *paths), ONE_THREAD)]
    long = [JOBS / name for name in LONG_LAUNCHES]
    others = Job("launch others", (*pytest, JOBS, *(f"--ignore={path}" for path in long)), ONE_THREAD)
    return [*(Job(f"launch {path.stem}", (*pytest, path), ONE_THREAD) for path in long), others]


def _failures(ended: Sequence[Ended]) -> int:
    return sum(one.status != 0 for one in ended)


NEEDED_MPI = ("mpich", "openmpi", "impi")
NEEDS: dict[Callable[[argparse.Namespace], int], tuple[InstallSet, ...]] = {
    demo: (PACKAGES,),
    lint: (PACKAGES, TOOLS),
    types: (PACKAGES, TOOLS),
    docs: (PACKAGES, TOOLS, DOCS),
    unit: (PACKAGES, TOOLS, NCCL),
    launch: (PACKAGES, TOOLS, DEEPSPEED),
    torch_suite: (PACKAGES, TOOLS),
    ranks: (PACKAGES, TOOLS),
    chaos: (PACKAGES, TOOLS, OPENMPI),
    elastic: (PACKAGES, TOOLS, OPENMPI),
    soak: (PACKAGES, TOOLS, OPENMPI),
    bench: (PACKAGES,),
    build_wheels: (PACKAGES, TOOLS),
    release: (PACKAGES, TOOLS),
    gpu: (),
    install: (PACKAGES, TOOLS),
    inner: (PACKAGES, TOOLS),
    newest: (PACKAGES,),
    check: (PACKAGES, TOOLS, DOCS, NCCL, DEEPSPEED),
    mutations: (PACKAGES, TOOLS, NCCL),
    test: (PACKAGES, TOOLS, DOCS, NCCL, OPENMPI, IMPI, DEEPSPEED),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    wanted = getattr(options, "torch", None) or TORCH
    if wanted and wanted != TORCH:  # the choice of the environment depends on it, at import
        words = sys.argv[1:] if arguments is None else arguments
        os.execve(sys.executable, [sys.executable, __file__, *words], {**os.environ, "SYNCLINE_DEV_TORCH": wanted})
    if getattr(options, "full", False):
        os.environ["SYNCLINE_TEST_FULL"] = "1"  # also runs tests that take minutes
    try:
        _install(options)
        return 0 if (status := options.verb(options)) == 0 else max(1, min(status, 125))
    except ToolError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _install(options: argparse.Namespace) -> None:
    if options.verb is gpu:
        return
    if options.skip_install:
        require()
        return
    wanted = NEEDS[options.verb]
    if options.verb in (demo, ranks, bench, torch_suite):
        wanted += tuple(extra for extra in (OPENMPI, IMPI) if extra.name in (options.mpi or NEEDED_MPI))
    ensure(wanted)


def _runtimes(names: Sequence[str] | None) -> list[mpi_runtimes.MpiRuntime]:
    """The requested runtimes; by default all from PyPI, and the system's if there is one."""
    found = [mpi_runtimes.find(name) for name in names or NEEDED_MPI]
    if names:
        return found
    try:
        return [*found, mpi_runtimes.find("system")]
    except ToolError:
        print("system: skipped, this machine has no MPI of its own on PATH")
        return found


def _default_paths(runtime: str, size: int) -> list[str | Path]:
    some = DEFAULT_FILES.get((runtime, size), ())
    ignored = [f"--ignore={JOBS / name}" for name in DEFAULT_WITHOUT.get((runtime, size), ())]
    return [JOBS / name for name in some] or [JOBS, *ignored]


@contextmanager
def _python_of_ranks() -> Iterator[list[str]]:
    """Arguments for the Python of a rank: none; or those for a fork of a Python that has loaded torch."""
    if os.environ.get("SYNCLINE_TEST_FULL") == "1" or not hasattr(os, "pidfd_open"):
        yield []
        return
    with (
        tempfile.TemporaryDirectory(prefix="syncline-preloaded-") as folder,
        PreloadedPython(Path(folder), OPTIMIZERS, str(PYTHON)) as server,
    ):
        yield server.command[1:]


def _ranks_pass(runtime: mpi_runtimes.MpiRuntime, size: int, python: Sequence[str], words: Sequence[str | Path]) -> bool:
    """Run one size. If all is well, only rank 0's output is shown; after a failure all ranks' output, and mpiexec's last."""
    with tempfile.TemporaryDirectory(prefix="syncline-ranks-") as folder:
        pytest = (
            *PYTEST[1:],
            "-m",
            "mpi",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "-p",
            "syncline.collectives.testing.pytest_plugin",
            *words,
        )
        outcome = capture(
            (*runtime.command(size), PYTHON, rank_log.__file__, folder, *python, *pytest),
            timeout_s=RANKS_TIMEOUT_S * (4 if os.environ.get("SYNCLINE_TEST_FULL") == "1" else 1),
            cwd=ROOT,
            env={**RANKS_ENV, **runtime.env},
        )
        said = rank_log.read(Path(folder))
    if outcome.status == 0:
        print(said.get(0, "").strip(), flush=True)
        return True
    for rank, text in said.items():
        print(f"--- rank {rank} of {size} ---\n{text.strip()}")
    verdict = "hung and was ended" if outcome.timed_out else f"status {outcome.status}"
    print(f"--- mpiexec ({runtime.name}): {verdict} ---\n{outcome.output.strip()}", flush=True)
    return False


def _all_of(*commands: Sequence[str | Path]) -> int:
    """Run every command, also after a failure; returns how many failed."""
    return sum(run(command, cwd=ROOT) != 0 for command in commands)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_demo(_add(verbs, "demo", demo, "train handwritten digits on several ranks"))
    everything = _add(verbs, "test", test, "everything: lint, types, docs, unit, launch, ranks, wheels")
    _add_full(everything)
    _add_torch(everything)
    _add_jobs(everything)
    _add_torch(_add(verbs, "install", install, "make .venv, and install what most verbs need"))
    of_torch = _add(verbs, "inner", inner, "what depends on how torch works inside: its backends, reducer, DDP, its own tests")
    _add_torch(of_torch)
    _add_jobs(of_torch)
    _add(verbs, "newest-torch", newest, "the same with the newest torch that pip finds; skipped where it cannot be had")
    checks = _add(verbs, "check", check, "lint, types, and the tests of what changed since main")
    checks.add_argument("--since", default="main", metavar="BRANCH", help="or since this branch or commit (default: main)")
    _add_jobs(checks)
    _add(verbs, "lint", lint, "ruff, format check, import-linter, and the English of pages and sources")
    _add(verbs, "types", types, "mypy strict, each layer on its own, then the tools")
    _add_docs(_add(verbs, "docs", docs, "build the documentation's site, strictly"))
    units = _add(verbs, "unit", unit, "tests without mpirun: pure ones, and ranks as threads")
    units.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"{', '.join(UNIT_PARTS)} (default: all)")
    _add_torch(units)
    _add_jobs(units)
    launches = _add(verbs, "launch", launch, "tests that start jobs of their own")
    launches.add_argument("paths", nargs="*", type=Path, help="default: integration_tests")
    _add_torch(launches)
    _add_jobs(launches)
    suite = _add(verbs, "torch-suite", torch_suite, "torch's own tests over ours, those for GPUs on CPUs, some minutes")
    _add_full(suite)
    _add_torch(suite)
    suite.add_argument("--ranks", type=_at_least_one, default=2, metavar="N", help="how many ranks (default: 2)")
    suite.add_argument("--mpi", choices=mpi_runtimes.NAMES, default="mpich", help="which MPI (default: mpich)")
    under_mpirun = _add(verbs, "ranks", ranks, "tests under mpirun")
    _add_ranks(under_mpirun)
    _add_torch(under_mpirun)
    _add_soak(_add(verbs, "soak", soak, "print how memory grows under random collectives from three threads"))
    _add_chaos(_add(verbs, "chaos", chaos, "kill, stop and delay random ranks; nothing may hang or be without a name"))
    _add_elastic(_add(verbs, "elastic", elastic, "train while ranks are killed, and compare with trainings in which none is"))
    tried = _add(verbs, "mutations", mutations, "deliberate breaks in copies of the sources: which do the tests catch?")
    tried.add_argument(
        "name", nargs="?", default="", help="only those whose name or file matches this regular expression (default: all)"
    )
    tried.add_argument("--table", type=Path, metavar="FILE", help="write the result there, as a table")
    _add_jobs(tried)
    _add_bench(_add(verbs, "bench", bench, "measure side by side, interleaved: collectives, steps, two emulated hosts"))
    _add_full(_add(verbs, "wheels", build_wheels, "build the wheels and test each installed alone"))
    ready = _add(verbs, "release", release, "check versions, metadata and changelog; build; install each layer alone")
    ready.add_argument("--dry-run", action="store_true", required=True, help="publish nothing, which is all that it can")
    _add_gpu(_add(verbs, "gpu", gpu, "what needs a GPU, with the torch and CuPy of this machine; installs nothing"))
    options, passed_on = parser.parse_known_args(arguments)
    options.passed_on = passed_on
    if options.passed_on and options.verb is not demo:
        parser.error(f"unknown arguments: {' '.join(options.passed_on)}")
    return options


def _add(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    verb: Callable[[argparse.Namespace], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=summary, description=f"{summary}.", allow_abbrev=False)
    parser.set_defaults(verb=verb)
    parser.add_argument("--skip-install", action="store_true", help="use .venv just as it is")
    return parser


def _part(text: str) -> str:
    if text not in UNIT_PARTS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(UNIT_PARTS)}, found {text}")
    return text


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)+", text):
        raise argparse.ArgumentTypeError(f"expected a version such as 2.15.0, found {text!r}")
    return text


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Further arguments go to digits.py, for example --report PATH, --timeline PATH."
    add("--ranks", type=_at_least_one, default=2, metavar="N", help="how many ranks (default: 2)")
    add("--mpi", choices=mpi_runtimes.NAMES, default="mpich", help="which MPI (default: mpich)")
    add("--backend", metavar="NAME", help="communication backend (default: automatic)")
    add("--epochs", type=int, metavar="N", help="passes over the training data")


def _add_torch(parser: argparse.ArgumentParser) -> None:
    summary = "with this version of torch from PyPI (1 GB; 5 GB where there is no C compiler), in an environment of its own"
    parser.add_argument("--torch", type=_version, metavar="VERSION", help=summary)


def _add_full(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full",
        action="store_true",
        help="every test, as for a release: also those that take minutes, and every size on every MPI",
    )


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    width = min(cores() + 1, 4)  # some parts wait more than they compute
    parser.add_argument("--jobs", type=_at_least_one, default=width, metavar="N", help=f"side by side (default here: {width})")


def _add_docs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve", action="store_true", help="show it while you write, instead")


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    found = on_gpu.default_python()
    add = parser.add_argument
    add("--python", type=Path, default=found, help="the Python that has them (default: this one)")
    add("--results", type=Path, metavar="FOLDER", help="where the benchmark leaves its figures and traces (default: nowhere)")
    add("--log", type=Path, metavar="FOLDER", help="where what the parts print goes (default: a new folder)")
    add("--limit", type=float, default=on_gpu.LIMIT_S, metavar="S", help=f"seconds for all (default: {on_gpu.LIMIT_S:g})")
    names = ", ".join(part.name for part in on_gpu.PARTS)
    add("parts", nargs="*", metavar="PART", help=f"only these, in this order (default: all): {names}")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "What follows the benchmark's name is for it: `bench step --help` tells."
    add("--ranks", type=_at_least_one, default=BENCH_LAUNCH[0], metavar="N", help="how many ranks (default: 2)")
    add("--mpi", choices=mpi_runtimes.NAMES, default=BENCH_LAUNCH[1], help="which MPI (default: mpich)")
    add("benchmark", choices=sorted({**UNDER_MPIEXEC, **ALONE}), help="which; it begins after this verb's own options")
    add("words", nargs=argparse.REMAINDER, metavar="...", help="its options")


def _add_soak(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mpi", choices=mpi_runtimes.NAMES, default="mpich", help="which MPI (default: mpich)")
    add("--seconds", type=float, default=120.0, help="how long (default: 120)")
    help_text = "bounded: larger blocks go back to the system, so resident memory has a bound; default: glibc's way"
    add("--allocator", choices=("bounded", "default"), default="bounded", help=help_text)
    add("--seed", type=int, default=0, help="of the collectives (default: 0)")


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kills", type=int, default=4, metavar="N", help="how many jobs in which a rank is killed (default: 4)")
    add("--stops", type=int, default=4, metavar="N", help="in which a rank is stopped (default: 4)")
    add("--delays", type=int, default=0, metavar="N", help="in which a rank is late (default: 0)")
    add("--over", choices=WAYS, nargs="+", default=WAYS, help="default: all")
    add("--seed", type=int, default=0, help="of the first job (default: 0)")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=int, default=4, metavar="N", help="how many in which two of four ranks are killed (default: 4)")
    add("--stops", type=int, default=1, metavar="N", help="in which a rank is stopped, given up, and goes on (default: 1)")
    add("--joins", type=int, default=1, metavar="N", help="in which two are killed, and two newcomers come (default: 1)")
    add("--over", choices=ELASTIC_WAYS, nargs="+", default=ELASTIC_WAYS, help="default: all; stops and joins are over gloo")
    add("--seed", type=int, default=0, help="of the first run (default: 0)")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mpi", nargs="+", choices=mpi_runtimes.NAMES, help="default: all that can be had")
    add("--sizes", nargs="+", type=_at_least_one, metavar="N", help="default: some on each MPI")
    _add_full(parser)
    add("-k", dest="expression", metavar="EXPR", help="only tests that match, as in pytest")
    add("paths", nargs="*", type=Path, help="default: integration_tests")


def exit_on_sigterm() -> None:
    """Exit on SIGTERM, and end the parts on the way: they have their own sessions, which the signal does not reach."""

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the end of the parts
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
