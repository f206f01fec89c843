"""Habits of ordinary loops, a function each: it makes one step of training with a model.

They are what replication allows. So they must train on whatever a plan has chosen.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shoal

WIDTH, CLASSES = 6, 7


class Net(nn.Module):
    """A chain of linear layers, behind a table of ids or a batch norm if it has one."""

    def __init__(
        self,
        *,
        of_ids: bool = False,
        with_norm: bool = False,
        hidden: int = 8,
        classes: int = CLASSES,
        words: int = 11,
        act: Callable[[], nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(words, WIDTH) if of_ids else None
        self.first = nn.Linear(WIDTH, hidden)
        self.norm = nn.BatchNorm1d(hidden) if with_norm else None
        self.act = act()
        self.a, self.b = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.c = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None else self.table(x).mean(1)
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        hidden = self.act(self.a(torch.tanh(x)))
        output: Tensor = self.c(torch.tanh(self.b(hidden)))
        return output


@dataclass(frozen=True)
class Step:
    """A step of a loop: the model, its loss and optimizer, and a batch."""

    model: Any
    loss_fn: Any
    optimizer: Any
    x: Tensor
    y: Tensor

    def plain(self) -> None:
        """Make the ordinary step."""
        self.optimizer.zero_grad()
        self.loss_fn(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def end(self, loss: Tensor, **how: Any) -> None:
        """Go back from a loss, and step."""
        self.optimizer.zero_grad()
        loss.backward(**how)
        self.optimizer.step()

    def layers(self) -> list[nn.Module]:
        """The linear layers behind the first."""
        return [self.model.a, self.model.b, self.model.c]


Habit = Callable[[Step], None]
HABITS: dict[str, Habit] = {}
OF_INPUTS = {"gradient penalty", "gradient penalty of the loss", "gradient of inputs"}


def habit(function: Habit) -> Habit:
    """Take a function among the habits, by its name in words."""
    HABITS[function.__name__.strip("_").replace("_", " ")] = function
    return function


@habit
def gradient_penalty(step: Step) -> None:
    x = step.x.clone().requires_grad_()
    output = step.model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    step.end(step.loss_fn(step.model(step.x), step.y) + penalty)


@habit
def gradient_penalty_of_the_loss(step: Step) -> None:
    x = step.x.clone().requires_grad_()
    loss = step.loss_fn(step.model(x), step.y)
    (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
    step.end(loss + slope.square().sum(1).mean())


@habit
def gradient_of_inputs(step: Step) -> None:
    x = step.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(step.loss_fn(step.model(x), step.y) * len(x), x)
    step.end(step.loss_fn(step.model(step.x + 0.1 * slope.sign()), step.y))


@habit
def output_in_place(step: Step) -> None:
    output = step.model(step.x)
    output /= 2
    output[:, 0] = 0.25
    output[:, 1:3] *= 2
    output.sigmoid_()
    step.end(step.loss_fn(output, step.y))


@habit
def a_view_of_the_output_in_place(step: Step) -> None:
    output = step.model(step.x)
    rows = output[1:]
    output.view(-1, output.shape[-1]).mul_(2)
    output[:, 2].zero_()
    step.end(step.loss_fn(output, step.y) + rows.mean() * 0)


@habit
def hook_on_the_output(step: Step) -> None:
    output = step.model(step.x)
    output.register_hook(lambda grad: grad * 0.5)
    step.end(step.loss_fn(output, step.y))


@habit
def retained_gradient_of_the_output(step: Step) -> None:
    output = step.model(step.x)
    output.retain_grad()
    step.end(step.loss_fn(output, step.y))
    assert output.grad is not None and output.grad.shape == output.shape
    assert float(output.grad.abs().sum()) > 0


@habit
def hooks_that_read(step: Step) -> None:
    seen: list[float] = []
    hooks = [
        layer.register_forward_hook(lambda m, args, out: seen.append(float(out.detach().mean())))
        for layer in step.layers()
    ]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def hooks_that_change(step: Step) -> None:
    hooks = [
        step.model.a.register_forward_hook(lambda m, args, out: out * 0.5),
        step.model.c.register_forward_hook(lambda m, args, out: out.tanh()),
        step.model.b.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    ]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def hooks_that_change_in_place(step: Step) -> None:
    def halved(module: nn.Module, args: Any, out: Tensor) -> None:
        out.mul_(0.5)

    hooks = [layer.register_forward_hook(halved) for layer in step.layers()]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def hooks_on_what_layers_give(step: Step) -> None:
    def hang(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.5)

    hooks = [layer.register_forward_hook(hang) for layer in step.layers()]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def hooks_before_changes_in_place(step: Step) -> None:
    def hang(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.5)
            out.mul_(2)

    hooks = [layer.register_forward_hook(hang) for layer in step.layers()]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def backward_hooks(step: Step) -> None:
    def halved(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
        return (grad_in[0] * 0.5,)

    hooks = [layer.register_full_backward_hook(halved) for layer in step.layers()]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def a_graph_twice(step: Step) -> None:
    step.optimizer.zero_grad()
    loss = step.loss_fn(step.model(step.x), step.y)
    loss.backward(retain_graph=True)
    loss.backward()
    step.optimizer.step()


@habit
def two_losses_of_an_output(step: Step) -> None:
    step.optimizer.zero_grad()
    output = step.model(step.x)
    step.loss_fn(output, step.y).backward(retain_graph=True)
    (0.1 * output.square().mean()).backward()
    step.optimizer.step()


@habit
def moves_that_change_nothing(step: Step) -> None:
    step.model.cpu().double().to("cpu").to(torch.float64).to(device="cpu", dtype=torch.float64)
    step.plain()
    step.model.to(step.model.c.weight.dtype)
    for layer in step.layers():
        layer.double()


@habit
def clipped_weights(step: Step) -> None:
    step.plain()
    for parameter in step.model.parameters():
        parameter.data.clamp_(-0.3, 0.3)
        parameter.data.mul_(1.1).add_(torch.full_like(parameter.data, 0.01))
        parameter.data[0] = parameter.data[0] * 0.5
        parameter.data[1:].view(-1)[0] = 0.125
        parameter.data = parameter.data * 0.9 + 0.01


@habit
def changes_under_no_grad(step: Step) -> None:
    step.plain()
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter[0] = 0.1
            parameter[1].fill_(0.2)
            parameter.sign_().mul_(0.1)
            parameter.add_(parameter * 0.5)
            parameter -= 0.01 * parameter
        nn.init.constant_(step.model.c.bias, 0.1)
        nn.init.eye_(step.model.b.weight)
        torch._foreach_mul_(list(step.model.parameters()), 0.9)


@habit
def sgd_by_hand(step: Step) -> None:
    step.model.zero_grad()
    step.loss_fn(step.model(step.x), step.y).backward()
    for parameter in step.model.parameters():
        parameter.data.add_(parameter.grad.data, alpha=-0.1)
    step.optimizer.zero_grad()


@habit
def average_by_hand(step: Step) -> None:
    shadow = {name: p.data.clone() for name, p in step.model.named_parameters()}
    step.plain()
    for name, p in step.model.named_parameters():
        shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    kept = {}
    for name, p in step.model.named_parameters():
        kept[name] = p.data
        p.data = shadow[name]
    step.plain()
    for name, p in step.model.named_parameters():
        p.data = kept[name]


@habit
def hooks_on_parameters(step: Step) -> None:
    hooks = [p.register_hook(lambda grad: grad * 0.5) for p in step.model.c.parameters()]
    step.plain()
    for hook in hooks:
        hook.remove()


@habit
def gradients_in_place(step: Step) -> None:
    step.optimizer.zero_grad()
    step.loss_fn(step.model(step.x), step.y).backward()
    for parameter in step.model.parameters():
        parameter.grad.mul_(0.5)
        parameter.grad.data.add_(0.01)
    clip_grad_value_(step.model.parameters(), 0.05)
    clip_grad_norm_(step.model.parameters(), 0.05)
    step.optimizer.step()


@habit
def frozen_and_thawed(step: Step) -> None:
    for parameter in step.model.b.parameters():
        parameter.requires_grad_(False)
    step.plain()
    for parameter in step.model.b.parameters():
        parameter.requires_grad = True
    step.plain()


@habit
def accumulated(step: Step) -> None:
    step.optimizer.zero_grad()
    for factor in (0.5, 0.25):
        (factor * step.loss_fn(step.model(step.x), step.y)).backward()
    step.optimizer.step()


@habit
def evaluated_by_all(step: Step) -> None:
    step.model.eval()
    with torch.no_grad():
        output = step.model(step.x)
        output /= 2
        output.detach().cpu().numpy()
        output.data.argmax(1).tolist()
    step.model.train()
    step.plain()


def rank_0_evaluates(step: Step) -> None:
    """Evaluate on rank 0 alone, and step on all ranks."""
    if shoal.world().is_main:
        step.model.eval()
        with torch.no_grad():
            step.model(step.x).argmax(1)
        step.model.train()
    step.plain()


def rank_0_reads(step: Step) -> None:
    """Read states on rank 0 alone behind a step, and keep a copy of the model."""
    step.plain()
    if shoal.world().is_main:
        torch.save([step.model.state_dict(), step.optimizer.state_dict()], io.BytesIO())
        copy.deepcopy(step.model)


def rank_0_looks_at_the_output(step: Step) -> None:
    """Read the output on rank 0 alone: before backward, behind it, and behind the step."""
    log: list[Any] = []

    def look(output: Any) -> None:
        if shoal.world().is_main:
            log.append((f"{output[0]}", output.detach().cpu().numpy(), output.softmax(-1).max()))
            log.append((output.argmax(-1) == step.y).float().mean().item())
            log.append((step.loss_fn(output, step.y).item(), output.topk(2)[1], output.sum()))

    step.optimizer.zero_grad()
    output = step.model(step.x)
    look(output)
    loss = step.loss_fn(output, step.y)
    loss.backward()
    look(output)
    step.optimizer.step()
    look(output)


# habits that take a second, in which the other ranks are found to be elsewhere
ALONE: dict[str, Habit] = {
    "rank 0 evaluates": rank_0_evaluates,
    "rank 0 reads": rank_0_reads,
    "rank 0 looks at the output": rank_0_looks_at_the_output,
}
