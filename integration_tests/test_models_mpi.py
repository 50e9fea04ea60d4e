"""Ten structures of models train over real ranks as they do on one process with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.ddp.testing import MODELS, check_training

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_local_training_on_the_whole_batch(mpi_group: ProcessGroup, name: str) -> None:
    check_training(mpi_group, name)
