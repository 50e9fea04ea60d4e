"""Models with ten structures train over real ranks as in one process with the whole batch."""

from __future__ import annotations

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel
from syncline.ddp.testing import MODELS, check_training
from test_support.full_run import FULL
from test_support.random_training import draw, play

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_local_training_on_the_whole_batch(mpi_group: ProcessGroup, name: str) -> None:
    check_training(mpi_group, name)


@pytest.mark.parametrize("seed", range(1000, 1100 if FULL else 1010))
def test_random_programs_train_as_one_process_does(mpi_group: ProcessGroup, seed: int) -> None:
    play(mpi_group, draw(seed, mpi_group.size))


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + 1.0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_loader_workers_may_be_forked_while_training(mpi_group: ProcessGroup) -> None:
    """A worker has a copy of this rank's memory, also of MPI's. It must not use MPI, also when it ends."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False).double(), process_group=mpi_group)
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    rows = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    for number, batch in enumerate(rows):
        model.zero_grad()
        model(batch.double() * (mpi_group.rank + 1)).sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        assert parameter.grad.item() == (4 * number + 3) * (mpi_group.size + 1) / 2
