"""A small language model, letter by letter, on text that ships with Python: the reference behind
`help()`.

The layout is nanoGPT's (Karpathy, 2022): 5 million parameters, 64 letters of context, 8 windows of
text a rank. Rows are windows times letters, so a Linear layer sees K = 512 of them: the case in
which sending gradients is right.
"""

from collections.abc import Callable, Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

TEXT = "".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))
CONTEXT = 64


class Block(nn.Module):
    """Attention to the letters before, then a layer that looks at each letter alone."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.projection(self.attention(self.query_key_value(self.attention_norm(x))))
        return x + self.mlp(x)

    def attention(self, qkv: Tensor) -> Tensor:
        """Mix the values of earlier letters: (windows, letters, 3 · width) -> (windows, letters,
        width).
        """
        query, key, value = qkv.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return (
            scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class GPT(nn.Module):
    """Letters (windows, letters) -> a score for each possible next letter (windows, letters,
    num_letters).
    """

    def __init__(
        self,
        num_letters: int,
        context: int,
        width: int = 384,
        num_blocks: int = 3,
        num_heads: int = 6,
    ) -> None:
        super().__init__()
        self.letter = nn.Embedding(num_letters, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_letters)

    def forward(self, letters: Tensor) -> Tensor:
        positions = torch.arange(letters.shape[1], device=letters.device)
        return self.head(self.norm(self.blocks(self.letter(letters) + self.position(positions))))


def data() -> tuple[DataLoader, DataLoader]:
    """The text in windows, each with the same window one letter on; every tenth is kept for the
    test.
    """
    number = {letter: i for i, letter in enumerate(LETTERS)}
    text = torch.tensor([number[letter] for letter in TEXT])
    num_windows = (len(text) - 1) // CONTEXT
    windows = text[: num_windows * CONTEXT].view(num_windows, CONTEXT)
    targets = text[1 : num_windows * CONTEXT + 1].view(num_windows, CONTEXT)
    test = torch.arange(num_windows) % 10 == 9
    return (
        DataLoader(TensorDataset(windows[~test], targets[~test]), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(windows[test], targets[test]), batch_size=32),
    )


def model() -> nn.Module:
    """A new GPT."""
    return GPT(len(LETTERS), CONTEXT)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all letters of all windows."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def loss() -> Callable[[Tensor, Tensor], Tensor]:
    """The token loss, a plain function."""
    return token_loss


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)


def accuracy(output: Tensor, target: Tensor) -> tuple[int, int]:
    """Letters that were guessed right, of how many."""
    return int((output.argmax(-1) == target).sum()), target.numel()
