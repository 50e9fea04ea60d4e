"""Checks that private names of torch stand in `torch_internals.py` alone: python3 tools/check_torch_internals.py.

A private name begins with one underscore, such as `torch._C` or `dist.Backend._plugins`. Four uses may stand elsewhere: the
namespaces of operators (`torch.ops._c10d_functional`), imports for types alone, `refusals.py` of the conformance suite, which
makes objects that users may pass, and `cli/run/answers.py`, which changes torch for a script. Not found are private names of
objects that functions get or return. Exits 1, with one line per violation, if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FREE = ("torch_internals.py", "testing/conformance/refusals.py", "cli/run/answers.py")


def main() -> int:
    """Print the violations; returns the exit status."""
    paths = [path for path in sorted(ROOT.glob("packages/*/src/**/*.py")) if not path.as_posix().endswith(_FREE)]
    found = [f"{path}:{line}: {name} is private to torch" for path in paths for line, name in violations(path.read_text())]
    print("\n".join(found) or "private names of torch stand in torch_internals.py alone")
    return 1 if found else 0


def violations(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of torch in a source. A pure function."""
    tree = ast.parse(text)
    for_types = {id(node) for branch in ast.walk(tree) if _is_for_types(branch) for node in ast.walk(branch)}
    names = {"torch", *_names_of_torch(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root, path = _chain(node)
            if root in names and "ops" not in path:
                yield node.lineno, ".".join([root, *path])
        elif isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in for_types:
            base = getattr(node, "module", None)
            for alias in node.names:
                name = alias.name if base is None else f"{base}.{alias.name}"
                if getattr(node, "level", 0) == 0 and name.split(".")[0] == "torch" and any(map(_is_private, name.split("."))):
                    yield node.lineno, name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _names_of_torch(tree: ast.AST) -> Iterator[str]:
    """The names of modules and classes of torch in this file, such as `dist` after `import torch.distributed as dist`."""
    for node in ast.walk(tree):
        # For example `rendezvous = import_module("torch.distributed.rendezvous")`.
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_import_of_torch(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.Import):
            yield from (alias.asname for alias in node.names if alias.asname and alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            yield from (alias.asname or alias.name for alias in node.names)


def _is_import_of_torch(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args):
        return False
    name = node.args[0]
    return isinstance(name, ast.Constant) and str(name.value).split(".")[0] == "torch"


def _chain(node: ast.Attribute) -> tuple[str, list[str]]:
    path = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        path.insert(0, inner.attr)
        inner = inner.value
    return (inner.id if isinstance(inner, ast.Name) else ""), path


if __name__ == "__main__":
    sys.exit(main())
