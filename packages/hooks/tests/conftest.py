"""What all tests of the layer share."""

from test_support.fixtures import pytest_collection_finish
