"""An ordinary training script with the five lines that spread it over several processes: the
sample, and each `shoal`. Two more print one loss, that of all rows.

python examples/plain_loop.py                               # alone
torchrun --nproc-per-node 2 examples/plain_loop.py          # two processes
shoal lab --hosts 4 --rate 1gbit -- python examples/plain_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

shoal.init()
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
loader = shoal.shard(loader)

model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x, y = next(iter(loader))
model, loss_fn, optimizer = shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))

for epoch in range(3):
    total, rows = 0.0, 0
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        rows += len(x)
    mean = total / rows
    mean = shoal.mean(mean, weight=rows)  # over the rows of all processes
    if shoal.world().is_main:
        print(f"epoch {epoch}: loss {mean:.3f}")
