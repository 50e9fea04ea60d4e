"""Checks what the house's structure rests on, by reading the source (nothing is imported).

- Arrows: ddp -> reducer, collectives; reducer -> collectives; hooks -> collectives.
- mpi4py and CuPy are imported at module level in their own backends only.
- Backends are imported by backends, the registry and the instruments that examine them, and by nothing else.
- An `__init__.py` re-exports and does nothing else; the namespace `syncline` has none at all.

Exits 1, with one line per violation, if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ARROWS: dict[str, frozenset[str]] = {
    "collectives": frozenset(),
    "reducer": frozenset({"collectives"}),
    "hooks": frozenset({"collectives"}),
    "ddp": frozenset({"collectives", "reducer"}),
}
BACKENDS = "syncline.collectives.backends"
# Who may import a backend. The registry does so by name, from entry points.
_INSTRUMENTS = ("syncline.collectives.testing", "syncline.collectives.doctor", "syncline.collectives.bench")
MAY_IMPORT_BACKENDS = (BACKENDS, "syncline.collectives.startup.registry", *_INSTRUMENTS)
# Optional third-party packages, and the one backend that may import each at module level.
OPTIONAL = {"mpi4py": f"{BACKENDS}.mpi", "cupy": f"{BACKENDS}.nccl"}


@dataclass(frozen=True)
class Module:
    """A module by its dotted name; a package is its `__init__.py`."""

    name: str
    is_package: bool = False

    @property
    def layer(self) -> str:
        return self.name.split(".")[1]

    def is_inside(self, *packages: str) -> bool:
        return any(_is_inside(self.name, package) for package in packages)

    def resolve(self, level: int, target: str) -> str:
        """The absolute name of `target`, imported from `level` dots up (0: already absolute)."""
        if level == 0:
            return target
        parts = self.name.split(".")
        anchor = parts[: len(parts) - level + self.is_package]
        return ".".join([*anchor, target] if target else anchor)


@dataclass(frozen=True)
class Import:
    """One imported name: dotted, absolute, with its line, and whether it runs on module import."""

    target: str
    line: int
    at_module_level: bool


@dataclass(frozen=True)
class Violation:
    """What is wrong, and on which line."""

    line: int
    message: str


def check_source(source: str, module: Module) -> list[Violation]:
    """Every violation in `source`, which is the text of `module`."""
    tree = ast.parse(source)
    found = [
        Violation(imported.line, message) for imported in imports(tree, module) for message in _objections(imported, module)
    ]
    if module.is_package:
        found += _beyond_reexports(tree)
    # `from a.b import c, d` is one statement: say it once.
    return sorted(dict.fromkeys(found), key=lambda violation: violation.line)


def check_tree(root: Path) -> list[str]:
    """Every violation under `root`/packages, as `path:line: message`."""
    found = []
    for layer in ARROWS:
        source_root = root / "packages" / layer / "src"
        stray = source_root / "syncline" / "__init__.py"
        if stray.exists():
            found.append(f"{stray.relative_to(root)}:1: hides the sibling layers; remove it")
        for path in sorted((source_root / "syncline" / layer).rglob("*.py")):
            module = _module_at(path.relative_to(source_root))
            for violation in check_source(path.read_text(encoding="utf-8"), module):
                found.append(f"{path.relative_to(root)}:{violation.line}: {violation.message}")
    return found


def imports(tree: ast.Module, module: Module) -> Iterator[Import]:
    """Every import in `tree`; `from a import b` counts as `a.b`, for `b` may be a module."""
    deferred = _deferred(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.resolve(node.level, node.module or "")
            names = [f"{package}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, node not in deferred)


def _objections(imported: Import, module: Module) -> Iterator[str]:
    target = imported.target
    if target.startswith("syncline."):
        layer = target.split(".")[1]
        allowed = ARROWS[module.layer] | {module.layer}
        if layer not in allowed:
            known = ", ".join(sorted(allowed))
            yield f"{module.layer} may import {known}; found syncline.{layer}"
    if _is_inside(target, BACKENDS) and not module.is_inside(*MAY_IMPORT_BACKENDS):
        yield f"found an import of {BACKENDS}; ask the registry for a backend by name"
    for package, home in OPTIONAL.items():
        outside = imported.at_module_level and not module.is_inside(home)
        if _is_inside(target, package) and outside:
            yield f"found {package} at module level; only {home} may, or import it at first use"


def _deferred(tree: ast.Module) -> set[ast.AST]:
    """Nodes that do not run on import of the module: in functions, or for type checkers only."""
    deferred: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            deferred.update(ast.walk(node))
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            deferred.update(inner for branch in node.body for inner in ast.walk(branch))
    return deferred


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _beyond_reexports(tree: ast.Module) -> Iterator[Violation]:
    for position, node in enumerate(tree.body):
        is_docstring = position == 0 and ast.get_docstring(tree) is not None
        if not (is_docstring or isinstance(node, (ast.Import, ast.ImportFrom)) or _is_all(node)):
            yield Violation(node.lineno, "an __init__.py holds docstring, imports and __all__ only")


def _is_all(node: ast.stmt) -> bool:
    if isinstance(node, ast.AnnAssign):
        targets: list[ast.expr] = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    else:
        return False
    return [ast.unparse(target) for target in targets] == ["__all__"]


def _is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _module_at(path: Path) -> Module:
    parts = path.with_suffix("").parts
    if parts[-1] == "__init__":
        return Module(".".join(parts[:-1]), is_package=True)
    return Module(".".join(parts))


def main() -> int:
    violations = check_tree(ROOT)
    print("\n".join(violations) or "layering: every arrow points the right way")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
