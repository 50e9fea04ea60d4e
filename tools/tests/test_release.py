"""The problems that `dev.py release --dry-run` finds in texts; its builds are tested by running it."""

from __future__ import annotations

from typing import Any

import pytest

from release import PACKAGES, REQUIRED, is_unreleased, missing_files, problems

CHANGELOG = "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n- ddp: faster.\n\n## [0.1.0] - 2026-11-01\n"
CITATION = "cff-version: 1.2.0\nversion: 0.2.0\n"


def projects(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    whole = {**dict.fromkeys(REQUIRED, "given"), "version": "0.2.0"}
    return {layer: {**whole, **changes.get(layer, {})} for layer in PACKAGES}


def test_nothing_is_wrong_with_what_agrees() -> None:
    assert problems(projects(), CHANGELOG, CITATION) == []


def test_versions_that_differ_are_listed() -> None:
    (found,) = problems(projects(hooks={"version": "0.1.0"}), CHANGELOG, CITATION)
    assert "hooks 0.1.0" in found
    assert "ddp 0.2.0" in found


@pytest.mark.parametrize("key", REQUIRED)
def test_each_missing_key_is_named_with_its_layer(key: str) -> None:
    found = problems(projects(reducer={key: None}), CHANGELOG, CITATION)
    assert f"syncline-reducer: pyproject.toml lacks {key}" in found


@pytest.mark.parametrize("changelog", ["", "## [0.20] - 2026-12-01\n", "## [0.2.0]\n", "mentions ## [0.2.0] - 2026-12-01\n"])
def test_the_changelog_needs_a_heading_with_a_date(changelog: str) -> None:
    assert problems(projects(), changelog, CITATION) == ["CHANGELOG.md has no heading '## [0.2.0] - DATE'"]


def test_a_heading_may_be_unreleased_and_that_is_told() -> None:
    changelog = CHANGELOG.replace("2026-12-01", "unreleased")
    assert problems(projects(), changelog, CITATION) == []
    assert is_unreleased(changelog, "0.2.0")
    assert not is_unreleased(changelog, "0.1.0")


def test_the_citation_names_the_version() -> None:
    assert problems(projects(), CHANGELOG, "cff-version: 0.2.0\n") == ["CITATION.cff has no line 'version: 0.2.0'"]


def test_files_that_were_not_built_are_named() -> None:
    starts = [f"syncline{layer}-0.2.0" for layer in ("_collectives", "_reducer", "_hooks", "_ddp", "")]
    names = [start + end for start in starts for end in ("-py3-none-any.whl", ".tar.gz")]
    assert missing_files(names, "0.2.0") == []
    assert missing_files(names[1:], "0.2.0") == [f"{names[0]} was not built"]
