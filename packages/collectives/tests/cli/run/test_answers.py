"""Which group of ours carries what a script has named, and the moment at which torch is changed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed import distributed_c10d

from syncline.collectives.cli.run.answers import BACKENDS, carrier_for, unknown_names

GLOO = {"cpu": "gloo", "cuda": "gloo"}
MIXED = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize(
    ("named", "backend", "carrier"),
    [
        (GLOO, "auto", "syncline-mpi"),
        ({"cpu": "mpi", "cuda": "mpi"}, "auto", "syncline-mpi"),
        ({"cuda": "nccl"}, "auto", None),
        (MIXED, "auto", None),
        (GLOO, "mpi", "syncline-mpi"),
        ({"cuda": "nccl"}, "mpi", "syncline"),
        (MIXED, "mpi", "syncline"),
        ({"cpu": "syncline"}, "mpi", None),
        ({"cpu": "fake"}, "auto", None),
        *((named, "keep", None) for named in (GLOO, MIXED, {"cuda": "nccl"})),
    ],
)
def test_carrier(named: dict[str, str], backend: str, carrier: str | None) -> None:
    assert backend in BACKENDS
    assert carrier_for(named, backend) == carrier


def test_what_is_changed_is_there_and_asked_for_before() -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    assert unknown_names(distributed_c10d, rendezvous) == []
    assert {"env", "tcp"} <= rendezvous._rendezvous_handlers.keys()
    assert unknown_names(SimpleNamespace(BackendConfig=1, _MPI_AVAILABLE=True), SimpleNamespace()) == [
        "_new_process_group_helper",
        "_get_default_timeout",
        "_rendezvous_handlers",
    ]


WHEN = """
import sys
from syncline.collectives.cli.run.answers import _WhenLoaded

done = []
sys.meta_path.insert(0, _WhenLoaded("colorsys", lambda: done.append(hasattr(sys.modules.get("colorsys"), "rgb_to_hsv"))))
import calendar
assert done == []
import colorsys
assert done == [True], done
assert type(colorsys.__loader__).__name__ == "SourceFileLoader" and "exec_module" not in vars(colorsys.__loader__)
del sys.modules["colorsys"]
import colorsys
assert done == [True], "once"
assert not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path)
assert "torch" not in sys.modules
"""


def test_torch_is_changed_when_it_has_been_loaded() -> None:
    subprocess.run([sys.executable, "-c", WHEN], check=True)
