"""Fixtures and hooks that several folders of tests share; a `conftest.py` imports those that it offers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from .full_run import FULL
from .preloaded import PreloadedPython


def pytest_collection_finish() -> None:
    """What is loaded by now stays. Whoever collects garbage in a test, as the reducer does, need not search all of torch."""
    gc.collect()
    gc.freeze()
    # torch 2.10, built for CUDA on a machine without a GPU, gives its compiler a device that belongs to the calling thread, and
    # crashes when that thread has ended. With that device, too, no fork could run a backward.
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet = lambda: None


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    """What a preloaded Python has loaded beside torch; a folder of tests may say otherwise."""
    return ()


@pytest.fixture(scope="session")
def preloaded_python(
    tmp_path_factory: pytest.TempPathFactory, preloaded_modules: Sequence[str]
) -> Iterator[PreloadedPython | None]:
    """A Python that has loaded torch; None in a full run, and where it cannot be had."""
    if FULL or not hasattr(os, "pidfd_open"):
        yield None
        return
    with PreloadedPython(tmp_path_factory.mktemp("preloaded"), preloaded_modules) as server:
        yield server


@pytest.fixture(scope="session")
def preloaded(preloaded_python: PreloadedPython | None) -> list[str]:
    """The command that stands for Python in a job under MPICH."""
    return [sys.executable] if preloaded_python is None else preloaded_python.command


@pytest.fixture(scope="session")
def python(preloaded_python: PreloadedPython | None) -> list[str]:
    """The command that stands for Python in a program of one process, which no launcher starts."""
    return [sys.executable] if preloaded_python is None else preloaded_python.alone
