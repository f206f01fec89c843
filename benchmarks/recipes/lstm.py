"""A language model of two LSTM layers, 11 million parameters, 8 windows of 32 words of 2,000 a
rank.

Source: Zaremba et al., "Recurrent Neural Network Regularization", 2014, the medium model, with
fewer words.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, HIDDEN, WINDOW = 2000, 400, 800, 32


class LanguageModel(nn.Module):
    """Words (windows, words) -> a score for each possible next word (windows, words,
    vocabulary).
    """

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.word(words))[0])


class WordLoss(nn.CrossEntropyLoss):
    """Over all words of all windows."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return super().forward(scores.flatten(0, 1), target.flatten())


def data() -> DataLoader:
    """Words of equal chances, by a fixed seed."""
    text = torch.randint(WORDS, (512, WINDOW + 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8)


def model() -> nn.Module:
    """A new one."""
    return LanguageModel()


def loss() -> nn.Module:
    """Mean cross entropy over all words."""
    return WordLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(params, lr=1e-3)
