"""Lightning's Trainer, which is told the number of devices, with a metric of torchmetrics that is computed over all ranks."""

import os
import tempfile
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        inputs, targets = batch
        self.accuracy(self.layers(inputs), targets)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main():
    warnings.simplefilter("ignore")
    pl.seed_everything(8, verbose=False)
    data = torch.linspace(-1, 1, 48 * 12).sin().view(48, 12)
    dataset = TensorDataset(data, data.abs().sum(1).long() % 3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Classifier(), DataLoader(dataset, 4, shuffle=True), DataLoader(dataset, 4))
    found = {name: value.item().hex() for name, value in sorted(trainer.callback_metrics.items())}
    assert {"loss_epoch", "accuracy"} <= found.keys()
    print(f"loss {trainer.global_rank} {trainer.world_size} {found}\n", end="")


if __name__ == "__main__":
    main()
