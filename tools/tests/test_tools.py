from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import dev
import environment
import gpu
import wheels
from commands import Outcome, ToolError, follow
from environment import PINNED_TORCH, ROOT, InstallSet, half_installed
from mpi_runtimes import Family, MpiRuntime
from side_by_side import Ended, Job
from test_support import rank_log


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


GOOD_WHOLE = ["syncline-0.1.0.dist-info/METADATA", "syncline-0.1.0.dist-info/licenses/LICENSE"]
METADATA = "Name: syncline\nVersion: 0.1.0\n" + "".join(
    f"Requires-Dist: syncline-{layer}==0.1.0\n" for layer in ("collectives", "reducer", "hooks", "ddp")
)


def test_the_wheel_of_all_layers_requires_each_at_its_own_version() -> None:
    assert wheels.defects_of_whole(GOOD_WHOLE, METADATA) == []
    older = METADATA.replace("hooks==0.1.0", "hooks==0.1")
    assert any("syncline-hooks" in defect for defect in wheels.defects_of_whole(GOOD_WHOLE, older))
    folder = f"{METADATA}Requires-Dist: syncline-ddp[report] @ file:///home/someone; extra == 'report'\n"
    assert any("file:///home/someone" in defect for defect in wheels.defects_of_whole(GOOD_WHOLE, folder))


@pytest.mark.parametrize(("files", "word"), [(GOOD_WHOLE[:1], "LICENSE"), ([*GOOD_WHOLE, "syncline/__init__.py"], "__init__")])
def test_the_wheel_of_all_layers_holds_metadata_only(files: list[str], word: str) -> None:
    (defect,) = wheels.defects_of_whole(files, METADATA)
    assert word in defect


def test_in_a_checkout_the_layers_are_folders_and_in_a_release_versions(tmp_path: Path) -> None:
    build = runpy.run_path(str(ROOT / "packages" / "syncline" / "hatch_build.py"))
    requirement = build["requirement"]
    packages = ROOT / "packages"
    assert requirement("ddp", "0.1.0", packages, "[report]") == f"syncline-ddp[report] @ {(packages / 'ddp').as_uri()}"
    assert requirement("ddp", "0.1.0", tmp_path) == "syncline-ddp==0.1.0"
    assert requirement("ddp", "0.1.0", None) == "syncline-ddp==0.1.0"


def test_each_extra_of_the_whole_is_one_of_its_layer() -> None:
    build = runpy.run_path(str(ROOT / "packages" / "syncline" / "hatch_build.py"))
    assert sorted(build["LAYERS"]) == sorted(environment.LAYERS)
    for extra, layer in build["EXTRAS"].items():
        text = (ROOT / "packages" / layer / "pyproject.toml").read_text()
        assert f"\n{extra} = [" in text.partition("[project.optional-dependencies]")[2], extra


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


def test_another_torch_has_an_environment_of_its_own() -> None:
    ask = "import environment as e; print(e.VENV.name, e.PYTHON.parent.parent.name, e._constraints().strip())"
    environ = {**os.environ, "SYNCLINE_DEV_TORCH": "2.15.0"}
    found = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT / "tools", env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [".venv-torch-2.15.0", ".venv-torch-2.15.0", "torch==2.15.0"]


def test_tests_with_another_torch_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    def execve(_: str, words: list[str], environ: dict[str, str]) -> None:
        assert words[2:] == ["test", "--torch", "2.15.0"]
        assert environ["SYNCLINE_DEV_TORCH"] == "2.15.0"
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced):
        dev.main(["test", "--torch", "2.15.0"])


@pytest.mark.parametrize("version", ["newest", "2", "2.15.0; rm"])
def test_a_torch_that_is_no_version_is_refused(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.main(["test", "--torch", version])
    assert "expected a version such as 2.15.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "answer", "newest"),
    [(0, '{"install": [{"metadata": {"name": "torch", "version": "9.1.0+cpu"}}]}', "9.1.0"), (1, "", None)],
)
def test_pip_says_which_torch_is_the_newest(
    status: int, answer: str, newest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answered(command: Sequence[str | Path], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, status, answer, "no network")

    monkeypatch.setattr(environment.subprocess, "run", answered)
    assert environment.newest_torch() == newest
    assert re.fullmatch(r"torch>=[\d.]+,<3", str(asked[0][-1])), "what the wheels accept"


@pytest.mark.parametrize(
    ("newest", "statuses", "steps", "status", "said"),
    [
        (None, [], [], 0, "skipped, pip finds no torch"),
        (PINNED_TORCH, [], [], 0, f"skipped, all tests run with torch {PINNED_TORCH}"),
        ("9.1.0", [1], ["install"], 0, "skipped, torch 9.1.0 could not be installed"),
        ("9.1.0", [0, 0], ["install", "inner"], 0, ""),
        ("9.1.0", [0, 2], ["install", "inner"], 2, ""),
    ],
)
def test_the_newest_torch_is_tried_where_it_can_be_had(
    newest: str | None,
    statuses: list[int],
    steps: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = []

    def followed(command: Sequence[str | Path], *, timeout_s: float, **_: object) -> Outcome:
        assert list(command[-2:]) == ["--torch", newest]
        assert timeout_s == dev.NEWEST_LIMITS_S[len(ran)]
        ran.append(command[2])
        return Outcome(statuses[len(ran) - 1], "")

    monkeypatch.setattr(dev, "newest_torch", lambda: newest)
    monkeypatch.setattr(dev, "follow", followed)
    assert dev.main(["newest-torch", "--skip-install"]) == status
    assert ran == steps
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("words", "limit_s"), [((), Job.timeout_s), (("--full",), dev.FULL_LIMIT_S)])
def test_a_full_run_gives_its_parts_more_time(words: tuple[str, ...], limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TEST_FULL", "0")  # so that the test's end restores it
    limits_s: dict[str, float] = {}

    def run_side_by_side(jobs: Sequence[Job], width: int) -> list[Ended]:
        limits_s.update({job.name: job.timeout_s for job in jobs})
        return []

    monkeypatch.setattr(dev, "run_side_by_side", run_side_by_side)
    dev.main(["test", "--skip-install", *words])
    assert {"ranks", "wheels"} <= limits_s.keys()
    assert limits_s["unit collectives"] == limits_s["launch others"] == min(limits_s.values()) == limit_s


def test_only_the_demo_passes_arguments_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dev.main(["lint", "--report", "x"])
    assert "unknown arguments: --report x" in capsys.readouterr().err


def test_backends_are_listed_as_a_distribution_lists_them() -> None:
    pyproject = '[project]\nname = "x"\n\n[project.entry-points."syncline.backends"]\na = "b:c"\nd = "e:f"\n\n# more\n[tool]\n'
    assert gpu.entry_points(pyproject) == "[syncline.backends]\na = b:c\nd = e:f\n"
    assert "nccl = syncline.collectives.transports.nccl:backend\n" in gpu.entry_points(
        (ROOT / "packages" / "collectives" / "pyproject.toml").read_text()
    )


def test_every_file_with_gpu_tests_is_in_a_part() -> None:
    files = gpu.test_files()
    assert {str(path.relative_to(ROOT)) for path in files} == {part.path for part in gpu.PARTS if part.path is not None}
    assert {path.name for path in files if gpu.needs_mpi(path)} == {"test_collectives_mpi.py"}


@pytest.mark.parametrize("missing", ["torch sees no CUDA device", "this torch is built without CUDA"])
def test_without_a_gpu_the_reason_is_said(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda python, env: {"missing": [missing]})
    assert gpu.run_all(Path(sys.executable)) == 0
    assert capsys.readouterr().out == f"gpu: skipped, {missing}\n"


GPU_MACHINE = {
    "missing": ["nothing"],
    "pytest": ["8.4"],
    "mpi4py": ["4.1"],
    "torch": ["2.11"],
    "cuda": ["13.0"],
    "gpu": ["A", "A"],
    "skipped": ["native DDP over our groups: it needs torch 2.13"],
}
PYTEST_SAYS = "collected 5 items / 2 deselected / 3 selected\na.py::test_a PASSED [ 33%]\na.py::test_b {} [ 66%]\n"


class GpuMachine:
    """Stands in for a machine with GPUs: each run is written down, and ends with a status, or hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 0, **found: list[str]) -> None:
        self.commands: list[list[str]] = []
        self.status = status
        self.hangs_in = ""
        monkeypatch.setattr(gpu, "probe", lambda python, env: {**GPU_MACHINE, **found})
        monkeypatch.setattr(gpu, "follow", self.follow)
        monkeypatch.setattr(gpu.shutil, "which", lambda name, path: "/site/mpiexec")

    def follow(self, command: list[str], *, log: Path, timeout_s: float, **_: object) -> Outcome:
        self.commands.append([str(word) for word in command])
        log.write_text("x" * 5000 + PYTEST_SAYS.format("PASSED" if self.status == 0 else "FAILED"))
        return Outcome(124, "", timed_out=True) if log.stem == self.hangs_in else Outcome(self.status, "")


@pytest.mark.parametrize("mpi4py", ["4.1", "absent: no module"])
@pytest.mark.parametrize("status", [0, 1])
def test_the_summary_of_a_gpu(
    mpi4py: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = GpuMachine(monkeypatch, status, mpi4py=[mpi4py])
    has_mpi = not mpi4py.startswith("absent")
    failed = (len(gpu.PARTS) - (not has_mpi)) * status
    assert gpu.run_all(Path(sys.executable), log=tmp_path) == failed
    said = capsys.readouterr().out
    assert len(said) < 12_000
    assert said.startswith("skipped: native DDP over our groups: it needs torch 2.13\n")
    summary = said.partition("=== summary ===\n")[2]
    for words in ("gpu       A, A", "cupy      none", *(part.name for part in gpu.PARTS)):
        assert words in summary
    assert summary.count("FAILED") == failed
    assert summary.count("1 passed, 1 failed, 1 not run" if status else "2 passed, 1 not run") == 5 + has_mpi
    assert [command[:3] for command in machine.commands if command[0] == "/site/mpiexec"] == (
        [["/site/mpiexec", "-n", "2"]] if has_mpi else []
    )
    assert ("skipped: it needs mpi4py and mpiexec" in summary) is not has_mpi
    assert (tmp_path / "nccl-one-rank.log").exists()


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("===== 12 passed in 45.50s =====", "12 passed"),
        ("= 1 failed, 3 passed, 108 deselected, 2 warnings in 71.50s (0:01:11) =", "1 failed, 3 passed"),
    ],
)
def test_the_counts_of_pytests_last_line(last: str, expected: str) -> None:
    assert gpu.counts(f"[gw1] [100%] PASSED a.py::test_a\n{last}\n") == expected


def test_some_parts_of_what_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = GpuMachine(monkeypatch)
    names, results = ["training-one-rank", "benchmark-all-gpus"], tmp_path / "new"
    assert gpu.run_all(Path(sys.executable), names, results, log=tmp_path) == 0
    tests, benchmark = machine.commands
    assert tests[-3:] == ["-k", "one_rank", str(ROOT / "integration_tests" / "test_gpu.py")]
    assert benchmark[-6:] == ["--ranks", "2", "--json", f"{results}/nccl-2.json", "--trace", f"{results}/nccl-2-trace.json"]
    with pytest.raises(ToolError, match="unknown part 'training'; the parts are nccl-one-rank, "):
        gpu.run_all(Path(sys.executable), ["training"])


def test_what_comes_too_late_for_a_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = GpuMachine(monkeypatch)
    machine.hangs_in = "staged"
    assert gpu.run_all(Path(sys.executable), ["staged", "mpi"], log=tmp_path) == 1
    assert "hung, 2 passed, 1 not run" in capsys.readouterr().out
    assert gpu.run_all(Path(sys.executable), log=tmp_path, limit_s=0.0) == 0
    assert capsys.readouterr().out.count("not run: the time was over") == 2 * len(gpu.PARTS)


def test_what_is_followed_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (sys.executable, "-c", "print('said'); raise SystemExit(3)")
    assert follow(words, timeout_s=60, cwd=tmp_path, env={}).status == 3
    assert "said\n" in capfd.readouterr().out


def test_what_is_followed_is_ended_in_time(tmp_path: Path) -> None:
    outcome = follow((sys.executable, "-c", "import time; time.sleep(600)"), timeout_s=1.0, cwd=tmp_path, env={})
    assert (outcome.status, outcome.timed_out) == (124, True)
