from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from syncline.collectives import InvalidArgumentError, SiteFileError
from syncline.collectives.engine.cancel_scope import DEFAULT_TIMEOUT_S
from syncline.collectives.startup.settings import (
    SITE_VARIABLE,
    SPIN_VARIABLE,
    TIMEOUT_VARIABLE,
    AlgorithmThresholds,
    Settings,
    load_settings,
    parse_settings,
)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", Settings(path="f")),
        ("# nothing", Settings(path="f")),
        ('backend = "mpi"', Settings(backend="mpi", path="f")),
        ("timeout_s = 600", Settings(timeout_s=600.0, path="f")),
        ("timeout_s = 0.5", Settings(timeout_s=0.5, path="f")),
        ("reproducible = true", Settings(reproducible=True, path="f")),
        ("spin_s = inf", Settings(spin_s=math.inf, path="f")),
        ("stall_warning_s = 0", Settings(stall_warning_s=0, path="f")),
        ('interface = "ib0"', Settings(interface="ib0", path="f")),
        ('report_dir = ""\nfull_tracebacks = true', Settings(report_dir="", full_tracebacks=True, path="f")),
        ("window_bytes = 65536\nstaged_bytes = 1", Settings(window_bytes=65536, staged_bytes=1, path="f")),
        (
            'backend = "cpu:mpi,cuda:nccl"\ntimeout_s = 7\nreproducible = false',
            Settings("cpu:mpi,cuda:nccl", 7.0, False, path="f"),
        ),
    ],
)
def test_site_files(text: str, settings: Settings) -> None:
    parsed = parse_settings(text, "f")
    assert parsed == settings
    assert type(parsed.timeout_s) is float


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "bakend = 'mpi'",
            ["/e/s.toml: unknown key 'bakend'; did you mean 'backend'?", "timeout_s (float)", "reproducible (bool)"],
        ),
        ("timeout = 5", ["unknown key 'timeout'; did you mean 'timeout_s'?"]),
        ("colour = 5", ["unknown key 'colour'. Known keys: backend (str)"]),
        ("path = 'x'", ["unknown key 'path'"]),
        ("[mpi]\nx = 1", ["unknown key 'mpi'"]),
        ("backend = 5", ["/e/s.toml: expected 'backend' to be a string", "found 5"]),
        ("timeout_s = '5'", ["expected 'timeout_s' to be a number, found '5'"]),
        ("timeout_s = true", ["expected 'timeout_s' to be a number, found True"]),
        ("timeout_s = 0", ["/e/s.toml: 'timeout_s'", "positive number"]),
        ("timeout_s = nan", ["positive number"]),
        ("window_bytes = 1.5", ["expected 'window_bytes' to be an integer, found 1.5"]),
        ("stall_warning_s = -1", ["expected 'stall_warning_s' to be a number of seconds, or 0 for no warnings, found -1"]),
        ("spin_s = -1.5", ["expected 'spin_s' to be a number of seconds, or inf for ever, found -1.5"]),
        ("spin_s = nan", ["expected 'spin_s' to be a number of seconds"]),
        ("staged_bytes = 0", ["expected 'staged_bytes' to be a positive number, found 0"]),
        ("reproducible = 1", ["expected 'reproducible' to be true or false, found 1"]),
        ("backend = mpi", ["/e/s.toml is not valid TOML", "line 1"]),
    ],
)
def test_site_files_with_mistakes(text: str, words: list[str]) -> None:
    with pytest.raises(SiteFileError) as caught:
        parse_settings(text, "/e/s.toml")
    for part in words:
        assert part in str(caught.value)


def test_every_key_has_a_type_a_default_and_a_meaning() -> None:
    keys = [entry for entry in fields(Settings) if entry.metadata]
    settings = [
        "backend",
        "timeout_s",
        "reproducible",
        *(entry.name for entry in fields(AlgorithmThresholds)),
        "stall_warning_s",
        "interface",
        "spin_s",
        "full_tracebacks",
        "report_dir",
    ]
    assert [entry.name for entry in keys] == settings
    assert all(entry.metadata["doc"] for entry in keys)
    assert Settings() == Settings(None, DEFAULT_TIMEOUT_S, False)
    assert Settings().thresholds == AlgorithmThresholds()


def test_the_environment_says_for_how_long_to_spin() -> None:
    site = Settings(spin_s=0.5)
    assert site.spin_s_overridden({}) == site.spin_s_overridden({SPIN_VARIABLE: ""}) == 0.5
    assert site.spin_s_overridden({SPIN_VARIABLE: "0"}) == 0.0
    assert site.spin_s_overridden({SPIN_VARIABLE: "inf"}) == math.inf
    for text in ("-1", "nan", "long"):
        with pytest.raises(
            InvalidArgumentError, match=f"SYNCLINE_SPIN_S: expected a number of seconds, or inf.*found '{text}'"
        ):
            site.spin_s_overridden({SPIN_VARIABLE: text})


def test_the_variable_names_the_file(tmp_path: Path) -> None:
    named, default = tmp_path / "named.toml", tmp_path / "default.toml"
    assert load_settings({}, default) == Settings()
    default.write_text("timeout_s = 1")
    assert load_settings({}, default) == Settings(timeout_s=1.0, path=str(default))
    assert load_settings({SITE_VARIABLE: ""}, default).timeout_s == 1.0
    named.write_text("timeout_s = 2")
    assert load_settings({SITE_VARIABLE: str(named)}, default) == Settings(timeout_s=2.0, path=str(named))


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SiteFileError, match=f"cannot read the site file .*{SITE_VARIABLE} names it"):
        load_settings({SITE_VARIABLE: str(tmp_path / "gone.toml")}, tmp_path / "default.toml")


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SiteFileError, match="cannot read the site file"):
        load_settings({}, path)


def test_the_time_limit_of_the_environment_goes_before_the_sites(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("timeout_s = 600\nspin_s = 0.25")
    environ = {SITE_VARIABLE: str(site), TIMEOUT_VARIABLE: "77"}
    assert load_settings(environ) == Settings(timeout_s=77.0, spin_s=0.25, path=str(site))
    assert load_settings({TIMEOUT_VARIABLE: "1.5"}, tmp_path / "none").timeout_s == 1.5
    for wrong in ("0", "-1", "soon"):
        with pytest.raises(InvalidArgumentError, match=f"{TIMEOUT_VARIABLE}: expected a number of seconds, found '{wrong}'"):
            load_settings({TIMEOUT_VARIABLE: wrong}, tmp_path / "none")


def test_a_file_that_cannot_be_looked_for_is_not_taken_for_none(tmp_path: Path) -> None:
    """Usually its folder is closed to this user. Here its name is too long, which is an error for root, too."""
    with pytest.raises(SiteFileError, match=r"cannot read the site file .*make it readable, or remove it"):
        load_settings({}, tmp_path / ("x" * 300))
    (tmp_path / "file").touch()
    assert load_settings({}, tmp_path / "file" / "site.toml") == Settings()
