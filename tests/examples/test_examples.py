"""The examples are recipes of the size they state, and the plain loop is an ordinary script but for
five lines.
"""

from pathlib import Path

import pytest
import torch

from shoal.front.recipe import Recipe, load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def num_parameters(recipe: Recipe) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in recipe.model().parameters())


def losses(recipe: Recipe, num_steps: int) -> list[float]:
    """The loss in each of a few steps on one batch."""
    model, loss_fn = recipe.model(), recipe.loss()
    optimizer = recipe.optimizer(model.parameters())
    x, y = next(iter(recipe.data()[0]))
    seen = []
    for _ in range(num_steps):
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(
    ("name", "count"), [("digits", 2_138_506), ("alexnet", 61_100_840), ("resnet18", 11_689_512)]
)
def test_sizes(name, count):
    assert num_parameters(load(EXAMPLES / f"{name}.py")) == count


def test_size_of_gpt():
    # its letters depend on the text of this Python
    assert 5e6 < num_parameters(load(EXAMPLES / "gpt.py")) < 6e6


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("digits", 20), pytest.param("gpt", 6, marks=pytest.mark.slow), ("arcface", 10)],
)
def test_learning_starts(name, num_steps):
    seen = losses(load(EXAMPLES / f"{name}.py"), num_steps)
    assert seen[-1] < seen[0] - 0.5


def test_digits_are_cut_into_training_and_test():
    recipe = load(EXAMPLES / "digits.py")
    train, test = recipe.data()
    assert len(train.dataset) + len(test.dataset) == 1797
    rows = {tuple(image.flatten().tolist()) for image, _ in train.dataset}
    assert not rows & {tuple(image.flatten().tolist()) for image, _ in test.dataset}
    assert recipe.accuracy(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1])) == (1, 2)


@pytest.mark.parametrize(("name", "pixels"), [("alexnet", 224), ("resnet18", 128)])
def test_noise_has_the_shape_the_model_takes(name, pixels):
    train, test = load(EXAMPLES / f"{name}.py").data()
    x, y = next(iter(train))
    assert test is None
    assert x.shape == (8, 3, pixels, pixels)
    assert y.shape == (8,)


def test_resnet_takes_a_batch():
    recipe = load(EXAMPLES / "resnet18.py")
    assert recipe.model().eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_gpt_sees_only_letters_before():
    recipe = load(EXAMPLES / "gpt.py")
    model, (x, y) = recipe.model(), next(iter(recipe.data()[1]))
    assert torch.equal(x[:, 1:], y[:, :-1])
    changed = x[:1].clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = model(x[:1]), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-5)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-5)


def test_the_plain_loop_is_an_ordinary_script_but_for_five_lines_and_two_that_report(capsys):
    lines = (EXAMPLES / "plain_loop.py").read_text().partition('"""\n\n')[2].splitlines()
    always = [line.replace("if shoal.world().is_main:", "if True:") for line in lines]
    ordinary = [line for line in always if "shoal" not in line and not line.startswith("x, y =")]
    assert len(lines) - len(ordinary) == 5 + 1
    assert sum("is_main" in line for line in lines) == 1
    exec(compile("\n".join(ordinary), "plain_loop.py without shoal", "exec"), {})
    first, *_, last = [
        float(line.split("loss ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()
    ]
    assert last < first
