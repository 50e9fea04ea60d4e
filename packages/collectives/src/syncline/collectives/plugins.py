"""Plugins: modules or objects that installed packages offer by name, in a group of entry points."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import InvalidArgumentError, MisuseError


def plugin_names(group: str) -> list[str]:
    """Return the sorted names of the plugins that installed packages offer in this group of entry points."""
    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str, attributes: Sequence[str]) -> Any:
    """Import the plugin `name` of a group of entry points, such as "syncline.commands". It must define all `attributes`.

    Raises:
        InvalidArgumentError: no installed package offers the name.
        MisuseError: two packages offer the name, or the plugin cannot be imported, or it lacks an attribute.
    """
    point = _only_entry_point(group, name)
    try:
        plugin = point.load()
    except (ImportError, AttributeError) as error:
        raise MisuseError(
            f"{name!r} of '{group}' cannot be loaded from {point.value!r}: {error}; an error of the package that offers "
            "it, or of its installation"
        ) from error
    missing = [attribute for attribute in attributes if not hasattr(plugin, attribute)]
    if missing:
        raise MisuseError(
            f"{name!r} of '{group}' should have {', '.join(attributes)}; {point.value!r} lacks {', '.join(missing)}: an error "
            "of the package that offers it"
        )
    return plugin


def _only_entry_point(group: str, name: str) -> EntryPoint:
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if not found:
        known = ", ".join(plugin_names(group)) or "none: is syncline-collectives installed, or only on the path?"
        raise InvalidArgumentError(f"unknown {name!r} in '{group}'; installed are: {known}")
    if len(found) > 1:
        raise MisuseError(f"several packages offer {name!r} in '{group}': {', '.join(sorted(found))}; uninstall all but one")
    return next(iter(found.values()))
