"""Checks the English and the width of the pages: python3 tools/check_prose.py.

No sentence of a page or a README may open with one of `OPENINGS`, which make a reader look for the noun. A question may, and
so may a heading in the words of a question ("What the launcher does first"). No line of a code block may be wider than
`MOST_COLUMNS`, beyond which a reader must scroll. The text of an admonition begins below its title. Exits 1, with one line
per violation, if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
OPENINGS = ("Of", "What", "Who", "Those that", "That of")
QUESTIONS = ("What", "Who")
MOST_COLUMNS = 90

_OPENING = re.compile(rf"[*_`\"'(]*({'|'.join(OPENINGS)})\b")
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[*_\"')]*\s+")
# Blocks of MkDocs whose text is indented: for Markdown alone that would be code.
_CONTAINER = re.compile(r"(!!!|\?\?\?\+?|===) ")
# Only the title may stand in the first line of such a block. Otherwise MkDocs shows the whole block as plain text.
_TEXT_BESIDE_TITLE = re.compile(r"(!!!|\?\?\?\+?|===) [^\"\n]*\"[^\"\n]*\" *[^ \n]")


def main() -> int:
    """Print what is wrong; the exit status."""
    paths = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/**/README.md")])
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {words}" for path in paths for line, words in violations(path.read_text())
    ]
    print("\n".join(found) or f"{len(paths)} pages: no sentence opens badly, no code is too wide")
    return 1 if found else 0


def violations(text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
    """The line of each violation, and what is wrong there. A pure function of a page's text."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for index, token in enumerate(tokens):
        line = first_line + (token.map[0] if token.map else 0)
        if token.type == "code_block" and _CONTAINER.match(_text_before(tokens, index)):
            yield from violations(token.content, line)
        elif token.type in ("fence", "code_block") and token.info != "diff":  # a diff has the lines of its file
            yield from _wide_lines(token, line)
        elif token.type == "inline":
            if _TEXT_BESIDE_TITLE.match(token.content):
                yield line, f"the text of a block begins beside its title: {token.content[:60]}"
            yield from _bad_openings(token.content, line, around=tokens[index - 1].type)


def _wide_lines(token: Token, line: int) -> Iterator[tuple[int, str]]:
    for number, words in enumerate(token.content.splitlines(), line + (token.type == "fence")):
        if len(words) > MOST_COLUMNS:
            yield number, f"a line of code has {len(words)} columns, more than {MOST_COLUMNS}"


def _bad_openings(text: str, line: int, *, around: str) -> Iterator[tuple[int, str]]:
    if around in ("td_open", "th_open") and not text.endswith("."):
        return  # a label, such as "What happens"
    container = _CONTAINER.match(text)
    begin = text.find("\n") + 1 if container else 0  # the text of a tip may begin on its second line
    for end in [*_END_OF_SENTENCE.finditer(text, begin), None]:
        sentence = text[begin : end.start() if end else None]
        opening = _OPENING.match(sentence.lstrip())
        is_question = sentence.rstrip("*_\"')").endswith("?") or (
            around == "heading_open" and opening and opening[1] in QUESTIONS
        )
        if opening and not is_question:
            yield line + text.count("\n", 0, begin), f'a sentence opens with "{opening[1]}": {" ".join(sentence.split())[:60]}'
        begin = end.end() if end else begin


def _text_before(tokens: Sequence[Token], index: int) -> str:
    """The text of the paragraph that a block follows; empty if something else stands there."""
    return tokens[index - 2].content if index >= 2 and tokens[index - 2].type == "inline" else ""


if __name__ == "__main__":
    sys.exit(main())
