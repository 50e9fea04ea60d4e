"""Which versions of torch were run, and what others are told."""

from __future__ import annotations

import warnings

import pytest
import torch

from syncline.collectives.cli.doctor.diagnosis import was_run


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0", True),
        ("2.13.1+cpu", True),
        ("2.15.0a0+git1", True),
        ("2.1.3", False),
        ("2.6.0", True),
        ("2.9.1", False),
        ("3.0.0", False),
    ],
)
def test_versions_count_by_major_and_minor_number(version: str, expected: bool) -> None:
    assert was_run(version) is expected


@pytest.mark.filterwarnings("default::UserWarning")  # it shall be seen, and fail nothing
def test_of_a_torch_that_was_not_run_this_run_tells() -> None:
    if not was_run(torch.__version__):
        warnings.warn(
            f"these tests were not run with torch {torch.__version__} before: enter the result into docs/reference/versions.md "
            "and doctor/diagnosis.py",
            stacklevel=1,
        )
