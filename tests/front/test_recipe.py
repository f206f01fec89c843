"""Recipes: what a file must offer, and what is said when it does not."""

import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shoal.core.errors import UsageError
from shoal.front.recipe import load

GOOD = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    def data():
        return DataLoader([1.0, 2.0])

    def model():
        return nn.Linear(2, 3)

    def loss():
        return nn.MSELoss()

    def optimizer(params):
        return torch.optim.SGD(params, lr=0.5)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # load puts it there too; this takes it away again

    def write(text, name="recipe.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_recipe_builds_what_it_says(write):
    recipe = load(write(GOOD))
    model = recipe.model()
    assert isinstance(model, nn.Linear)
    assert recipe.model() is not model
    assert recipe.optimizer(model.parameters()).param_groups[0]["lr"] == 0.5
    assert recipe.loss()(torch.ones(2), torch.zeros(2)) == 1
    train, test = recipe.data()
    assert len(train) == 2
    assert test is None
    assert (recipe.accuracy, recipe.epochs) == (None, 1)


def test_optional_parts(write):
    more = """
    EPOCHS = 7

    def data():
        return DataLoader([1.0]), DataLoader([2.0, 3.0])

    def accuracy(output, target):
        return 1, 2
    """
    recipe = load(write(GOOD + more))
    assert recipe.epochs == 7
    assert recipe.accuracy(None, None) == (1, 2)
    train, test = recipe.data()
    assert (len(train), len(test)) == (1, 2)


def test_a_recipe_may_import_what_lies_beside_it_and_be_called_as_a_library_is(write):
    write("WIDTH = 5", name="widths_of_this_test.py")
    late = """
    def model():
        import widths_of_this_test
        return nn.Linear(1, widths_of_this_test.WIDTH)
    """
    recipe = load(
        write("from __future__ import annotations\n" + textwrap.dedent(GOOD + late), name="json.py")
    )
    assert recipe.model().out_features == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("def loss", "def losses"),
            r"no function loss(?s:.)*it has data, model, losses, optimizer(?s:.)*rename losses",
        ),
        (("def data", "def _hidden"), r"no function data(?s:.)*do this: define data\(\)"),
        (("def data():", "def data(:"), r"not Python(?s:.)*line 6(?s:.)*def data\(:"),
        (
            ("def data", "import not_there_at_all\n    def data"),
            r"fails(?s:.)*line 6(?s:.)*ModuleNotFoundError(?s:.)*install not_there_at_all",
        ),
        (
            ("def optimizer(params)", "def optimizer()"),
            r"optimizer(?s:.)*other arguments(?s:.)*optimizer\(params\)",
        ),
        (
            ("def model():", "model = nn.Linear(1, 1)\n    def unused():"),
            r"model(?s:.)*not a function(?s:.)*built already",
        ),
        (("import torch", "EPOCHS = 0\n    import torch"), "EPOCHS"),
        (("import torch", "SYNC_BATCHNORM = 1\n    import torch"), "sync_batchnorm is True or"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(write, change, says):
    with pytest.raises(UsageError, match=says):
        load(write(GOOD.replace(*change, 1)))


def test_a_missing_file_names_its_neighbour(write):
    path = write(GOOD, name="alexnet.py")
    with pytest.raises(UsageError, match=r"no such recipe(?s:.)*did you mean (?s:.)*alexnet\.py"):
        load(path.with_name("alexnt.py"))


@pytest.mark.parametrize(
    ("builder", "change", "says"),
    [
        (
            "data",
            ("DataLoader([1.0, 2.0])", "DataLoader([1]), DataLoader([1]), None"),
            r"got: \(DataLoader, DataLoader",
        ),
        ("model", ("nn.Linear(2, 3)", "nn.Linear"), r"expected: model\(\) -> nn\.Module"),
        ("loss", ("nn.MSELoss()", "'mse'"), "got: str"),
        ("optimizer", ("torch.optim.SGD(params, lr=0.5)", "None"), "got: NoneType"),
    ],
)
def test_a_builder_that_returns_something_else_is_refused(write, builder, change, says):
    recipe = load(write(GOOD.replace(*change)))
    with pytest.raises(UsageError, match=says):
        getattr(recipe, builder)(*([[]] if builder == "optimizer" else []))


def test_loaders_come_back_as_they_are(write):
    train, _ = load(write(GOOD)).data()
    assert type(train) is DataLoader


def test_a_script_is_refused_before_it_runs(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("model = loss = optimizer = None\nraise SystemExit('it ran')\n")
    with pytest.raises(UsageError, match="the recipe has no function data"):
        load(path)


def test_the_line_that_fails_is_told_of_a_relative_path_too(tmp_path, monkeypatch):
    builders = "def data(): ...\ndef model(): ...\ndef loss(): ...\ndef optimizer(params): ...\n"
    (tmp_path / "recipe.py").write_text(builders + "raise OSError\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"recipe\.py, line 5"):
        load("recipe.py")


OF_BATCH = GOOD.replace(
    """    def loss():
        return nn.MSELoss()
""",
    """    def compute_loss(model, batch):
        return model(batch["x"]).mean()

    def count(batch):
        return 2 * len(batch["x"])

    def accuracy(model, batch):
        return float(model(batch["x"]).sum()), len(batch["x"])
""",
)


def test_a_recipe_that_computes_the_loss_of_a_batch(write):
    recipe = load(write(OF_BATCH))
    batch = recipe.batch({"x": torch.ones(3, 2)})
    assert recipe.loss() is None
    assert torch.equal(recipe.objective().loss(lambda x: x, batch), torch.tensor(1.0))
    assert recipe.count(batch) == 6
    assert recipe.right(lambda x: x, batch) == (6.0, 3)


def test_a_recipe_with_two_losses_is_refused(write):
    more = """
    def loss():
        return nn.MSELoss()
"""
    with pytest.raises(UsageError, match="both loss"):
        load(write(OF_BATCH + more))


@pytest.mark.parametrize(
    ("old", "new", "usage"),
    [
        ("compute_loss(model, batch)", "compute_loss(batch)", r"compute_loss\(model, batch\)"),
        ("accuracy(model, batch)", "accuracy(model, x, y)", r"accuracy\(model, batch\)"),
        ("count(batch)", "count(output, y)", r"count\(batch\)"),
    ],
)
def test_functions_of_a_batch_that_take_other_arguments(write, old, new, usage):
    with pytest.raises(UsageError, match=usage):
        load(write(OF_BATCH.replace(old, new)))
