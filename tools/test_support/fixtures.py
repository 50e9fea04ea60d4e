"""Fixtures and hooks for several folders of tests; a `conftest.py` imports the ones that it offers."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from .full_run import FULL
from .preloaded import PreloadedPython


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare this process, and the processes that tests start."""
    # From torch 2.13 on, the first `assert_close` of a process loads torch.distributed.tensor. This takes 5 seconds of a core,
    # and on a busy machine more than a minute. A rank has only a minute for its whole test, so load it before the tests.
    if any(item.get_closest_marker(mark) for item in session.items for mark in ("ranks", "mpi")):
        torch.testing.assert_close(0, 0)
    # Freeze all loaded objects. Then a collection of garbage in a test, as by the reducer, need not search all of torch.
    gc.collect()
    gc.freeze()
    # Many tests make a rank fail. The failure must not leave a folder with reports beside the tests.
    os.environ.setdefault("SYNCLINE_REPORT_DIR", "")
    # torch 2.10, built for CUDA, on a machine without a GPU: its compiler gets a device that belongs to the calling thread, and
    # crashes when this thread has ended. A fork with this device could not run a backward.
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    """The modules that a preloaded Python has loaded besides torch; a folder of tests may override it."""
    return ()


@pytest.fixture(scope="session")
def preloaded_python(
    tmp_path_factory: pytest.TempPathFactory, preloaded_modules: Sequence[str]
) -> Iterator[PreloadedPython | None]:
    """A Python that has loaded torch; None in a full run, and if it cannot be started."""
    with python_that_has_loaded(preloaded_modules, tmp_path_factory) as server:
        yield server


@contextmanager
def python_that_has_loaded(
    modules: Iterable[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PreloadedPython | None]:
    """A Python that has loaded torch and these modules; None in a full run, and if it cannot be started."""
    if FULL or not hasattr(os, "pidfd_open"):
        yield None
        return
    with PreloadedPython(tmp_path_factory.mktemp("preloaded"), tuple(modules)) as server:
        yield server


def is_installed(module: str) -> bool:
    """Whether the package of a module is installed."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


@pytest.fixture(scope="session")
def preloaded(preloaded_python: PreloadedPython | None) -> list[str]:
    """The command in place of Python in a job under MPICH."""
    return [sys.executable] if preloaded_python is None else preloaded_python.command


@pytest.fixture(scope="session")
def python(preloaded_python: PreloadedPython | None) -> list[str]:
    """The command in place of Python in a program of one process, without a launcher."""
    return [sys.executable] if preloaded_python is None else preloaded_python.alone
