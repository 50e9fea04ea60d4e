"""What this site wants: the site file, and which backend is used and why."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..contract.deadline import DEFAULT_TIMEOUT_S, seconds
from ..errors import InvalidArgumentError, LaunchError, SiteFileError
from .algorithm_thresholds import AlgorithmThresholds
from .launch import Launch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BACKEND_VARIABLE = "SYNCLINE_BACKEND"
SITE_VARIABLE = "SYNCLINE_SITE"
DEFAULT_SITE_FILE = Path("/etc/syncline/site.toml")


def _key(kind: type, default: Any, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """The settings of a site: one row for each key of the site file, with its type, default and meaning."""

    backend: str | None = _key(str, None, "the backend where init_process_group and SYNCLINE_BACKEND name none")
    timeout_s: float = _key(float, DEFAULT_TIMEOUT_S, "the default of init_process_group's timeout, in seconds")
    reproducible: bool = _key(bool, False, "reduce in an order that gives the same bits in every run")
    eager_bytes: int = _key(int, AlgorithmThresholds.eager_bytes, "see AlgorithmThresholds.eager_bytes")
    window_bytes: int = _key(int, AlgorithmThresholds.window_bytes, "see AlgorithmThresholds.window_bytes")
    staged_bytes: int = _key(int, AlgorithmThresholds.staged_bytes, "see AlgorithmThresholds.staged_bytes")

    #: The file that they were read from, or None; not a key.
    path: str | None = None

    @property
    def thresholds(self) -> AlgorithmThresholds:
        """From which size on which algorithm is used."""
        return AlgorithmThresholds(**{entry.name: getattr(self, entry.name) for entry in fields(AlgorithmThresholds)})


_KEYS = {entry.name: entry.metadata["kind"] for entry in fields(Settings) if "kind" in entry.metadata}


def load_settings(environ: Mapping[str, str] = os.environ, default_path: Path = DEFAULT_SITE_FILE) -> Settings:
    """Read the file that `SYNCLINE_SITE` names, else the default one if it exists.

    Raises:
        SiteFileError: the file named does not exist or cannot be read, or see `parse_settings`.
    """
    named = environ.get(SITE_VARIABLE)
    path = Path(named) if named else default_path
    if not named and not path.exists():
        return Settings()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"{SITE_VARIABLE} names it; correct or unset the variable" if named else "make it readable, or remove it"
        raise SiteFileError(f"cannot read the site file {path}: {error}. {why}") from error
    return parse_settings(text, str(path))


def parse_settings(text: str, path: str) -> Settings:
    """Check the content of a site file. A pure function.

    Raises:
        SiteFileError: it is not TOML, or has an unknown key, a value of another type, or one that makes no sense.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SiteFileError(f"{path} is not valid TOML: {error}") from error
    return Settings(**{key: _checked(key, value, path) for key, value in content.items()}, path=path)


def _checked(key: str, value: Any, path: str) -> Any:
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else "."
        raise SiteFileError(f"{path}: unknown key '{key}'{hint} Known keys: {_known_keys()}")
    kind = _KEYS[key]
    if not (type(value) is kind or (kind is float and type(value) is int)):
        raise SiteFileError(f"{path}: expected '{key}' to be {_IN_TOML[kind]}, found {value!r}")
    if kind is int and value < 1:
        raise SiteFileError(f"{path}: expected '{key}' to be a positive number, found {value}")
    if key == "timeout_s":
        try:
            return seconds(float(str(value)))
        except InvalidArgumentError as error:
            raise SiteFileError(f"{path}: '{key}': {error}") from error
    return value


_IN_TOML = {str: 'a string (in quotes, such as "mpi")', float: "a number", int: "an integer", bool: "true or false"}


def _known_keys() -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in _KEYS.items())


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name and, in words, why it was chosen."""

    name: str
    reason: str


def choose_backend(
    argument: str | None,
    environ: Mapping[str, str],
    launch: Launch | None,
    missing: Callable[[str], str | None],
    *,
    scheme: str | None = None,
    rendezvous_given: bool = False,
    settings: Settings | None = None,
) -> BackendChoice:
    """Choose by argument, else by environment variable, else by the site file, else automatically. A pure function.

    Automatically: MPI when an MPI launcher started this process and nothing that MPI needs is missing; else Gloo when there
    is a launcher or a rendezvous; else a group of one. Where NCCL lacks nothing either, it serves the GPUs beside that.

    Args:
        argument: the `backend` argument of `init_process_group`.
        environ: the environment variables.
        launch: what the launcher says, or None.
        missing: maps a backend's name to what it lacks here, or to None.
        scheme: that of the `init_method`; "mpi" is as good as the argument "mpi".
        rendezvous_given: whether the caller gave an `init_method` or a world size.
        settings: the site's settings.

    Raises:
        LaunchError: the `init_method` is mpi:// and the argument names another backend.
    """
    if scheme == "mpi":
        return _by_mpi_url(argument)
    if argument is not None:
        return BackendChoice(argument, "given as argument")
    if environ.get(BACKEND_VARIABLE):
        return BackendChoice(environ[BACKEND_VARIABLE], f"set by {BACKEND_VARIABLE}")
    if settings is not None and settings.backend is not None:
        return BackendChoice(settings.backend, f"set by the site file {settings.path}")
    return _with_gpus(_choose_automatically(launch, missing, rendezvous_given), missing)


def _by_mpi_url(argument: str | None) -> BackendChoice:
    if argument not in (None, "mpi"):
        raise LaunchError(
            f"init_method 'mpi://' means backend 'mpi', but backend {argument!r} was given; leave one of the two out"
        )
    return BackendChoice("mpi", "init_method is mpi://")


def _with_gpus(host: BackendChoice, missing: Callable[[str], str | None]) -> BackendChoice:
    if missing("nccl") is not None:
        return host
    return BackendChoice(f"cpu:{host.name},cuda:nccl", f"{host.reason}, and there are GPUs")


def _choose_automatically(launch: Launch | None, missing: Callable[[str], str | None], rendezvous_given: bool) -> BackendChoice:
    if launch is not None and launch.is_mpi:
        lack = missing("mpi")
        if lack is None:
            return BackendChoice("mpi", f"launched by {launch.launcher}")
        return BackendChoice("gloo", f"launched by {launch.launcher}, but MPI cannot be used: {lack}")
    if launch is not None:
        return BackendChoice("gloo", f"launched by {launch.launcher}")
    if rendezvous_given:
        return BackendChoice("gloo", "a rendezvous was given and no MPI launcher started this process")
    return BackendChoice("in_process", "nothing launched this process, so it is alone")
