"""Real ranks. If these tests are skipped, the reason says how to run them."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from syncline.collectives.startup.launch import detect_launch
from test_support.fixtures import preloaded, preloaded_python, pytest_collection_finish, python
from test_support.jobs import LIMIT_S, Finished, finished, mpiexec_of_tests, ranks_logs, skip_without_mpiexec
from test_support.preloaded import OPTIMIZERS

PLUGIN = "syncline.collectives.testing.pytest_plugin"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests without the plugin, because then the ranks would not agree on verdicts.

    Every test here is marked `mpi` or `launch`, because `dev.py ranks` selects tests by these marks.
    """
    for item in items:
        if item.get_closest_marker("mpi") is None and item.get_closest_marker("launch") is None:
            raise pytest.UsageError(f"{item.nodeid} is marked neither mpi nor launch, so dev.py would never run it")
    if config.pluginmanager.has_plugin(PLUGIN):
        return
    command = f"mpiexec -n N python -m pytest -m mpi -p {PLUGIN} -p no:cacheprovider integration_tests"
    for item in items:
        if item.get_closest_marker("mpi") is not None:
            item.add_marker(pytest.mark.skip(reason=f"run under mpirun: {command}"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks share the cores. With one thread, the sums of a local run and of the ranks' parts differ only by rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


RunJob = Callable[..., Finished]


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    """Many jobs train, so these modules are loaded once."""
    return OPTIMIZERS


@pytest.fixture
def run_job(tmp_path: Path, preloaded: list[str]) -> RunJob:
    """Run a script on N ranks, by an mpiexec of its own; skips if there is none.

    SYNCLINE_TEST_MPIEXEC is the command (with its options); by default the mpiexec next to this Python. A rank is a fork of a
    Python that has loaded torch, unless the test asks for a `plain` one.
    """
    if detect_launch(os.environ) is not None:
        pytest.skip("starts jobs itself: run it without mpirun")
    mpiexec = mpiexec_of_tests()
    skip_without_mpiexec(mpiexec)

    def run(
        ranks: int | None, script: str, *arguments: str, timeout_s: float = LIMIT_S, plain: bool = False, **variables: str
    ) -> Finished:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        words = arguments or [str(path)]
        environ = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **variables}
        if ranks is None:  # a program that starts the ranks itself
            return finished([sys.executable, *words], tmp_path, timeout_s, environ)
        python = [sys.executable] if plain else preloaded
        with ranks_logs(python) as (python, logs):
            return finished([*mpiexec, "-n", str(ranks), *python, *words], tmp_path, timeout_s, environ, logs)

    return run
