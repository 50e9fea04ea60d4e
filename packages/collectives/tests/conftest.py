"""What all tests of the layer share."""

from test_support.fixtures import preloaded_modules, preloaded_python, pytest_collection_finish, python
