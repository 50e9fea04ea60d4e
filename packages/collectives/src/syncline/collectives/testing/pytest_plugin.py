"""A pytest plugin for mpirun: every rank runs the same tests, and a test has the same outcome on all ranks.

::

    mpiexec -n 4 python -m pytest -m mpi -p syncline.collectives.testing.pytest_plugin -p no:cacheprovider FOLDER

1. A test that fails on one rank fails on all ranks. Only rank 0 prints (except in 2 and 3), with the error messages of all
   ranks that failed. All ranks end with the same exit status.
2. If the other ranks wait for the failed rank in a collective, the failed rank prints its failure after `mpi_patience_s`
   seconds, and ends the job.
3. If a test takes longer than `mpi_limit_s` seconds on a rank, this rank prints the stacks of its threads, and ends the job.
4. Outside mpirun, tests with the mark `mpi` are skipped.

Fixtures: `mpi_group` is a group over backend "mpi", which tests share. `world` is a new default group over backend "mpi" for
each test.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from ..api.default_group import destroy_process_group, init_process_group
from ..group import ProcessGroup
from ..startup.backend import ConnectRequest
from ..startup.launch import Launch, detect_launch
from ..startup.mpi_library import start_mpi
from ..startup.registry import load_backend
from .rank_plugin import RankPlugin

_RANK_PLUGIN = "syncline-ranks"
_START_S = 120.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two time limits to the settings of pytest's ini file. `-o mpi_limit_s=10` changes a limit for one run."""
    parser.addini("mpi_limit_s", "seconds that one test may take on any rank", default="60")
    parser.addini("mpi_patience_s", "seconds that a rank that failed waits for the others", default="10")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under mpirun, start MPI together with the other ranks, and register a `RankPlugin`."""
    config.addinivalue_line("markers", "mpi: needs mpirun; runs under N ranks")
    if _mpi_launch() is None:
        return
    lack = load_backend("mpi").missing()
    if lack is not None:
        raise pytest.UsageError(f"tests under mpirun: {lack}")
    start_mpi(_START_S)
    # `trylast`: pytest's terminal reporter exists now. On ranks above 0, `RankPlugin` replaces this reporter.
    plugin = RankPlugin(config, float(config.getini("mpi_limit_s")), float(config.getini("mpi_patience_s")))
    config.pluginmanager.register(plugin, _RANK_PLUGIN)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside an MPI job, skip the tests with the mark `mpi`."""
    if config.pluginmanager.has_plugin(_RANK_PLUGIN):
        return
    for item in items:
        if item.get_closest_marker("mpi") is not None:
            item.add_marker(pytest.mark.skip(reason="needs mpirun: mpiexec -n N python -m pytest -m mpi ..."))


@pytest.fixture
def mpi_group(request: pytest.FixtureRequest) -> ProcessGroup:
    """Return a group of all ranks over backend "mpi", which is not the default group.

    All tests of the session share the group. After a test has failed, the next test gets a new group. At the end of the session
    the group is closed. If closing the group fails, because a test has not waited for a call that failed, the session fails.
    """
    plugin = _rank_plugin(request)
    return plugin.group(lambda: _connect(plugin.collective_limit_s))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Generator[ProcessGroup, None, None]:
    """Return a new default group of all ranks over backend "mpi". The group is destroyed after the test."""
    yield init_process_group("mpi", timeout=_rank_plugin(request).collective_limit_s)
    destroy_process_group()


def _rank_plugin(request: pytest.FixtureRequest) -> RankPlugin:
    plugin = request.config.pluginmanager.get_plugin(_RANK_PLUGIN)
    if not isinstance(plugin, RankPlugin):
        pytest.fail(f"the fixture {request.fixturename} needs mpirun; mark the test with pytest.mark.mpi")
    return plugin


def _mpi_launch() -> Launch | None:
    launch = detect_launch(os.environ)
    return launch if launch is not None and launch.is_mpi else None


def _connect(timeout_s: float) -> ProcessGroup:
    request = ConnectRequest(_mpi_launch(), None, None, None, timeout_s, group_name="mpi_group")
    return load_backend("mpi").connect(request)
