"""Find, compile and run the script as `__main__`, as `python` would."""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any
from zipfile import is_zipfile


class ScriptError(Exception):
    """The script cannot be found or read. `status` is the exit status that `python` would have."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Script:
    """A script: its code, its name for `sys.argv[0]`, and the attributes of its module `__main__`."""

    code: types.CodeType
    name: str
    attributes: dict[str, Any]


def find_script(name: str, *, is_module: bool) -> Script:
    """Find and compile the script, and put its folder first in `sys.path`.

    The script may also be a folder or a zip file that has a `__main__.py`.

    With `is_module`, `name` is the name of a module. Then the current folder comes first, and the `__init__` of the module's
    packages runs, as with `python -m`.

    Raises:
        ScriptError: the script does not exist, or it cannot be read.
        SyntaxError: the script is not valid Python.
    """
    return _module(name) if is_module else _file(name)


def run_script(script: Script, arguments: Sequence[str]) -> None:
    """Run the script as `__main__`. Exceptions of the script, including SystemExit, reach the caller."""
    main = types.ModuleType("__main__")
    main.__dict__.update(script.attributes, __builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    sys.argv[:] = [script.name, *arguments]
    exec(script.code, main.__dict__)


def _file(name: str) -> Script:
    path = Path(name)
    if path.is_dir() or is_zipfile(path):
        return _folder_or_zip(name)
    try:
        source = path.read_bytes()
    except OSError as error:
        hint = "; torchrun's place is taken by `syncline run`: leave it out" if path.name == "torchrun" else ""
        raise ScriptError(f"cannot open {name!r} in {_working_folder()}: {error.strerror}{hint}", 2) from error
    _set_first_path(os.path.dirname(os.path.realpath(name)))
    absolute = os.path.abspath(name)
    attributes = {"__file__": absolute, "__cached__": None, "__spec__": None, "__package__": None}
    loader = SourceFileLoader("__main__", absolute)
    try:
        code = compile(source, absolute, "exec", dont_inherit=True)
    except ValueError as error:  # zero bytes, before Python 3.12
        raise ScriptError(f"{name} is no Python script: {error}") from error
    return Script(code, name, {**attributes, "__loader__": loader})


def _folder_or_zip(name: str) -> Script:
    spec = PathFinder.find_spec("__main__", [name])
    code = None if spec is None else _code_of(spec)
    if spec is None or code is None:
        raise ScriptError(f"{name} has no __main__.py; name a file, or `-m` and a package")
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, name)  # `python -P` leaves out folders of scripts, but not this name
    else:
        sys.path[0] = name
    return Script(code, name, {**_attributes(spec), "__package__": ""})


def _module(name: str) -> Script:
    if name.split(".")[:2] == ["torch", "distributed"] and name.rpartition(".")[2] in ("run", "launch"):
        raise ScriptError(f"torchrun's place is taken by `syncline run`: leave `-m {name}` out, with its options")
    folder = _working_folder()
    _set_first_path(folder)
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find_spec(name)
    code = None if spec is None else _code_of(spec)
    if spec is None or code is None:
        raise ScriptError(f"no module named {name}, looked for from {folder}")
    return Script(code, spec.origin or name, _attributes(spec))


def _code_of(spec: ModuleSpec) -> types.CodeType | None:
    get_code = getattr(spec.loader, "get_code", None)
    return None if get_code is None else get_code(spec.name)


def _attributes(spec: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__spec__": spec,
        "__package__": spec.parent,
        "__loader__": spec.loader,
    }


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise ScriptError("the working directory does not exist any more: change to another folder (`cd`)") from error


def _find_spec(name: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None  # the module, or a package that contains it, does not exist
        raise


def _set_first_path(folder: str) -> None:
    # With `python -P`, the folder of `syncline` is not in `sys.path`.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
