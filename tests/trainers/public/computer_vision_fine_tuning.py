"""Lightning's computer_vision_fine_tuning: layers that are unfrozen as training goes on."""

from typing import Any

import torch
import torch.nn.functional as F
from made import Images, Mixed
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks.finetuning import BaseFinetuning
from torch import nn, optim
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader
from torchmetrics import Accuracy

from shoal.integrations.lightning import ShoalStrategy  # shoal


class MilestonesFinetuning(BaseFinetuning):
    """Unfreezes the feature extractor in two steps."""

    def __init__(self, milestones: tuple[int, ...] = (1, 2), train_bn: bool = False) -> None:
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = pl_module.feature_extractor
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(
                modules=layers[-2:], optimizer=optimizer, train_bn=self.train_bn
            )
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(
                modules=layers[:-2], optimizer=optimizer, train_bn=self.train_bn
            )


class TransferLearningModel(LightningModule):
    """A feature extractor and a new classifier."""

    def __init__(self, milestones: tuple[int, ...] = (1, 2), lr: float = 1e-2) -> None:
        super().__init__()
        self.milestones, self.lr = milestones, lr
        self.feature_extractor = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()
        )
        self.fc = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        self.loss_func = F.binary_cross_entropy_with_logits
        self.train_acc = Accuracy(task="binary")
        self.save_hyperparameters()

    def forward(self, x: Any) -> Any:
        return self.fc(self.feature_extractor(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        y_logits = self.forward(x)
        y_scores = torch.sigmoid(y_logits)
        y_true = (y > 2).view((-1, 1)).type_as(x)
        train_loss = self.loss_func(input=y_logits, target=y_true)
        self.log("train_acc", self.train_acc(y_scores, y_true.int()), prog_bar=True)
        return train_loss

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        trainable_parameters = list(filter(lambda p: p.requires_grad, parameters))
        optimizer = optim.Adam(trainable_parameters, lr=self.lr)
        scheduler = MultiStepLR(optimizer, milestones=self.milestones, gamma=0.5)
        return [optimizer], [scheduler]


def main(args: Any) -> Any:
    torch.manual_seed(1)
    model, rows = TransferLearningModel(), Images(35, 5)
    loader = DataLoader(rows, batch_size=8 // args.processes, sampler=Mixed(rows))
    trainer = Trainer(
        callbacks=[MilestonesFinetuning()],
        strategy=ShoalStrategy(),  # shoal
        **args.own,
    )
    trainer.fit(model, loader)
    return model, {"groups": len(trainer.optimizers[0].param_groups)}
