"""Six public training scripts, small, from memory. Lines that Shoal needs end in "# shoal".

Each takes a model in float64 and trains it as its author does, with its author's own loader.
"""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import shoal

Script = Callable[[Any], Any]
WORDS = 27


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=drawn(len(shape)), dtype=torch.float64)


# ---------------------------------------------------------------- makemore


class Names(Dataset[tuple[Tensor, Tensor]]):
    """Names as characters, and the same one place further."""

    def __init__(self) -> None:
        self.names = torch.randint(1, WORDS, (40, 7), generator=drawn(1))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.names[number, :-1], self.names[number, 1:]


class InfiniteDataLoader:
    """A loader without an end, as makemore has it."""

    def __init__(self, dataset: Any, **how: Any) -> None:
        sampler = RandomSampler(dataset, replacement=True, num_samples=int(1e10))
        self.train_loader = DataLoader(dataset, sampler=sampler, **how)
        self.train_loader = shoal.shard(self.train_loader, batch="global")  # shoal
        self.data_iter = iter(self.train_loader)

    def next(self) -> Any:
        return next(self.data_iter)


class Makemore(nn.Module):
    """A small transformer that returns (logits, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, 16), nn.Embedding(6, 16)
        self.ln, self.attn, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, WORDS, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        q, k, v = self.attn(self.ln(x)).split(16, dim=2)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        logits = self.lm_head(x + self.proj(y[:, 0]))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def makemore(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.99))
    batch_loader = InfiniteDataLoader(Names(), batch_size=8)
    x = batch_loader.next()  # shoal
    shoal.parallelize(model, None, optimizer, sample=(tuple(x), None))  # shoal
    for _step in range(5):
        X, Y = batch_loader.next()
        _logits, loss = model(X, Y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return model


# ---------------------------------------------------------------- nanoGPT


def nanogpt(model: Any) -> Any:
    data = torch.randint(WORDS, (300,), generator=drawn(2)).numpy()
    block_size, batch_size, gradient_accumulation_steps = 6, 6, 2

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + block_size]) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size]) for i in ix])
        return x, y

    class Batches:  # shoal
        def __iter__(self) -> Iterator[Any]:  # shoal
            while True:  # shoal
                yield get_batch("train")  # shoal

    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)
    batches = iter(shoal.shard(Batches(), batch="global"))  # shoal
    shoal.parallelize(model, None, optimizer, sample=(next(batches), None))  # shoal
    X, Y = next(batches)  # shoal: get_batch("train")
    for iter_num in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + iter_num)
        for _micro_step in range(gradient_accumulation_steps):
            _logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = next(batches)  # shoal: get_batch("train")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


# ---------------------------------------------------------------- speech, in buckets


class BucketSampler(Sampler[list[int]]):
    """Batches of sounds of nearly one length, in another order each epoch."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        buckets = defaultdict(list)
        for number, length in enumerate(lengths):
            buckets[length // 4].append(number)
        self.batches = [
            bucket[start : start + batch_size]
            for bucket in buckets.values()
            for start in range(0, len(bucket), batch_size)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self.batches)))
        random.shuffle(order)
        return (self.batches[i] for i in order)

    def __len__(self) -> int:
        return len(self.batches)


class Sounds(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.sounds = [rows_of(4 + number % 12, 5) for number in range(48)]

    def __len__(self) -> int:
        return len(self.sounds)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.sounds[number], number % 4


def padded(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    sounds, labels = zip(*rows, strict=True)
    lengths = torch.tensor([len(sound) for sound in sounds])
    return nn.utils.rnn.pad_sequence(list(sounds), batch_first=True), lengths, torch.tensor(labels)


class Listener(nn.Module):
    """A GRU over packed sounds, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(5, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.fc(last[-1])


def speech(model: Any) -> Any:
    data = Sounds()
    sampler = BucketSampler([len(sound) for sound in data.sounds], 4)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=padded)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)
    loader = shoal.shard(loader, batch="global")  # shoal
    x, lengths, y = next(iter(loader))  # shoal
    shoal.parallelize(model, criterion, optimizer, sample=((x, lengths), y))  # shoal
    for _epoch in range(2):
        for x, lengths, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x, lengths), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    return model


# ---------------------------------------------------------------- torch's ImageNet example


class Pictures(nn.Module):
    """A small network of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1, 5)) -> list[Tensor]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0))
            for k in topk
        ]


def imagenet(model: Any) -> Any:
    world = shoal.world()  # shoal: dist.get_world_size(), dist.get_rank()
    data = TensorDataset(rows_of(22, 3, 6, 6), torch.arange(22) % 10)
    train_sampler = DistributedSampler(data, world.size, world.rank)
    train_loader = DataLoader(data, batch_size=8 // world.size, sampler=train_sampler)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    train_loader = shoal.shard(train_loader)  # shoal
    shoal.parallelize(  # shoal: DistributedDataParallel(model)
        model,
        criterion,
        optimizer,
        sample=next(iter(train_loader)),  # shoal
    )  # shoal
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            accuracy(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    return model


# ---------------------------------------------------------------- a stream as of webdataset


class Shards(IterableDataset[tuple[Tensor, int]]):
    """Samples of shards, through a buffer that shuffles them."""

    def __init__(self, urls: list[int], buffer: int) -> None:
        self.urls, self.buffer = urls, buffer

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        held: list[tuple[Tensor, int]] = []
        for at in random.sample(range(len(self.urls)), len(self.urls)):
            for row in rows_of(7, 8)[:, :6] + self.urls[at]:
                held.append((row, self.urls[at]))
                if len(held) == self.buffer:
                    yield held.pop(random.randrange(len(held)))
        yield from held


def webdataset(model: Any) -> Any:
    dataset = Shards([0, 1, 2, 3], buffer=5)
    loader = DataLoader(dataset, batch_size=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = shoal.shard(loader, batch="global")  # shoal
    sample = next(iter(loader))  # shoal
    shoal.parallelize(model, F.cross_entropy, optimizer, sample=sample)  # shoal
    for _epoch in range(2):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


# ---------------------------------------------------------------- DCGAN


class Gan(nn.ModuleDict):
    """A generator and a discriminator of convolutions."""

    def __init__(self) -> None:
        super().__init__(
            {
                "G": nn.Sequential(
                    nn.ConvTranspose2d(4, 8, 4, bias=False),
                    nn.GroupNorm(2, 8),
                    nn.ReLU(True),
                    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
                    nn.Tanh(),
                ),
                "D": nn.Sequential(
                    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
                    nn.LeakyReLU(0.2, inplace=True),
                    nn.Conv2d(8, 1, 4, bias=False),
                    nn.Sigmoid(),
                    nn.Flatten(0),
                ),
            }
        )


def dcgan(model: Any) -> Any:
    netG, netD = model["G"], model["D"]
    data = TensorDataset(rows_of(21, 1, 8, 8).tanh(), rows_of(21, 4, 1, 1))  # pictures and noise
    dataloader = DataLoader(data, batch_size=6, shuffle=True)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999), eps=1e-4)
    optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999), eps=1e-4)
    dataloader = shoal.shard(dataloader, batch="global")  # shoal
    real, noise = next(iter(dataloader))  # shoal
    label = torch.ones(len(real), dtype=real.dtype)  # shoal
    shoal.parallelize(netD, criterion, optimizerD, sample=(real, label))  # shoal
    fools = lambda fake, label: criterion(netD(fake), label)  # noqa: E731  # shoal
    shoal.parallelize(netG, fools, optimizerG, sample=(noise, label))  # shoal
    for _epoch in range(2):
        for real, noise in dataloader:
            netD.zero_grad()
            label = torch.full((real.size(0),), 1.0, dtype=real.dtype)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            fake = netG(noise)
            label.fill_(0.0)
            errD_fake = criterion(netD(fake.detach()), label)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
    return model


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Script, int]] = {
    # a model, its script, and how many of its lines are Shoal's
    "makemore": (Makemore, makemore, 3),
    "nanoGPT": (Makemore, nanogpt, 8),
    "speech": (Listener, speech, 3),
    "ImageNet": (Pictures, imagenet, 5),
    "webdataset": (
        lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)),
        webdataset,
        3,
    ),
    "DCGAN": (Gan, dcgan, 6),
}
_OF_LOADERS = {"makemore": InfiniteDataLoader}


def changed_lines(name: str) -> int:
    """Count the lines of a script that Shoal has added or changed."""
    _, script, _ = SCRIPTS[name]
    parts = [script, *([_OF_LOADERS[name]] if name in _OF_LOADERS else [])]
    return sum("# shoal" in line for part in parts for line in inspect.getsource(part).splitlines())
