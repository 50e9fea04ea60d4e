from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys

def expect_none_loaded(after):
    loaded = {"mpi4py", "cupy", "pytest", "zmq"} & set(sys.modules)
    assert not loaded, (after, loaded)

import torch.distributed as dist
before = list(dist.Backend.backend_list)
import syncline.collectives
expect_none_loaded("the layer")

from syncline.collectives.startup.registry import backend_names, load_backend
for name in backend_names():
    load_backend(name)
expect_none_loaded("all backends")

syncline.collectives.init_process_group()
syncline.collectives.destroy_process_group()
expect_none_loaded("a group of one")

from syncline.collectives.testing import run_conformance, run_ranks
assert run_ranks(2, lambda group: group.rank) == [0, 1]
expect_none_loaded("run_ranks, which is for people who use another test runner, too")

assert dist.Backend.backend_list == before, "torch.distributed knows our backends, though nobody asked for that"
import syncline.collectives.torch_backend
assert set(dist.Backend.backend_list) - set(before) == {"syncline", "syncline-mpi", "syncline-nccl"}
"""


def test_importing_starts_nothing() -> None:
    """Neither the layer nor its backends import mpi4py or CuPy before a group is connected, or register with torch."""
    env = {"PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], check=True, env=env)


def test_every_exported_name_exists() -> None:
    import syncline.collectives as package
    from syncline.collectives import testing

    for module in (package, testing):
        assert module.__all__ == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
