"""Checks before a release: versions, metadata and changelog agree, and each built package installs alone."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wheels
from commands import ROOT
from environment import LAYERS, WHOLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIRED = (
    "name",
    "version",
    "description",
    "readme",
    "requires-python",
    "license",
    "license-files",
    "authors",
    "keywords",
    "classifiers",
)

PACKAGES = (*LAYERS, WHOLE)

Projects = Mapping[str, Mapping[str, Any]]


def dry_run() -> int:
    """Check and build everything, publish nothing; returns the number of problems."""
    projects = {name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"] for name in PACKAGES}
    changelog, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    found = problems(projects, changelog, citation)
    with tempfile.TemporaryDirectory(prefix="syncline-release-") as folder:
        built = Path(folder) / "built"
        for package in PACKAGES:
            wheels.build(package, built, "--sdist", "--wheel")
        found += missing_files([path.name for path in built.iterdir()], _version(projects))
        found += [defect for package in PACKAGES for defect in wheels.defects_of(package, built)]
        alone = [package for package in PACKAGES if wheels.install_alone(package, built, Path(folder) / package) is None]
        found += [f"{wheels.distribution(package)} does not install and import alone: see above" for package in alone]
    for problem in found:
        print(f"release: {problem}")
    if not found:
        print(f"release: {_version(projects)} is ready; nothing was published")
    if is_unreleased(changelog, _version(projects)):
        print("release: the changelog still says 'unreleased' where the date belongs")
    return len(found)


def problems(projects: Projects, changelog: str, citation: str) -> list[str]:
    """The problems in the texts. A pure function.

    Args:
        projects: the table [project] of the pyproject.toml of each layer, and of the whole.
        changelog: the text of CHANGELOG.md.
        citation: the text of CITATION.cff.
    """
    found = [
        f"{wheels.distribution(package)}: pyproject.toml lacks {key}"
        for package, project in projects.items()
        for key in REQUIRED
        if not project.get(key)
    ]
    versions = {package: str(project.get("version")) for package, project in projects.items()}
    if len(set(versions.values())) > 1:
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        return [*found, f"expected one version in all packages, found {shown}"]
    version = _version(projects)
    if _heading(changelog, version) is None:
        found.append(f"CHANGELOG.md has no heading '## [{version}] - DATE'")
    if re.search(rf'^version: "?{re.escape(version)}"?$', citation, re.MULTILINE) is None:
        found.append(f"CITATION.cff has no line 'version: {version}'")
    return found


def missing_files(names: Sequence[str], version: str) -> list[str]:
    """The wheels and source distributions that were not built. A pure function."""
    ends = ("-py3-none-any.whl", ".tar.gz")
    expected = [wheels.file_start(package, version) + end for package in PACKAGES for end in ends]
    return [f"{name} was not built" for name in expected if name not in names]


def is_unreleased(changelog: str, version: str) -> bool:
    """Whether the version's heading has no date yet. A pure function."""
    return _heading(changelog, version) == "unreleased"


def _heading(changelog: str, version: str) -> str | None:
    """The text after the version in its heading: a date, or "unreleased"."""
    match = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d|unreleased)$", changelog, re.MULTILINE)
    return None if match is None else match[1]


def _version(projects: Projects) -> str:
    return str(next(iter(projects.values())).get("version"))
