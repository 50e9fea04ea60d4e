"""The files for sites agree with the packages. Only a site can show whether they work there (EasyBuild, Lmod and others)."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT
from syncline.collectives.cli.doctor.finding import Finding, Status, summary
from syncline.collectives.startup.settings import parse_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGING = ROOT / "packaging"
CHECKS = PACKAGING / "reframe" / "syncline_checks.py"


def project(package: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


VERSION = project("syncline")["version"]


def floors() -> dict[str, str]:
    """The oldest version of each library that the packages allow, which a file for sites must ask for."""
    extras = project("collectives")["optional-dependencies"]["mpi"] + project("ddp")["optional-dependencies"]["report"]
    requirements = [*project("collectives")["dependencies"], *extras]
    found = (re.match(r"([\w-]+)>=([\d.]+)", requirement) for requirement in requirements)
    return {match[1].replace("-", "_"): match[2] for match in found if match}


@pytest.mark.parametrize("path", sorted(PACKAGING.glob("easybuild/*.eb")), ids=lambda path: path.name)
def test_an_easyconfig_builds_this_version_of_all_layers(path: Path) -> None:
    text = path.read_text()
    assert path.name.startswith(f"Syncline-{VERSION}")
    assert f"version = '{VERSION}'" in text
    layers = re.findall(r"\('syncline_(\w+)', version, \{'modulename': 'syncline\.(\w+)'\}\)", text)
    assert layers == [(layer, layer) for layer in ("collectives", "reducer", "hooks", "ddp")]  # each after its requirements
    newest = re.search(r"'PyTorch(?:', '|/)([\d.]+)'", text)
    assert newest is not None
    assert [int(part) for part in newest[1].split(".")] >= [int(part) for part in floors()["torch"].split(".")]


@pytest.mark.parametrize("place", [f"lmod/syncline/{VERSION}.lua", "reframe/settings.py", "conda/recipe.yaml"])
def test_the_version_is_that_of_the_packages(place: str) -> None:
    assert set(re.findall(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])", (PACKAGING / place).read_text())) - {"2.13.0"} == {VERSION}


@pytest.mark.parametrize(("place", "entry"), [("conda/recipe.yaml", "- {} >={}"), ("spack/package.py", "py-{}@{}:")])
def test_each_required_library_is_asked_for_in_the_same_version(place: str, entry: str) -> None:
    text = (PACKAGING / place).read_text().replace("pytorch", "torch").replace("_", "-")
    for library, version in floors().items():
        wanted = entry.format(library.replace("_", "-"), version)
        assert re.search(rf"{re.escape(wanted.rstrip(':'))}[:,\s]", text), f"{place} has no {wanted}"


def test_the_site_file_is_read_and_changes_little() -> None:
    settings = parse_settings((PACKAGING / "site.toml").read_text(), "site.toml")
    assert (settings.backend, settings.timeout_s, settings.stall_warning_s) == (None, 1800, 30)


def test_both_container_files_run_what_the_recipe_says() -> None:
    recipe = (PACKAGING / "container" / "recipe.py").read_text()
    extras = re.search(r'"extras", "([\w,]+)"', recipe)
    assert extras is not None
    for name in ("Dockerfile", "syncline.def"):
        text = (PACKAGING / "container" / name).read_text()
        assert f"'/opt/syncline-source/packages/syncline[{extras[1]}]'" in text
        assert re.search(r"LD_LIBRARY_PATH=/host/mpi/lib:/host/lib", text)


def test_the_check_of_the_doctor_knows_its_last_line() -> None:
    texts = [node.value for node in ast.walk(ast.parse(CHECKS.read_text())) if isinstance(node, ast.Constant)]
    (pattern,) = [text for text in texts if isinstance(text, str) and text.startswith("^(everything is fine")]
    assert re.search(pattern, summary([Finding("a thing", Status.OK, "found")]))
    assert re.search(pattern, summary([Finding("a thing", Status.WARN, "found", "do this")]))
    assert not re.search(pattern, summary([Finding("a thing", Status.WRONG, "found", "do this")]))
