"""The developer's verbs: python3 tools/dev.py {demo,test,lint,types,docs,unit,ranks,bench,wheels,release,gpu}.

Needs Python 3.10 or newer with pip, and nothing else: `.venv` is made on the first run, and what a
verb needs is installed into it. Nothing is installed again until a requirement changes.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036, the one place that may meet an older Python
    sys.exit(f"dev.py needs Python 3.10 or newer; this is {sys.version.split()[0]}")

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gpu as on_gpu
import mpi_runtimes
import rank_log
import release as release_check
import wheels
from commands import ROOT, ToolError, capture, run
from environment import BASE, DOCS, IMPI, LAYERS, NCCL, OPENMPI, PACKAGES, PYTHON, TOOLS, InstallSet, ensure, require

DIGITS = ROOT / "packages" / "ddp" / "examples" / "digits" / "digits.py"
JOBS = ROOT / "integration_tests"
PYTEST = (PYTHON, "-m", "pytest", "--quiet")
SIZES = (1, 2, 3, 4)
# Every size on MPICH, and some on each of the others; `--full` takes all on all. The system's is one of those families again:
# it is shown to be found and to work.
DEFAULT_SIZES = {"mpich": SIZES, "openmpi": (2, 4), "impi": (3,), "system": (2,)}
BENCHMARKS = ROOT / "tools" / "benchmarks"
TEST_SUPPORT = ROOT / "tools" / "test_support"
# Each is a module; those under mpiexec, and those that start what they need themselves.
UNDER_MPIEXEC = {
    "collectives": ("benchmarks.collectives",),
    "step": ("benchmarks.step",),
    "paper": ("benchmarks.paper",),
    "hooks": ("benchmarks.hooks",),
    "waiting": ("benchmarks.waiting",),
    "torch_backend": ("benchmarks.torch_backend",),
    "call_records": ("benchmarks.call_records",),
}
BENCH_LAUNCH = (2, "mpich")
ALONE = {
    "overhead": ("benchmarks.overhead",),
    "hosts": ("benchmarks.hosts",),
    "slow-links": ("benchmarks.slow_links",),
    "convergence": ("benchmarks.convergence",),
    "nccl": ("benchmarks.nccl",),
}
RANKS_TIMEOUT_S = 300.0
# Unbuffered, so that a rank that is killed leaves what it said; one thread, for cores are shared.
# Tests provoke failures: no reports of them.
RANKS_ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "SYNCLINE_REPORT_DIR": ""}


def demo(options: argparse.Namespace) -> int:
    """Train the digits example under mpiexec, from where the caller stands."""
    runtime = mpi_runtimes.find(options.mpi)
    words = [*options.passed_on]
    if options.backend is not None:
        words += ["--backend", options.backend]
    if options.epochs is not None:
        words += ["--epochs", str(options.epochs)]
    return run((*runtime.command(options.ranks), PYTHON, DIGITS, *words), env=runtime.env)


def bench(options: argparse.Namespace) -> int:
    """Run a benchmark, from where the caller stands."""
    if options.benchmark in ALONE and (options.ranks, options.mpi) != BENCH_LAUNCH:
        raise ToolError(f"bench {options.benchmark} starts what it needs itself; leave out --ranks and --mpi")
    launcher: tuple[str, ...] = ()
    env = {**RANKS_ENV, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "tools"), os.environ.get("PYTHONPATH"))))}
    if options.benchmark in UNDER_MPIEXEC:
        runtime = mpi_runtimes.find(options.mpi)
        launcher, env = runtime.command(options.ranks), {**env, **runtime.env}
    module = {**UNDER_MPIEXEC, **ALONE}[options.benchmark]
    return run((*launcher, PYTHON, "-m", *module, *options.words), env=env)


def lint(_: argparse.Namespace) -> int:
    """Check style, format and layering."""
    ruff = (PYTHON, "-m", "ruff")
    return _all_of(
        (*ruff, "check", ROOT),
        (*ruff, "format", "--check", ROOT),
        (PYTHON, ROOT / "tools" / "check_layering.py"),
    )


def types(_: argparse.Namespace) -> int:
    """Check the types of each layer on its own, then of the tools and the example."""
    mypy = (PYTHON, "-m", "mypy", "--config-file", ROOT / "pyproject.toml")
    layers = [(*mypy, ROOT / "packages" / layer / "src") for layer in LAYERS]
    scripts: list[Sequence[str | Path]]
    scripts = [(*mypy, *sorted(folder.glob("*.py"))) for folder in (ROOT / "tools", TEST_SUPPORT, BENCHMARKS, DIGITS.parent)]
    return _all_of(*layers, *scripts)


def docs(options: argparse.Namespace) -> int:
    """Build the site into `.site`; broken links and missing references are errors."""
    mkdocs = (PYTHON, "-m", "mkdocs")
    words = ("serve",) if options.serve else ("build", "--strict", "--quiet")
    status = run((*mkdocs, *words), cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    if status == 0 and not options.serve:
        print(f"docs: open {ROOT / '.site' / 'index.html'}")
    return status


def unit(_: argparse.Namespace) -> int:
    """Run the tests without mpirun: one process per package, so that none leans on another."""
    folders = [ROOT / "packages" / layer / "tests" for layer in LAYERS] + [ROOT / "tools" / "tests"]
    return _all_of(*((*PYTEST, "-m", "not mpi", folder) for folder in folders))


def ranks(options: argparse.Namespace) -> int:
    """Run the tests that start jobs of their own, then those under mpiexec, on every runtime and size asked for."""
    words: list[str | Path] = ["-k", options.expression] if options.expression else []
    failures = 0 if options.paths or words else run((*PYTEST, "-m", "launch", JOBS), cwd=ROOT)
    words += options.paths or [JOBS]
    failed = [
        f"{runtime.name}, {size} ranks"
        for runtime in _runtimes(options.mpi)
        for size in options.sizes or (SIZES if options.full else DEFAULT_SIZES[runtime.name])
        if not _ranks_pass(runtime, size, words)
    ]
    for case in failed:
        print(f"failed: {case}")
    return len(failed) + (failures != 0)


def build_wheels(_: argparse.Namespace) -> int:
    """Build the wheels and test each alone."""
    return wheels.build_and_test()


def release(_: argparse.Namespace) -> int:
    """Check and build a release, and publish nothing."""
    return release_check.dry_run()


def gpu(options: argparse.Namespace) -> int:
    """Run what needs a GPU, with the torch and CuPy of this machine."""
    return on_gpu.run_all(options.python, options.paths, options.results)


def test(options: argparse.Namespace) -> int:
    """Run everything, even after a failure, and end with a table."""
    options.mpi, options.sizes, options.expression, options.paths, options.serve = None, None, "", [], False
    steps: tuple[Callable[[argparse.Namespace], int], ...]
    steps = (lint, types, docs, unit, ranks, build_wheels)
    rows = [_timed(step, options) for step in steps]
    print("\n=== summary ===")
    for name, verdict, taken_s in rows:
        print(f"{name:10}{verdict}{taken_s:8.1f} s")
    return sum(verdict != "passed" for _, verdict, _ in rows)


NEEDED_MPI = ("mpich", "openmpi", "impi")
NEEDS: dict[Callable[[argparse.Namespace], int], tuple[InstallSet, ...]] = {
    demo: (PACKAGES,),
    lint: (PACKAGES, TOOLS),
    types: (PACKAGES, TOOLS),
    docs: (PACKAGES, TOOLS, DOCS),
    unit: (PACKAGES, TOOLS, NCCL),
    ranks: (PACKAGES, TOOLS),
    bench: (PACKAGES,),
    build_wheels: (PACKAGES, TOOLS, BASE),
    release: (PACKAGES, TOOLS, BASE),
    gpu: (),
    test: (PACKAGES, TOOLS, DOCS, NCCL, OPENMPI, IMPI, BASE),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
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
    if options.verb in (demo, ranks, bench):
        wanted += tuple(extra for extra in (OPENMPI, IMPI) if extra.name in (options.mpi or NEEDED_MPI))
    ensure(wanted)


def _runtimes(names: Sequence[str] | None) -> list[mpi_runtimes.MpiRuntime]:
    """Those asked for; by default all that come from PyPI, and the system's if it has one."""
    found = [mpi_runtimes.find(name) for name in names or NEEDED_MPI]
    if names:
        return found
    try:
        return [*found, mpi_runtimes.find("system")]
    except ToolError:
        print("system: skipped, this machine has no MPI of its own on PATH")
        return found


def _ranks_pass(runtime: mpi_runtimes.MpiRuntime, size: int, words: Sequence[str | Path]) -> bool:
    """Rank 0 speaks for all that is well; after a failure everyone is heard, mpiexec last."""
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
            (*runtime.command(size), PYTHON, ROOT / "tools" / "rank_log.py", folder, *pytest),
            timeout_s=RANKS_TIMEOUT_S,
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
    """Run every command, whatever becomes of the others; how many failed."""
    return sum(run(command, cwd=ROOT) != 0 for command in commands)


def _timed(step: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> tuple[str, str, float]:
    name = "wheels" if step is build_wheels else step.__name__
    print(f"\n=== {name} ===", flush=True)
    start_s = time.monotonic()
    try:
        failures = step(options)
    except ToolError as error:
        print(f"dev.py: {error}")
        failures = 1
    return name, "FAILED" if failures else "passed", time.monotonic() - start_s


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_demo(_add(verbs, "demo", demo, "train handwritten digits on several ranks"))
    _add_full(_add(verbs, "test", test, "everything: lint, types, docs, unit, ranks, wheels"))
    _add(verbs, "lint", lint, "ruff, format check, layering check")
    _add(verbs, "types", types, "mypy strict, each layer on its own, then the tools")
    _add_docs(_add(verbs, "docs", docs, "build the documentation's site, strictly"))
    _add(verbs, "unit", unit, "tests without mpirun: pure ones, and ranks as threads")
    _add_ranks(_add(verbs, "ranks", ranks, "tests under mpirun"))
    _add_bench(_add(verbs, "bench", bench, "measure side by side, interleaved: collectives, steps, two emulated hosts"))
    _add(verbs, "wheels", build_wheels, "build the wheels and test each installed alone")
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


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return int(text)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "Further arguments go to digits.py, for example --report PATH, --timeline PATH."
    add("--ranks", type=_at_least_one, default=2, metavar="N", help="how many ranks (default: 2)")
    add("--mpi", choices=mpi_runtimes.NAMES, default="mpich", help="which MPI (default: mpich)")
    add("--backend", metavar="NAME", help="communication backend (default: automatic)")
    add("--epochs", type=int, metavar="N", help="passes over the training data")


def _add_full(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="every size on every MPI, as for a release")


def _add_docs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve", action="store_true", help="show it while you write, instead")


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    found = on_gpu.default_python()
    add = parser.add_argument
    add("--python", type=Path, default=found, help="the Python that has them (default: this one)")
    add("--results", type=Path, metavar="FOLDER", help="where the benchmark leaves its figures and traces (default: nowhere)")
    add("paths", nargs="*", type=Path, help="only these files of tests (default: all, then the benchmark)")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.epilog = "What follows the benchmark's name is for it: `bench step --help` tells."
    add("--ranks", type=_at_least_one, default=BENCH_LAUNCH[0], metavar="N", help="how many ranks (default: 2)")
    add("--mpi", choices=mpi_runtimes.NAMES, default=BENCH_LAUNCH[1], help="which MPI (default: mpich)")
    add("benchmark", choices=sorted({**UNDER_MPIEXEC, **ALONE}), help="which; it begins after this verb's own options")
    add("words", nargs=argparse.REMAINDER, metavar="...", help="its options")


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mpi", nargs="+", choices=mpi_runtimes.NAMES, help="default: all that can be had")
    add("--sizes", nargs="+", type=_at_least_one, metavar="N", help="default: 1 2 3 4 on MPICH, some of these on the others")
    _add_full(parser)
    add("-k", dest="expression", metavar="EXPR", help="only tests that match, as in pytest")
    add("paths", nargs="*", type=Path, help="default: integration_tests")


if __name__ == "__main__":
    sys.exit(main())
