"""The reference pages name everything that exists: without network, without a build."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import FunctionType

import pytest
import torch
import torch.distributed as dist

import syncline.collectives
import syncline.ddp
import syncline.hooks
import syncline.reducer
from environment import LAYERS
from syncline.collectives.cli.doctor.diagnosis import RUN_WITH
from syncline.collectives.startup.settings import AlgorithmThresholds, Settings
from syncline.collectives.torch_bridge.registration import OLDEST_TORCH

ROOT = Path(__file__).resolve().parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


def test_every_environment_variable_is_documented() -> None:
    named = {name for source in SOURCES for name in re.findall(r"SYNCLINE_[A-Z]+(?:_[A-Z]+)*", source.read_text())}
    named |= {f"SYNCLINE_{field.name.upper()}" for field in fields(AlgorithmThresholds)}
    text = (REFERENCE / "settings.md").read_text()
    assert "SYNCLINE_BACKEND" in named
    assert sorted(name for name in named if f"`{name}`" not in text) == []


def test_every_key_of_the_site_file_is_documented_with_its_default() -> None:
    text = (REFERENCE / "settings.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| [\w ]+ \| ([\w.]+) \|", text, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(Settings) if field.metadata}
    shown = {
        key: "automatic" if value is None else f"{value:g}" if type(value) is float else str(value).lower()
        for key, value in defaults.items()
    }
    assert documented == shown


STARTING = ROOT / "docs" / "howto" / "when-it-does-not-start.md"
COLLECTIVES = ROOT / "packages" / "collectives" / "src" / "syncline" / "collectives"


def text_of(node: ast.AST) -> str | None:
    """A text of the sources in one line, with "…" for each inserted value; None if the node is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values).replace("\n", " ")
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("\n", " ")
    return None


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def texts_of(sources: Iterable[Path]) -> str:
    """The texts of the sources, one on each line."""
    nodes = (node for path in sources for node in nodes_of(path))
    return "\n".join(text for node in nodes if (text := text_of(node)) is not None)


def pattern(words: str) -> re.Pattern[str]:
    """A pattern that finds a page's words in a text of the sources; "…" stands for each inserted value."""
    return re.compile(".*".join(map(re.escape, words.strip("… ").split("…"))))


def headings() -> list[re.Pattern[str]]:
    return [pattern(heading) for heading in re.findall(r"^### (.*)$", STARTING.read_text(), re.MULTILINE)]


def quoted_beginnings() -> list[str]:
    """The quotations in the first column of the errors page's tables of messages."""
    messages = (REFERENCE / "errors.md").read_text().partition("## Kinds of errors")[0]
    cells = re.findall(r"^\| (`.*?) \| ", messages, re.MULTILINE)
    return [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]


def test_the_page_on_starting_has_the_words_of_the_messages() -> None:
    """Readers of the page search for the words that they have seen."""
    said = texts_of(COLLECTIVES.rglob("*.py"))
    assert len(headings()) >= 25
    for heading in headings():
        assert heading.search(said), f"no message has the words of {heading.pattern!r}"


def test_the_page_on_errors_has_the_words_of_the_messages() -> None:
    said, quoted = texts_of(SOURCES), quoted_beginnings()
    assert len(quoted) >= 100
    assert [words for words in quoted if not pattern(words).search(said)] == []


@pytest.mark.parametrize(
    "name", ["DisagreementError", "RankLostError", "RankGivenUpError", "GroupClosedError", "NotInitializedError"]
)
def test_messages_of_an_error_are_on_a_page(name: str) -> None:
    """Errors that a user meets while a job runs: their first words are on the page about errors or the one about starting."""
    known = [*map(pattern, quoted_beginnings()), *headings()]
    nodes = (node for path in SOURCES for node in nodes_of(path) if isinstance(node, ast.Call) and node.args)
    raised = (text_of(node.args[0]) for node in nodes if isinstance(node.func, ast.Name) and node.func.id == name)
    said = [text for text in raised if text is not None and text.strip("… ")]
    assert said, "or nothing was compared"
    assert [text for text in said if not any(words.search(text) for words in known)] == []


@pytest.mark.parametrize("place", ["startup", "transports/mpi", "transports/gloo.py", "api"])
def test_every_launch_error_is_on_the_page_on_starting(place: str) -> None:
    found, sources = headings(), COLLECTIVES / place
    for path in sources.rglob("*.py") if sources.is_dir() else [sources]:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LaunchError":
                text = text_of(node.args[0])
                if text is not None and text.strip("… "):
                    assert any(heading.search(text) for heading in found), f"{path.name} says, and the page does not: {text}"


def test_every_command_and_each_of_its_options_is_documented() -> None:
    sections = dict(re.findall(r"^## syncline (\w+)\n(.*?)(?=^## |\Z)", (REFERENCE / "commands.md").read_text(), re.M | re.S))
    commands = {command.name: command.load() for command in entry_points(group="syncline.commands")}
    assert sections.keys() == commands.keys() >= {"bench", "doctor", "predict", "report", "trace"}
    for name, command in commands.items():
        parser = argparse.ArgumentParser(add_help=False)
        command.add_arguments(parser)
        options = [option for action in parser._actions for option in action.option_strings]
        assert [option for option in options if f"{option} " not in sections[name].replace("`", " ")] == [], name


def test_the_table_of_versions_is_what_the_doctor_knows() -> None:
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \|", (REFERENCE / "versions.md").read_text(), re.MULTILINE)
    assert sorted(set(rows)) == sorted(RUN_WITH)


def test_the_wheels_claim_no_torch_older_than_was_run() -> None:
    oldest = min(RUN_WITH, key=lambda version: [int(number) for number in version.split(".")])
    for layer in LAYERS:
        project = ROOT / "packages" / layer / "pyproject.toml"
        assert f'"torch>={oldest},<3"' in project.read_text()
    assert oldest == ".".join(map(str, OLDEST_TORCH))
    assert f"The wheels accept torch {oldest} and later" in (REFERENCE / "versions.md").read_text()


def test_what_torchs_ddp_has_and_ours_lacks_is_a_documented_difference() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs, ours = (
            set(dir(kind(torch.nn.Linear(2, 1))))
            for kind in (torch.nn.parallel.DistributedDataParallel, syncline.ddp.DistributedDataParallel)
        )
    finally:
        dist.destroy_process_group()
    lacking = {name for name in theirs - ours if not name.startswith("_")}
    text = (REFERENCE / "differences.md").read_text()
    assert sorted(name for name in lacking if f"`{name}`" not in text) == []
    assert "gather" in lacking, "or nothing was compared"


def test_functions_of_torch_distributed_that_ours_lack_are_a_documented_difference() -> None:
    theirs = [name for name, value in vars(dist).items() if type(value) is FunctionType and name[0] != "_"]
    lacking = [name for name in theirs if not hasattr(syncline.collectives, name)]
    text = (REFERENCE / "differences.md").read_text()
    assert "get_backend" in lacking, "or nothing was compared"
    assert [name for name in lacking if f"`{name}`" not in text] == []


def test_every_error_is_documented() -> None:
    errors = re.findall(r"^class (\w+)\(", (_source("collectives/errors.py")).read_text(), re.MULTILINE)
    text = (REFERENCE / "errors.md").read_text()
    assert "CollectiveTimeout" in errors
    assert [name for name in errors if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "layer", [syncline.collectives, syncline.reducer, syncline.ddp, syncline.hooks], ids=lambda layer: layer.__name__
)
def test_every_public_name_is_in_the_reference(layer: object) -> None:
    name = layer.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    text = (REFERENCE / f"{name}.md").read_text()
    missing = [public for public in layer.__all__ if public not in text and public != "__version__"]  # type: ignore[attr-defined]
    errors = (REFERENCE / "errors.md").read_text()
    assert [public for public in missing if public not in errors] == []


def _source(path: str) -> Path:
    layer, rest = path.split("/", 1)
    return ROOT / "packages" / layer / "src" / "syncline" / layer / rest
