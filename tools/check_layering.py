"""Checks what the house's structure rests on, by reading the source (nothing is imported).

- Arrows: ddp -> reducer, collectives; reducer -> collectives; hooks -> collectives.
- Floors: inside a package of `FLOORS` an import points down, or stays in its sub-package.
- No circles: no module imports itself by way of others. Imports in functions and for type checkers count as well, for
  they tie the two modules together just as much: neither can be read, moved or tested without the other.
- Of collectives, the other layers use its public names, and `syncline.collectives.internal`.
- mpi4py, CuPy and pyzmq are imported at module level in the packages made for them only.
- Backends are imported by backends, the registry and the instruments that examine them, and by nothing else.
- An `__init__.py` re-exports, at once or when a name is first asked for, and does nothing else; the namespace `syncline` has
  none at all.

Exits 1, with one line per violation, if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ARROWS: dict[str, frozenset[str]] = {
    "collectives": frozenset(),
    "reducer": frozenset({"collectives"}),
    "hooks": frozenset({"collectives"}),
    "ddp": frozenset({"collectives", "reducer"}),
}
COLLECTIVES = "syncline.collectives"
# For each package its modules and sub-packages, the lowest first. What a package's `__init__` imports is not a floor.
FLOORS: dict[str, tuple[str, ...]] = {
    COLLECTIVES: (
        "errors",
        "version",
        "plugins",
        "torch_internals",
        "forks",
        "contract",
        "failures",
        "host",
        "devices",
        "stores",
        "survivors",
        "composed",
        "startup",
        "backends",
        "default_group",
        "torch_backend",
        "public",
        "internal",
        "testing",
        "commands",
        "__main__",
    ),
    "syncline.ddp.tracing": (
        "settings",
        "clock",
        "events",
        "part",
        "timeline",
        "chrome_trace",
        "profiler_trace",
        "summary",
        "trace_file",
        "extras",
        "rendering",
        "floor",
        "table",
        "page",
        "report_reader",
        "call_log",
        "optimizer_steps",
        "recorder",
        "recording",
        "command",
    ),
    "syncline.ddp.prediction": (
        "cost_model",
        "network",
        "replay",
        "workload_of_trace",
        "compression",
        "forecast",
        "table",
        "page",
        "command",
    ),
    f"{COLLECTIVES}.backends.mpi": (
        "waiting",
        "library",
        "datatypes",
        "fault_tolerance",
        "neighbours",
        "timeout_report",
        "status_post",
        "call_verifier",
        "request",
        "ring_all_reduce",
        "transport",
        "departure_notices",
        "first_meeting",
        "job_abort",
        "node",
        "reconnector",
        "connection",
        "backend",
    ),
    f"{COLLECTIVES}.backends.mpi.node": (
        "shm_barrier",
        "hierarchy",
        "shared_allocation",
        "windows",
        "group_sync",
        "algorithm",
        "plan",
        "eager_exchange",
        "window_collective",
        "copy_in_copy_out",
        "hierarchical_all_reduce",
        "node_transport",
    ),
}
# Where the names are that other layers may import from collectives; everything else in its sub-packages is private.
PUBLIC_TO_LAYERS = ("internal", "stores", "testing", "torch_backend")
BACKENDS = f"{COLLECTIVES}.backends"
# Who may import a backend. The registry does so by name, from entry points.
_INSTRUMENTS = (f"{COLLECTIVES}.testing", f"{COLLECTIVES}.commands")
MAY_IMPORT_BACKENDS = (BACKENDS, f"{COLLECTIVES}.startup.registry", *_INSTRUMENTS)
# Optional third-party packages, and the one package of ours that may import each at module level.
OPTIONAL = {"mpi4py": f"{BACKENDS}.mpi", "cupy": f"{BACKENDS}.nccl", "zmq": f"{COLLECTIVES}.stores.tcp"}


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
    sources: dict[Module, str] = {}
    for layer in ARROWS:
        source_root = root / "packages" / layer / "src"
        stray = source_root / "syncline" / "__init__.py"
        if stray.exists():
            found.append(f"{stray.relative_to(root)}:1: hides the sibling layers; remove it")
        for path in sorted((source_root / "syncline" / layer).rglob("*.py")):
            module = _module_at(path.relative_to(source_root))
            sources[module] = path.read_text(encoding="utf-8")
            for violation in check_source(sources[module], module):
                found.append(f"{path.relative_to(root)}:{violation.line}: {violation.message}")
    circle = find_circle(import_graph(sources))
    return [*found, f"circle of imports: {' -> '.join(circle)}"] if circle else found


def import_graph(sources: Mapping[Module, str]) -> dict[str, set[str]]:
    """For each module the modules among `sources` that it imports, anywhere in its text."""
    names = {module.name for module in sources}
    graph = {}
    for module, source in sources.items():
        targets = (imported.target for imported in imports(ast.parse(source), module))
        graph[module.name] = {_module_of(target, names) for target in targets} & names - {module.name}
    return graph


def find_circle(graph: Mapping[str, Collection[str]]) -> list[str] | None:
    """The modules of one circle, in the order of their imports, the first again at the end; None if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return None


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
    if module.layer != "collectives" and _is_private(target):
        yield f"{target} is private to collectives; import a public name, or one of {COLLECTIVES}.internal"
    for package, floors in FLOORS.items():
        yield from _upward(target, module, package, floors)
    if _is_inside(target, BACKENDS) and not module.is_inside(*MAY_IMPORT_BACKENDS):
        yield f"found an import of {BACKENDS}; ask the registry for a backend by name"
    for package, home in OPTIONAL.items():
        outside = imported.at_module_level and not module.is_inside(home)
        if _is_inside(target, package) and outside:
            yield f"found {package} at module level; only {home} may, or import it at first use"


def _upward(target: str, module: Module, package: str, floors: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with an import inside `package`: it points up, or to nothing that has a floor."""
    if not (_is_inside(target, package) and module.is_inside(package)) or module.name == package:
        return
    here, there = _child(module.name, package), _child(target, package)
    unknown = [name for name in (here, there) if name not in floors]
    if unknown:
        yield f"{package}.{unknown[0]} has no floor: add it to FLOORS, or import a name from where it is defined"
    elif floors.index(there) > floors.index(here):
        yield f"{package}.{here} lies below {there}; found an import that points up, to {target}"


def _is_private(target: str) -> bool:
    """Whether other layers have no business with this name of collectives: it is in a sub-package that is not public."""
    inside = target.removeprefix(f"{COLLECTIVES}.").split(".") if target.startswith(f"{COLLECTIVES}.") else []
    if not inside or inside[0] not in FLOORS[COLLECTIVES]:
        return False
    is_reexport = len(inside) <= 2 or inside[0] == "testing"
    return inside[0] not in PUBLIC_TO_LAYERS or not is_reexport


def _child(name: str, package: str) -> str:
    """The module or sub-package of `package` that `name` is, or is in."""
    return name.removeprefix(package).lstrip(".").split(".")[0]


def _module_of(target: str, names: Collection[str]) -> str:
    """The module that is loaded for `a.b.c`: that of this name, or `a.b`, where the name is defined."""
    return target if target in names else target.rpartition(".")[0]


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
        if not (is_docstring or _is_import(node) or _is_all(node) or _loads_names(node)):
            yield Violation(node.lineno, "an __init__.py holds docstring, imports, __all__ and __getattr__ only")


def _is_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return _is_type_checking(node.test) and all(map(_is_import, node.body)) and not node.orelse
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _loads_names(node: ast.stmt) -> bool:
    """Whether it loads what the package exports, or lists it, when somebody asks (PEP 562)."""
    return isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")


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
