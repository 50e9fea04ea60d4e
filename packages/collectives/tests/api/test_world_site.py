"""What the site file and the new arguments do to `init_process_group`."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives import (
    InvalidArgumentError,
    LaunchError,
    ProcessGroup,
    SiteFileError,
    UnknownBackendError,
    destroy_process_group,
    init_process_group,
    is_initialized,
)
from syncline.collectives.api import default_group as world
from syncline.collectives.startup.backend import Backend, ConnectRequest
from syncline.collectives.transports.mpi import backend as mpi_backend
from syncline.collectives.transports.threads import create_groups

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK", "MASTER_ADDR", "SYNCLINE_BACKEND")


class Recorder(Backend):
    """Keeps what it is asked for and returns a group of one."""

    def __init__(self) -> None:
        self.requests: list[ConnectRequest] = []

    def missing(self) -> str | None:
        return None

    def connect(self, request: ConnectRequest) -> ProcessGroup:
        self.requests.append(request)
        return create_groups(1)[0]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def write(text: str) -> Path:
        path = tmp_path / "site.toml"
        path.write_text(text)
        monkeypatch.setenv("SYNCLINE_SITE", str(path))
        return path

    write("")
    yield write
    destroy_process_group()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    load = world.load_backend
    monkeypatch.setattr(world, "load_backend", lambda name: recorder if name == "recorder" else load(name))
    return recorder


def test_the_site_files_values_are_used(site, recorder: Recorder) -> None:
    site('backend = "recorder"\ntimeout_s = 77\nreproducible = true')
    init_process_group()
    assert [(request.timeout_s, request.reproducible) for request in recorder.requests] == [(77.0, True)]


def test_arguments_come_first(site, recorder: Recorder) -> None:
    site('backend = "gloo"\ntimeout_s = 77\nreproducible = true')
    init_process_group("recorder", timeout=5, reproducible=False)
    assert [(request.timeout_s, request.reproducible) for request in recorder.requests] == [(5.0, False)]


def test_defaults(site, recorder: Recorder) -> None:
    init_process_group("recorder")
    assert [(request.timeout_s, request.reproducible) for request in recorder.requests] == [(1800.0, False)]


def test_the_log_says_where_the_choice_came_from(site, caplog: pytest.LogCaptureFixture) -> None:
    path = site('backend = "in_process"')
    with caplog.at_level("INFO", logger="syncline.collectives"):
        init_process_group()
    where, choice = caplog.messages
    assert where.startswith("rank 0 of 1: host ")
    assert f"set by the site file {path}" in choice


def test_an_unknown_backend_of_the_site_file_names_the_file(site) -> None:
    path = site('backend = "smoke"')
    with pytest.raises(UnknownBackendError, match=f"unknown backend 'smoke'.*set by the site file {path}"):
        init_process_group()
    assert not is_initialized()


def test_a_typo_in_the_site_file(site) -> None:
    site('bakend = "mpi"')
    with pytest.raises(SiteFileError, match="did you mean 'backend'"):
        init_process_group("in_process")
    assert not is_initialized()


def test_init_methods(site) -> None:
    with pytest.raises(InvalidArgumentError, match="unknown init_method 'udp://x'"):
        init_process_group(init_method="udp://x")
    with pytest.raises(LaunchError, match="means backend 'mpi'"):
        init_process_group("gloo", init_method="mpi://")
    assert init_process_group("gloo", init_method=f"file://{site('')}.store", world_size=1, rank=0).backend_name == "gloo"


def test_mpi_refuses_a_meeting_place_that_it_would_ignore() -> None:
    request = ConnectRequest(None, None, None, "tcp://host:1", 1.0)
    if mpi_backend.missing() is not None:
        pytest.skip("there is no MPI")
    with pytest.raises(LaunchError, match=r"'tcp://host:1' says where the ranks meet.*leave init_method out"):
        mpi_backend.connect(request)


@pytest.mark.parametrize("backend", ["gloo", "in_process"])
def test_a_launcher_that_does_not_say_how_many(site, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("PMIX_NAMESPACE", "x")
    with pytest.raises(LaunchError, match=r"does not say how many|this job has 4 processes"):
        init_process_group(backend)
