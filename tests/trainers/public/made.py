"""Models from configs and generated rows, in place of downloads of the public scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

try:
    from transformers import BertConfig
except ImportError:  # as where only Lightning is installed
    BertConfig = None

WORDS, LONGEST = 30, 8


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pairs(Dataset[dict[str, Any]]):
    """Made-up sentence pairs of unlike lengths, each with a label of two."""

    def __init__(self, rows: int, seed: int) -> None:
        made = drawn(seed)
        lengths = torch.randint(3, LONGEST + 1, (rows,), generator=made)
        self.texts = [torch.randint(1, WORDS, (int(n),), generator=made) for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: int) -> dict[str, Any]:
        text = self.texts[row].tolist()
        return {"input_ids": text, "attention_mask": [1] * len(text), "labels": text[0] % 2}


class Blocks(Pairs):
    """Texts in blocks of one length, each its own labels."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        text = (self.texts[row].tolist() * LONGEST)[:LONGEST]
        return {"input_ids": text, "attention_mask": [1] * LONGEST, "labels": list(text)}


class Images(Dataset[Any]):
    """Made-up images with labels of five, as tuples or as dicts of given names."""

    def __init__(self, rows: int, seed: int, names: Sequence[str] = (), size: int = 8) -> None:
        made = drawn(seed)
        self.images = torch.randn(rows, 3, size, size, generator=made, dtype=torch.float64)
        self.labels, self.names = torch.randint(5, (rows,), generator=made), names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Any:
        found = self.images[row], self.labels[row]
        return dict(zip(self.names, found, strict=True)) if self.names else found


class ConvNet(nn.Module):
    """A small convolutional net with batch norm, in float64."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3)
        )
        self.classifier = nn.Linear(6, classes)
        self.double()

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


class Metric:
    """Shares of right predictions, as those of the package `evaluate`."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self.right += int((predictions == references).sum())
        self.count += len(references)

    def compute(self) -> dict[str, float]:
        found = {"accuracy": self.right / self.count, "count": self.count}
        self.right = self.count = 0
        return found


def padded(examples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad texts to the longest, as a tokenizer's `pad` does."""
    longest = max(len(example["input_ids"]) for example in examples)
    return {
        name: torch.tensor(
            [
                value + [0] * (longest - len(value)) if isinstance(value, list) else value
                for value in (example[name] for example in examples)
            ]
        )
        for name in examples[0]
    }


def bert_config(**options: Any) -> Any:
    return BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )


class Mixed(Sampler[int]):
    """The same mixed order in each epoch, on any number of processes."""

    def __init__(self, dataset: Any) -> None:
        self.order = torch.randperm(len(dataset), generator=drawn(9)).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)
