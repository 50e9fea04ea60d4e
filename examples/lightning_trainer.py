"""Lightning's Trainer over MPI, with handwritten digits.

    mpirun -n 2 python lightning_trainer.py

Needs pytorch-lightning and scikit-learn. The group must exist before the Trainer: Lightning then uses it, and starts no processes.
"""

from __future__ import annotations

import argparse

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import syncline.collectives.torch_backend  # noqa: F401 - registers the backend "syncline" and `mpi://`


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # sync_dist: the mean over the ranks
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss'].item():.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> torch.nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    options = parser.parse_args()

    dist.init_process_group("syncline", init_method="mpi://")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks over the backend {dist.get_backend()}", flush=True)
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    data = TensorDataset((pixels / 16).float(), labels)
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),  # on one node; on several, the ranks of a node, and num_nodes
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, 32, shuffle=True))  # Lightning adds the DistributedSampler
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
