"""Lightning's transformer: clipping, three loaders of a random split, a test behind the fit."""

from typing import Any

import pytorch_lightning as L
import torch
import torch.nn.functional as F
from made import LONGEST, WORDS, Blocks, Mixed
from torch import nn
from torch.utils.data import DataLoader, random_split

from shoal.integrations.lightning import ShoalStrategy  # shoal


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(vocab_size, 8), nn.Embedding(LONGEST, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, words: Any) -> Any:
        x = self.table(words) + self.place.weight[: words.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=x.dtype)
        return F.log_softmax(self.head(self.layer(x, src_mask=mask)), dim=-1).flatten(0, 1)


def pairs(examples: Any) -> Any:
    words = torch.tensor([example["input_ids"] for example in examples])
    return words[:, :-1], words[:, 1:]


class LanguageModel(L.LightningModule):
    """The language model, and how it trains."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        input, target = batch
        output = self.model(input)
        loss = F.nll_loss(output, target.reshape(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        input, target = batch
        output = self.model(input)
        loss = F.nll_loss(output, target.reshape(-1))
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        input, target = batch
        output = self.model(input)
        loss = F.nll_loss(output, target.reshape(-1))
        self.log("test_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0)


def main(args: Any) -> Any:
    L.seed_everything(42)
    dataset, size = Blocks(60, 1), 10 // args.processes
    train, val, test = random_split(dataset, [46, 7, 7])
    train_dataloader = DataLoader(train, batch_size=size, sampler=Mixed(train), collate_fn=pairs)
    val_dataloader = DataLoader(val, batch_size=size, shuffle=False, collate_fn=pairs)
    test_dataloader = DataLoader(test, batch_size=size, shuffle=False, collate_fn=pairs)
    model = LanguageModel(vocab_size=WORDS)
    # author: trainer = L.Trainer(gradient_clip_val=0.25, **args.own)
    trainer = L.Trainer(gradient_clip_val=0.25, **args.own, strategy=ShoalStrategy())  # shoal
    trainer.fit(model, train_dataloader, val_dataloader)
    (tested,) = trainer.test(model, test_dataloader, verbose=False)
    return model, {
        **tested,
        "val_loss": float(trainer.validate(model, val_dataloader)[0]["val_loss"]),
    }
