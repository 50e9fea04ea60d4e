from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dev
import gpu
import rank_log
import wheels
from commands import Outcome
from environment import ROOT, InstallSet, half_installed
from mpi_runtimes import Family, MpiRuntime


def test_each_rank_is_read_back_in_order(tmp_path: Path) -> None:
    for rank in (10, 2):
        command = (sys.executable, rank_log.__file__, str(tmp_path), "-c", f"print({rank} + 1)")
        subprocess.run(command, env={"PMI_RANK": str(rank)}, check=True)
    assert list(rank_log.read(tmp_path).items()) == [(2, "3\n"), (10, "11\n")]


def test_a_distribution_without_installer_was_cut_short(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.0", "torn-2.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (packages / "whole-1.0.dist-info" / "INSTALLER").touch()
    assert half_installed(tmp_path) == ["torn-2.0"]


def test_the_stamp_follows_arguments_and_inputs(tmp_path: Path) -> None:
    listed = tmp_path / "requirements.txt"
    listed.write_text("a")
    before = InstallSet("x", ("-r", "f"), (listed,)).stamp
    assert InstallSet("x", ("-r", "f"), (listed,)).stamp == before
    assert InstallSet("x", ("-r", "g"), (listed,)).stamp != before
    listed.write_text("b")
    assert InstallSet("x", ("-r", "f"), (listed,)).stamp != before


@pytest.mark.parametrize("family", Family)
def test_only_open_mpi_is_told_about_too_few_cores(family: Family) -> None:
    runtime = MpiRuntime("any", family, Path("/opt/mpi/bin/mpiexec"), "/opt/mpi/lib/libmpi.so")
    command = runtime.command(3)
    assert (command[0], *command[-2:]) == ("/opt/mpi/bin/mpiexec", "-n", "3")
    assert ("--oversubscribe" in command) == (family is Family.OPEN_MPI)


GOOD_WHEEL = [
    "syncline/ddp/__init__.py",
    "syncline/ddp/py.typed",
    "syncline_ddp-0.1.0.dist-info/licenses/LICENSE",
]


def test_a_good_wheel_has_no_defect() -> None:
    assert wheels.defects("ddp", GOOD_WHEEL) == []


@pytest.mark.parametrize("missing", GOOD_WHEEL)
def test_a_wheel_lacks_nothing(missing: str) -> None:
    files = [name for name in GOOD_WHEEL if name != missing]
    assert len(wheels.defects("ddp", files)) == 1


@pytest.mark.parametrize("stray", ["syncline/__init__.py", "syncline/reducer/bucket.py"])
def test_a_wheel_holds_its_layer_only(stray: str) -> None:
    assert any(stray.split("/")[1] in defect for defect in wheels.defects("ddp", [*GOOD_WHEEL, stray]))


def test_the_torch_pin_is_said_alike_for_pip_and_uv() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert pins
    for pin in pins:
        assert f'"{pin}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_a_demo_of_no_ranks_is_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.main(["demo", "--ranks", ranks])
    assert f"--ranks: expected 1 or more, found {ranks}" in capsys.readouterr().err


def test_only_the_demo_passes_arguments_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.main(["lint", "--report", "x"])
    assert "unknown arguments: --report x" in capsys.readouterr().err


def test_backends_are_listed_as_a_distribution_lists_them() -> None:
    pyproject = '[project]\nname = "x"\n\n[project.entry-points."syncline.backends"]\na = "b:c"\nd = "e:f"\n\n# more\n[tool]\n'
    assert gpu.entry_points(pyproject) == "[syncline.backends]\na = b:c\nd = e:f\n"
    assert "nccl = syncline.collectives.backends.nccl:backend\n" in gpu.entry_points(
        (ROOT / "packages" / "collectives" / "pyproject.toml").read_text()
    )


def test_the_files_with_gpu_tests_are_found() -> None:
    assert {path.name for path in gpu.test_files()} >= {"test_gpu.py"}
    assert "test_collectives_mpi.py" not in {path.name for path in gpu.test_files()}
    assert "test_datatypes.py" not in {path.name for path in gpu.test_files()}


@pytest.mark.parametrize("missing", ["torch sees no CUDA device", "this torch is built without CUDA"])
def test_without_a_gpu_the_reason_is_said(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda python, env: {"missing": [missing]})
    assert gpu.run_all(Path(sys.executable)) == 0
    assert capsys.readouterr().out == f"gpu: skipped, {missing}\n"


@pytest.mark.parametrize(("status", "failed"), [(0, 0), (1, 4)])
def test_the_summary_of_a_gpu(
    status: int, failed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"missing": ["nothing"], "pytest": ["8.4"], "torch": ["2.11"], "cuda": ["13.0"], "gpu": ["A", "A"]}
    monkeypatch.setattr(gpu, "probe", lambda python, env: found)
    monkeypatch.setattr(gpu, "capture", lambda command, **options: Outcome(status, "what it said"))
    assert gpu.run_all(Path(sys.executable)) == failed
    said = capsys.readouterr().out
    assert said.count("what it said") == 4
    for words in (
        "=== summary ===",
        "gpu       A, A",
        "cupy      none",
        "integration_tests/test_gpu.py ",
        "nccl/test_gpu.py ",
        "benchmark ",
    ):
        assert words in said
    assert said.count("FAILED") == failed
