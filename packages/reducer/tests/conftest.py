"""What all tests of the layer share."""

import pytest

from test_support.chosen_gradients import GRAPHS
from test_support.fixtures import pytest_collection_finish


@pytest.fixture(params=[pytest.param(options, id=name) for name, options in GRAPHS.items()])
def graph(request: pytest.FixtureRequest) -> dict[str, bool]:
    """What is known of the graph."""
    return dict(request.param)
