"""The settings of a site (a cluster or a machine), read from a site file in TOML."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..engine.cancel_scope import DEFAULT_TIMEOUT_S, seconds
from ..errors import InvalidArgumentError, SiteFileError
from ..health.stalls import DEFAULT_STALL_WARNING_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_SPIN_S = 0.002
SPIN_VARIABLE = "SYNCLINE_SPIN_S"
SITE_VARIABLE = "SYNCLINE_SITE"
TIMEOUT_VARIABLE = "SYNCLINE_TIMEOUT_S"
DEFAULT_SITE_FILE = Path("/etc/syncline/site.toml")


@dataclass(frozen=True, kw_only=True)
class AlgorithmThresholds:
    """Sizes in bytes that decide which algorithm a collective uses.

    To switch an algorithm off, set its size to 2**62. To switch the eager algorithm off, set `eager_bytes` to 1.

    Attributes:
        eager_bytes: a collective uses the eager algorithm if a rank reads at most this many bytes from its peers. A larger
            value means fewer waits per call. But each rank reads and reduces all data, and the group needs more shared memory.
        window_bytes: the smallest memory that `allocate` puts in a window (memory that all ranks of a node can read and write).
            Also the smallest tensor that a collective looks for in windows. A smaller value means that more tensors are reduced
            in place. But each tensor takes whole memory pages.
        staged_bytes: the smallest tensor outside of windows that a reduction copies into shared memory and out again. A smaller
            value means fewer reductions by MPI. But each reduction through shared memory copies its tensor twice, and waits for
            the other ranks at least twice.
        ring_bytes: a reduction uses Syncline's ring between nodes if a part (the tensor's size divided by the number of nodes)
            has at least this size. A smaller value means that more reductions use the whole bandwidth of a TCP network. But a
            ring of p nodes takes 2 (p - 1) steps. Switch the ring off if the network itself reduces, or if the MPI library is
            tuned for the network.
    """

    eager_bytes: int = 512 << 10
    window_bytes: int = 128 << 10
    staged_bytes: int = 32 << 10
    ring_bytes: int = 128 << 10

    def overridden(self, environ: Mapping[str, str] = os.environ) -> AlgorithmThresholds:
        """Return a copy in which environment variables replace sizes. For example, SYNCLINE_RING_BYTES replaces `ring_bytes`.

        Raises:
            InvalidArgumentError: a variable is not a positive integer.
        """
        given = {field.name: environ.get(f"SYNCLINE_{field.name.upper()}") for field in fields(self)}
        sizes = {name: _bytes_in(name, text) if text else getattr(self, name) for name, text in given.items()}
        return AlgorithmThresholds(**sizes)


def _bytes_in(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InvalidArgumentError(f"SYNCLINE_{name.upper()}: expected a positive number of bytes, found {text!r}")
    return int(text)


def _key(kind: type, default: Any, doc: str) -> Any:
    return field(default=default, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True)
class Settings:
    """The settings of a site: one field for each key of the site file."""

    backend: str | None = _key(str, None, "the backend where init_process_group and SYNCLINE_BACKEND name none")
    timeout_s: float = _key(float, DEFAULT_TIMEOUT_S, "the default of init_process_group's timeout, in seconds")
    reproducible: bool = _key(bool, False, "reduce in an order that gives the same bits in every run")
    eager_bytes: int = _key(int, AlgorithmThresholds.eager_bytes, "see AlgorithmThresholds.eager_bytes")
    window_bytes: int = _key(int, AlgorithmThresholds.window_bytes, "see AlgorithmThresholds.window_bytes")
    staged_bytes: int = _key(int, AlgorithmThresholds.staged_bytes, "see AlgorithmThresholds.staged_bytes")
    ring_bytes: int = _key(int, AlgorithmThresholds.ring_bytes, "see AlgorithmThresholds.ring_bytes")
    stall_warning_s: float = _key(
        float, DEFAULT_STALL_WARNING_S, "after so many seconds in one call rank 0 logs who waits for whom; 0: never"
    )
    interface: str | None = _key(
        str, None, 'the network interface on which ranks of several hosts meet, and Gloo communicates, such as "ib0"'
    )
    spin_s: float = _key(
        float, DEFAULT_SPIN_S, "for how long a rank that waits over MPI looks for the others before it sleeps between two looks"
    )
    full_tracebacks: bool = _key(bool, False, "tracebacks that are printed at exit show the frames inside Syncline and torch")
    report_dir: str | None = _key(str, None, 'where ranks write reports when something fails; "": no reports')

    #: The file from which the settings were read, or None. A site file cannot set `path`.
    path: str | None = None

    def changed(self) -> list[str]:
        """Return the settings that differ from the defaults, as lines of a site file."""
        defaults = Settings()
        return [f"{key} = {_in_toml(getattr(self, key))}" for key in _KEYS if getattr(self, key) != getattr(defaults, key)]

    @property
    def thresholds(self) -> AlgorithmThresholds:
        """The sizes that decide which algorithm a collective uses."""
        return AlgorithmThresholds(**{entry.name: getattr(self, entry.name) for entry in fields(AlgorithmThresholds)})

    def spin_s_overridden(self, environ: Mapping[str, str] = os.environ) -> float:
        """Return the value of the environment variable `SYNCLINE_SPIN_S`. If it is not set, return the field `spin_s`.

        Raises:
            InvalidArgumentError: the variable is not a number of seconds.
        """
        text = environ.get(SPIN_VARIABLE)
        if not text:
            return self.spin_s
        try:
            value = float(text)
        except ValueError:
            # The text is not a number. The check below raises the error.
            value = -1.0
        if not value >= 0:
            raise InvalidArgumentError(f"{SPIN_VARIABLE}: expected a number of seconds, or inf for ever, found {text!r}")
        return value


_KEYS = {entry.name: entry.metadata["kind"] for entry in fields(Settings) if "kind" in entry.metadata}


def load_settings(environ: Mapping[str, str] = os.environ, default_path: Path = DEFAULT_SITE_FILE) -> Settings:
    """Read the site file: the file that the environment variable `SYNCLINE_SITE` names, or else the file `default_path`.

    The file `default_path` need not exist. The environment variable `SYNCLINE_TIMEOUT_S` overrides the file's `timeout_s`.

    Raises:
        SiteFileError: the file that `SYNCLINE_SITE` names does not exist, or the site file cannot be read or has an error.
        InvalidArgumentError: `SYNCLINE_TIMEOUT_S` is not a number of seconds.
    """
    settings = _load_file(environ, default_path)
    text = environ.get(TIMEOUT_VARIABLE)
    if not text:
        return settings
    try:
        return replace(settings, timeout_s=seconds(float(text)))
    except ValueError as error:  # from `float`, or the InvalidArgumentError of `seconds`
        raise InvalidArgumentError(f"{TIMEOUT_VARIABLE}: expected a number of seconds, found {text!r}") from error


def site_path(environ: Mapping[str, str] = os.environ, default_path: Path = DEFAULT_SITE_FILE) -> Path:
    """Return the path of the site file, which may not exist."""
    return Path(environ.get(SITE_VARIABLE) or default_path)


def _load_file(environ: Mapping[str, str], default_path: Path) -> Settings:
    named, path = environ.get(SITE_VARIABLE), site_path(environ, default_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        # Only a file that the user names must exist. A file in a folder that this user cannot read may exist.
        if not named and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return Settings()
        why = f"{SITE_VARIABLE} names it; correct or unset the variable" if named else "make it readable, or remove it"
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise SiteFileError(f"cannot read the site file {path}: {said}. {why}") from error
    return parse_settings(text, str(path))


def parse_settings(text: str, path: str) -> Settings:
    """Make settings from the content of a site file. `path` is the file's path, for messages.

    Raises:
        SiteFileError: the text is not TOML, or has an unknown key, a value of the wrong type, or an impossible value.
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
    # Accept 5 where 5.0 is expected. Compare with `type`, because True is an int for `isinstance`.
    if not (type(value) is kind or (kind is float and type(value) is int)):
        raise SiteFileError(f"{path}: expected '{key}' to be {_IN_TOML[kind]}, found {value!r}")
    if kind is int and value < 1:
        raise SiteFileError(f"{path}: expected '{key}' to be a positive number, found {value}")
    if key == "stall_warning_s" and not 0 <= value < math.inf:
        raise SiteFileError(
            f"{path}: expected 'stall_warning_s' to be a number of seconds, or 0 for no warnings, found {value}"
        )
    if key == "spin_s" and not value >= 0:
        raise SiteFileError(f"{path}: expected 'spin_s' to be a number of seconds, or inf for ever, found {value}")
    if key == "timeout_s":
        try:
            return seconds(float(str(value)))
        except InvalidArgumentError as error:
            raise SiteFileError(f"{path}: '{key}': {error}") from error
    return value


_IN_TOML = {str: 'a string (in quotes, such as "mpi")', float: "a number", int: "an integer", bool: "true or false"}


def _in_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _known_keys() -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in _KEYS.items())
