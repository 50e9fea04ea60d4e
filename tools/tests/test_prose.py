"""The check of the pages' English: openings that it refuses, and openings that it allows."""

from __future__ import annotations

import pytest

from check_prose import MOST_COLUMNS, violations


@pytest.mark.parametrize(
    "page",
    [
        "What breaks is named.",
        "A rank ends. Of the others nobody knows.",
        "- Who waits fails.",
        "1. Those that wait fail.",
        "> That of rank 0 wins.",
        "**What counts** is the noun.",
        "| Rank | Result |\n|---|---|\n| 1 | Of it nothing is left. |",
        "!!! tip\n    What counts is the noun.",
        "!!! tip\n\n    What counts is the noun.",
        "# Of ranks and groups",
        'He said so. "What counts is the noun."',
    ],
)
def test_a_sentence_that_opens_badly_is_refused(page: str) -> None:
    ((line, words),) = violations(page)
    assert line == page[: max(page.find(opening) for opening in ("What", "Of ", "Who", "Those", "That"))].count("\n") + 1
    assert words.startswith("a sentence opens with ")


@pytest.mark.parametrize(
    "page",
    [
        "What counts? The noun does.",
        "# What happens when a rank fails",
        "| What | Where |\n|---|---|\n| a rank | node 0 |",
        "Official and Whoever are words of their own.",
        "The noun counts, of course; what follows is free.",
        "```python\n# What is in a code block is code.\n```",
        "```text\n" + "x" * MOST_COLUMNS + "\n```",
        "x" * (MOST_COLUMNS + 1),
    ],
)
def test_other_text_passes(page: str) -> None:
    assert list(violations(page)) == []


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("Text.\n\n```console\nshort\n{}\n```", 5),
        ("Text.\n\n    {}\n", 3),
        ('=== "MPICH"\n\n    ```console\n    {}\n    ```\n', 4),
    ],
)
def test_a_wide_line_of_code_is_refused(page: str, line: int) -> None:
    assert list(violations(page.format("x" * (MOST_COLUMNS + 1)))) == [(line, "a line of code has 91 columns, more than 90")]


@pytest.mark.parametrize("start", ['!!! tip "A title"', '??? note "A title"', '=== "A title"'])
def test_text_beside_the_title_of_a_block_is_refused(start: str) -> None:
    assert list(violations(f"{start}\n    The text.")) == []
    ((line, words),) = violations(f"Before.\n\n{start} The text\n    goes on.")
    assert line == 3
    assert words.startswith("the text of a block begins beside its title")
