"""What all tests of the layer share."""

from collections.abc import Sequence

import pytest

from test_support.fixtures import preloaded_python, pytest_collection_finish, python
from test_support.preloaded import OPTIMIZERS


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    return OPTIMIZERS
