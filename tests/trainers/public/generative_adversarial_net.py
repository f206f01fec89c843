"""Lightning's generative_adversarial_net: manual optimisation, two optimizers, batch norm."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from made import Images, Mixed
from pytorch_lightning.core import LightningModule
from pytorch_lightning.trainer import Trainer
from torch.utils.data import DataLoader

from shoal.integrations.lightning import ShoalStrategy  # shoal


class GAN(LightningModule):
    """A generator and a discriminator."""

    def __init__(
        self, lr: float = 0.005, b1: float = 0.5, b2: float = 0.999, latent: int = 6
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False

        def block(in_feat: int, out_feat: int, normalize: bool = True) -> list[nn.Module]:
            layers: list[nn.Module] = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.generator = nn.Sequential(
            *block(latent, 8, normalize=False), *block(8, 12), nn.Linear(12, 192), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(192, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 1)
        )
        self.validation_z = torch.randn(8, latent)
        self.shown: list[Any] = []

    def forward(self, z: Any) -> Any:
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat: Any, y: Any) -> Any:
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any) -> None:
        imgs, _ = batch
        imgs = imgs.flatten(1)
        opt_g, opt_d = self.optimizers()
        z = imgs[:, : self.hparams.latent]  # the noise of a row, on any number of processes
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        self.toggle_optimizer(opt_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self) -> Any:
        lr, b1, b2 = self.hparams.lr, self.hparams.b1, self.hparams.b2
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(b1, b2))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(b1, b2))
        return opt_g, opt_d

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        self.generator.eval(), self.discriminator.eval()
        z = self.validation_z.type_as(self.generator[0].weight)
        self.shown.append(float(self(z).abs().sum()))
        self.generator.train(), self.discriminator.train()


def main(args: Any) -> Any:
    torch.manual_seed(1)
    model = GAN()
    rows = Images(35, 5)
    loader = DataLoader(rows, batch_size=8 // args.processes, sampler=Mixed(rows))
    trainer = Trainer(
        sync_batchnorm=True,
        strategy=ShoalStrategy(),  # shoal
        **args.own,
    )
    trainer.fit(model, loader, DataLoader(rows, batch_size=8))
    return model, {"shown": model.shown[-1]}
