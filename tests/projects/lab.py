"""An autoencoder of small pictures, as a lab has it from another project."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class PicturesData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(42)
        row, column = torch.rand(2, 130, 8, 1, generator=generator)
        pictures = (row * column.transpose(1, 2))[:, None]
        data = TensorDataset(pictures, pictures.flatten(1).mean(1))
        self.train_set, self.val_set, self.test_set = random_split(data, [80, 30, 20], generator=generator)

    def train_dataloader(self) -> DataLoader:
        return self.dataloader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.dataloader(self.val_set)

    def test_dataloader(self) -> DataLoader:
        return self.dataloader(self.test_set)

    def dataloader(self, dataset: torch.utils.data.Dataset, shuffle: bool = False) -> DataLoader:
        return DataLoader(dataset, self.hparams["batch_size"], shuffle=shuffle, num_workers=self.hparams["num_workers"])


class AutoEncoder(pl.LightningModule):
    def __init__(self, hidden_dim: int = 8, lr: float = 1e-2, patience: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden_dim), nn.ReLU(), nn.Dropout(0.1))
        self.decoder = nn.Linear(hidden_dim, 64)
        self.validation_outputs: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).view_as(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, brightness = batch
        x_hat = self(x)
        loss = F.mse_loss(x_hat, x)
        self.log("val_loss", loss, prog_bar=True)
        self.validation_outputs.append({"x_hat": x_hat, "brightness": brightness})
        return loss

    def on_validation_epoch_end(self) -> None:
        x_hat = torch.cat([output["x_hat"] for output in self.validation_outputs])
        brightness = torch.cat([output["brightness"] for output in self.validation_outputs])
        self.log("val_brightness_error", (x_hat.flatten(1).mean(1) - brightness).abs().mean(), sync_dist=True)
        if isinstance(self.logger, WandbLogger):
            self.logger.log_image("reconstructions", list(x_hat[:4]))
        self.validation_outputs.clear()

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, _ = batch
        self.log("test_loss", F.mse_loss(self(x), x))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=self.hparams["patience"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
