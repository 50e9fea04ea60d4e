"""Hooks of MkDocs: `CHANGELOG.md` as a page of the site."""

from __future__ import annotations

from typing import Any

from commands import ROOT


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page. Links of `CHANGELOG.md` count from the checkout, and links of the site from `docs/`."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
