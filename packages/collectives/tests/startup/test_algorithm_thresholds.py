"""Sizes at which ways change, and who may set them."""

from __future__ import annotations

import pytest

from syncline.collectives import InvalidArgumentError
from syncline.collectives.startup.settings import AlgorithmThresholds


def test_the_environment_goes_first() -> None:
    site = AlgorithmThresholds(window_bytes=10, staged_bytes=20)
    assert site.overridden({}) == site
    assert site.overridden({"SYNCLINE_WINDOW_BYTES": "7"}) == AlgorithmThresholds(window_bytes=7, staged_bytes=20)
    assert site.overridden({"SYNCLINE_STAGED_BYTES": "8", "SYNCLINE_WINDOW_BYTES": ""}) == AlgorithmThresholds(
        window_bytes=10, staged_bytes=8
    )


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "64K", " 7", "٣"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="SYNCLINE_STAGED_BYTES: expected a positive number of bytes"):
        AlgorithmThresholds().overridden({"SYNCLINE_STAGED_BYTES": text})
