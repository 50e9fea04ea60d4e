"""What `dev.py check` chooses."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

import changed

TESTS = {
    "packages/collectives/tests/test_work.py": "from syncline.collectives import Work",
    "packages/collectives/tests/stores/test_service.py": "from syncline.collectives.stores.tcp.service import Service",
    "packages/collectives/tests/stores/test_both.py": "import torch",
    "packages/reducer/tests/test_bucket.py": "from syncline.reducer.bucket import Bucket",
    "packages/reducer/tests/test_reducer.py": "from syncline.reducer import Reducer\nbucket = 1",
    "packages/hooks/tests/test_native_ddp.py": 'JOB = "native_ddp_job.py"',
    "packages/hooks/tests/test_cast.py": "",
    "integration_tests/test_slurm.py": "from test_support.slurm_cluster import SlurmCluster",
    "integration_tests/test_ddp_mpi.py": "",
    "integration_tests/test_examples.py": "",
    "tools/tests/test_tools.py": "import dev\nimport gpu",
    "tools/tests/test_docs.py": "",
}


def chosen(*paths: str) -> changed.Selection:
    return changed.select(map(PurePosixPath, paths), {PurePosixPath(path): text for path, text in TESTS.items()})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("packages/collectives/tests/test_work.py", ["packages/collectives/tests/test_work.py"]),
        ("packages/collectives/src/syncline/collectives/work.py", ["packages/collectives/tests/test_work.py"]),
        ("packages/collectives/src/syncline/collectives/x/service.py", ["packages/collectives/tests/stores/test_service.py"]),
        (
            "packages/collectives/src/syncline/collectives/stores/tcp/connection.py",  # the nearest package that is named
            ["packages/collectives/tests/stores/test_service.py"],
        ),
        (
            "packages/collectives/src/syncline/collectives/stores/messages.py",
            ["packages/collectives/tests/stores/test_both.py", "packages/collectives/tests/stores/test_service.py"],
        ),
        ("packages/reducer/src/syncline/reducer/bucket.py", ["packages/reducer/tests/test_bucket.py"]),
        (
            "packages/reducer/src/syncline/reducer/finalize.py",
            ["packages/reducer/tests/test_bucket.py", "packages/reducer/tests/test_reducer.py"],
        ),
        ("packages/hooks/tests/native_ddp_job.py", ["packages/hooks/tests/test_native_ddp.py"]),
        (
            "integration_tests/conftest.py",
            [
                "integration_tests/test_ddp_mpi.py",
                "integration_tests/test_examples.py",
                "integration_tests/test_slurm.py",
            ],
        ),
        ("examples/gan.py", ["integration_tests/test_examples.py"]),
        ("examples/slurm/mpirun.sbatch", ["integration_tests/test_examples.py"]),
        ("tools/gpu.py", ["tools/tests/test_tools.py"]),
        ("tools/test_support/slurm_cluster.py", ["integration_tests/test_slurm.py"]),
        ("docs/index.md", ["tools/tests/test_docs.py"]),
        ("packages/reducer/README.md", ["tools/tests/test_docs.py"]),
        ("pyproject.toml", []),
    ],
)
def test_each_kind_of_file_brings_its_tests(path: str, expected: list[str]) -> None:
    selection = chosen(path)
    assert [str(test) for test in sorted(selection.tests)] == expected
    assert selection.docs == (path.endswith(".md") or path.startswith("examples/"))
    assert [str(one) for one in selection.without] == ([] if expected else [path])


def test_what_runs_under_mpi_is_told_by_its_name() -> None:
    selection = chosen("integration_tests/conftest.py", "packages/reducer/tests/test_bucket.py")
    assert [path.name for path in selection.under_mpi] == ["test_ddp_mpi.py"]
    assert [path.name for path in selection.below("packages/reducer/tests")] == ["test_bucket.py"]


def test_the_rule_finds_the_files_of_this_repository() -> None:
    tests = changed.test_files()
    assert PurePosixPath("tools/tests/test_changed.py") in tests
    selection = changed.select([PurePosixPath("packages/reducer/src/syncline/reducer/readiness.py")], tests)
    assert PurePosixPath("packages/reducer/tests/test_readiness.py") in selection.tests
    assert {path.parts[1] for path in selection.tests} == {"reducer"}
