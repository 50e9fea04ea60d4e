"""Builds the wheels of the four layers, and tests each in an environment with only its requirements; also that of the whole.

Each layer has a clean environment. It sees torch and the test runner of `.venv`, and nothing else of it, through a path file
that points at a folder of links (`linked_packages.py`). pip then resolves the layer's own requirements from the wheels alone,
without an index. The layer's tests are collected there, from a copy outside of the source tree with a copy of `test_support`,
so none of them depends on another layer. Some of them run; the source tree runs all of them with the same code. `--full` runs
all.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from commands import ROOT, check, run
from environment import ARROWS, LAYERS, PYTHON, WHOLE

TEST_SUPPORT = ROOT / "tools" / "test_support"
# What every layer may assume, and the test runner; without mpi4py and our layers. No layer requires NumPy, but torch warns if
# it is missing, and in tests a warning is an error. The tests of the TCP store need pyzmq, which is optional; another test
# shows that the layer works without it.
ASSUMED = ("torch", "numpy", "pytest", "pytest-timeout", "hypothesis", "expecttest", "pyzmq")
SOME_TESTS = {
    "collectives": ("test_threads.py", "test_registry.py", "test_settings.py"),
    "reducer": ("test_bucket.py", "test_verification.py", "test_static_graph.py"),
    "hooks": ("test_hooks.py", "test_cast.py", "test_low_rank.py"),
    "ddp": ("test_distributed_data_parallel.py", "test_torch_internals.py"),
}


def build_and_test(*, all_tests: bool) -> int:
    """Build, inspect, install alone, import alone, test alone; returns the number of layers that failed."""
    with tempfile.TemporaryDirectory(prefix="syncline-wheels-") as folder:
        wheels = Path(folder) / "wheels"
        for package in (*LAYERS, WHOLE):
            build(package, wheels, "--wheel")
        failed = [layer for layer in LAYERS if not _passes(layer, wheels, Path(folder) / layer, all_tests=all_tests)]
        if _alone(WHOLE, wheels, Path(folder) / WHOLE) is None:
            failed.append(WHOLE)
    if failed:
        print(f"wheels: failed for {', '.join(failed)}")
    return len(failed)


BESIDE = {"ddp": ("horovod",)}
"""What a layer's wheel has beside the module of its name."""


def defects(layer: str, files: list[str]) -> list[str]:
    """The problems of a wheel with these `files`."""
    found = []
    if f"syncline/{layer}/py.typed" not in files:
        found.append(f"expected syncline/{layer}/py.typed, which tells type checkers to look")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in files):
        found.append("expected the licence text, LICENSE, in its metadata")
    if "syncline/__init__.py" in files:
        found.append("syncline/__init__.py hides the sibling layers: remove it")
    if f"syncline/{layer}/__init__.py" not in files:
        found.append(f"expected syncline/{layer}/__init__.py: the layer itself is missing")
    others = {name.split("/")[1] for name in files if name.startswith("syncline/")} - {layer, *BESIDE.get(layer, ())}
    found += [f"syncline/{other} belongs to another wheel" for other in sorted(others)]
    return found


def defects_of_whole(files: list[str], metadata: str) -> list[str]:
    """The problems of the wheel of all layers together, with these `files`, METADATA among them."""
    found = [f"{name} belongs to a layer's wheel" for name in files if ".dist-info/" not in name]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in files):
        found.append("expected the licence text, LICENSE, in its metadata")
    version = re.findall(r"^Version: (.*)$", metadata, re.MULTILINE)[0]
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    found += [f"expected the layer's version {version}, found {one}" for one in required if f"=={version}" not in one]
    found += [f"does not require {layer}" for layer in LAYERS if f"syncline-{layer}=={version}" not in required]
    return found


def distribution(package: str) -> str:
    """pip's name for the package in the folder packages/`package`."""
    return WHOLE if package == WHOLE else f"syncline-{package}"


def file_start(package: str, version: str) -> str:
    """How the file names of its wheel and its source distribution begin."""
    return f"{distribution(package).replace('-', '_')}-{version}"


def build(package: str, folder: Path, *kinds: str) -> None:
    """Build the given kinds, "--wheel" and "--sdist", into `folder`, in the form for an index."""
    where = ("--outdir", folder, ROOT / "packages" / package)
    check((PYTHON, "-m", "build", *kinds, "--no-isolation", *where), env={"SYNCLINE_RELEASE": "1"})


def defects_of(package: str, folder: Path) -> list[str]:
    """The problems of its wheel in `folder`."""
    (path,) = folder.glob(f"{file_start(package, '[0-9]*')}.whl")
    wheel = zipfile.ZipFile(path)
    files = wheel.namelist()
    if package == WHOLE:
        (metadata,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        found = defects_of_whole(files, wheel.read(metadata).decode())
    else:
        found = defects(package, files)
    return [f"{path.name}: {defect}" for defect in found]


def _passes(layer: str, wheels: Path, home: Path, *, all_tests: bool) -> bool:
    python = _alone(layer, wheels, home)
    return python is not None and _tests_pass(layer, python, home, all_tests=all_tests)


def _alone(package: str, wheels: Path, home: Path) -> Path | None:
    print(f"{distribution(package)}, alone:", flush=True)
    found = defects_of(package, wheels)
    for defect in found:
        print(f"  {defect}")
    return None if found else install_alone(package, wheels, home)


def install_alone(package: str, wheels: Path, home: Path) -> Path | None:
    """Install it from `wheels` and import it, in its own environment; returns its Python, or None after a failure."""
    python = _clean_environment(home / "venv")
    pip = (PYTHON, "-m", "pip", "--python", python, "install", "--quiet")
    status = run((*pip, "--no-index", "--find-links", wheels, distribution(package)), cwd=home)
    if status != 0:
        return None
    expected = LAYERS if package == WHOLE else [name for name in LAYERS if name in ARROWS[package] | {package}]
    script = ROOT / "tools" / "import_alone.py"
    alone: tuple[str | Path, ...] = (python, "-I", script, expected[-1], home / "venv", *expected)
    return python if run(alone, cwd=home) == 0 else None


def _tests_pass(layer: str, python: Path, home: Path, *, all_tests: bool) -> bool:
    tests = home / "tests"
    shutil.copytree(ROOT / "packages" / layer / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    # Tests that start processes take long, and show nothing new here. Assertions are plain: pytest's rewriting, for better
    # messages, takes as long as the rest of the collection. The source tree's tests explain the same failure.
    words = ("--quiet", "--assert=plain", "-m", "not mpi and not launch", "-p", "no:cacheprovider")
    support = home / "support"
    shutil.copytree(TEST_SUPPORT, support / TEST_SUPPORT.name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = ("--config-file", ROOT / "pyproject.toml", "--override-ini", f"pythonpath={support}")
    pytest = (python, "-m", "pytest", *words, *settings, "--rootdir", home)
    if all_tests:
        return run((*pytest, tests), cwd=home) == 0
    # All tests are collected, which imports their modules; an import error fails, whatever is chosen.
    return run((*pytest, "-k", " or ".join(SOME_TESTS[layer]), tests), cwd=home) == 0


def _clean_environment(venv: Path) -> Path:
    """An environment that sees torch and the test runner, and nothing else; returns its Python."""
    check((sys.executable, "-m", "venv", "--without-pip", venv))
    assumed = venv / "assumed"
    check((PYTHON, ROOT / "tools" / "linked_packages.py", assumed, *ASSUMED))
    major, minor = sys.version_info[:2]
    (venv / "lib" / f"python{major}.{minor}" / "site-packages" / "assumed.pth").write_text(f"{assumed}\n")
    return venv / "bin" / "python"
