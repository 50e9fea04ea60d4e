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
import rank_log
import wheels
from commands import Outcome, follow
from environment import PINNED_TORCH, ROOT, InstallSet, half_installed
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
    assert {path.name for path in gpu.test_files() if gpu.needs_mpi(path)} == {"test_collectives_mpi.py"}
    assert "test_datatypes.py" not in {path.name for path in gpu.test_files()}


@pytest.mark.parametrize("missing", ["torch sees no CUDA device", "this torch is built without CUDA"])
def test_without_a_gpu_the_reason_is_said(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "probe", lambda python, env: {"missing": [missing]})
    assert gpu.run_all(Path(sys.executable)) == 0
    assert capsys.readouterr().out == f"gpu: skipped, {missing}\n"


GPU_MACHINE = {"missing": ["nothing"], "pytest": ["8.4"], "torch": ["2.11"], "cuda": ["13.0"], "gpu": ["A", "A"]}


@pytest.mark.parametrize(
    ("mpi4py", "status", "failed"), [("4.1", 0, 0), ("4.1", 1, 6), ("absent: no module", 0, 0), ("absent: no module", 1, 5)]
)
def test_the_summary_of_a_gpu(
    mpi4py: str, status: int, failed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def follow(command: list[str], **options: object) -> Outcome:
        commands.append([str(word) for word in command])
        return Outcome(status, "")

    monkeypatch.setattr(gpu, "probe", lambda python, env: {**GPU_MACHINE, "mpi4py": [mpi4py]})
    monkeypatch.setattr(gpu, "follow", follow)
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path: "/site/mpiexec")
    assert gpu.run_all(Path(sys.executable)) == failed
    said = capsys.readouterr().out
    for words in (
        "=== summary ===",
        "gpu       A, A",
        "cupy      none",
        "integration_tests/test_gpu.py ",
        "nccl/test_gpu.py ",
        "benchmark, 1 rank(s) ",
        "benchmark, 2 rank(s) ",
    ):
        assert words in said
    assert said.count("FAILED") == failed
    assert [command[:3] for command in commands if command[0] == "/site/mpiexec"] == (
        [] if mpi4py.startswith("absent") else [["/site/mpiexec", "-n", "2"]]
    )
    assert ("skipped: it needs mpi4py and mpiexec" in said) is mpi4py.startswith("absent")


def test_some_files_of_gpu_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu, "probe", lambda python, env: {**GPU_MACHINE, "mpi4py": ["4.1"]})
    monkeypatch.setattr(gpu, "follow", lambda command, **_: commands.append([*map(str, command)]) or Outcome(0, ""))
    monkeypatch.setattr(gpu, "test_files", lambda: pytest.fail("only these"))
    chosen = ROOT / "integration_tests" / "test_gpu.py"
    assert gpu.run_all(Path(sys.executable), [chosen]) == 0
    assert [command[-1] for command in commands] == [str(chosen)]
    assert gpu._benchmark(Path("python"), 1, tmp_path / "new", {}).verdict == "passed"
    assert [word for word in commands[-1] if "new" in word] == [
        str(tmp_path / "new" / "nccl-1.json"),
        str(tmp_path / "new" / "nccl-1-trace.json"),
    ]


def test_what_is_followed_is_ended_in_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (sys.executable, "-c", "import time; print('said', flush=True); time.sleep(60)")
    outcome = follow(words, timeout_s=1.0, cwd=tmp_path, env={})
    assert (outcome.status, outcome.timed_out) == (124, True)
    assert "said" in capfd.readouterr().out
    assert follow((sys.executable, "-c", "raise SystemExit(3)"), timeout_s=30, cwd=tmp_path, env={}).status == 3
