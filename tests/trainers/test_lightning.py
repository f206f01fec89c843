"""Lightning beyond the contract: manual optimisation, metrics, evaluation, and errors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from starting import on_ranks

import shoal

lightning = pytest.importorskip("pytorch_lightning")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TRAINED = [
    "plain",
    "scheduled",
    "windows_of_three",
    "ended_early",
    "clipped_by_value",
    "precise",
    "normed",
    "manual",
    "manual_cut",
    "manual_windows",
    "gan",
    "beside",
    "beside_alike",
    "beside_dropped",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    """Run all cases in one process and on two ranks."""
    return on_ranks("lightning_cases.py", folder=folder)


@pytest.mark.parametrize("case", [*TRAINED, "evaluated"])
def test_weights_are_those_of_one_process(found: Any, case: str) -> None:
    expected = found[1, 0][case]["weights"]
    for rank in (0, 1):
        weights = found[2, rank][case]["weights"]
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("case", TRAINED)
def test_steps_rates_and_own_lists_are_those_of_one_process(found: Any, case: str) -> None:
    """What is measured leaves no trace in lists and counts of the module, nor in schedulers."""
    for name in ("steps", "rates", "own"):
        assert found[2, 0][case][name] == found[2, 1][case][name] == found[1, 0][case][name]
    assert not found[2, 0][case]["extended"]  # released in teardown


@pytest.mark.parametrize("case", ["plain", "windows_of_three"])
def test_an_epoch_s_mean_is_over_all_rows(found: Any, case: str) -> None:
    """Lightning alone would divide by a rounded number: 13 in place of 13.5 rows a rank."""
    expected = found[1, 0][case]["epoch"]
    assert expected > 0
    assert found[2, 0][case]["epoch"] == pytest.approx(expected, rel=1e-12)
    assert found[2, 1][case]["epoch"] == pytest.approx(expected, rel=1e-12)


def test_a_scaler_leaves_out_the_same_steps(found: Any) -> None:
    """Half of a batch has gradients of twice the size, so it may overflow at half the scale."""
    one, *ranks = (found[place]["scaled"] for place in ((1, 0), (2, 0), (2, 1)))
    assert 1.0 < one["scale"] < 2.0**40
    assert ranks[0]["scale"] == ranks[1]["scale"]
    assert ranks[0]["scale"] in (one["scale"] / 2, one["scale"])
    for own in ranks:
        torch.testing.assert_close(own["weights"], ranks[0]["weights"], atol=0, rtol=0)
        for name, value in one["weights"].items():
            torch.testing.assert_close(own["weights"][name], value, atol=2e-3, rtol=0)


def test_training_goes_on_in_mid_epoch_on_three_ranks(found: Any, folder: Path) -> None:
    expected = found[1, 0]["plain"]["weights"]
    three = on_ranks("lightning_cases.py", folder=folder, sizes=[3], also=["gone_on"])
    for own in (three[3, 0], three[3, 2], found[2, 1]):
        for name, value in expected.items():
            torch.testing.assert_close(own["gone_on"]["weights"][name], value, atol=1e-10, rtol=0)


def test_evaluation_is_that_of_one_process(found: Any) -> None:
    one = found[1, 0]["evaluated"]
    for rank in (0, 1):
        own = found[2, rank]["evaluated"]
        assert (own["epochs"], own["best"]) == (one["epochs"], one["best"])
        assert own["values"] == pytest.approx(one["values"], rel=1e-12)


def test_predictions_are_of_every_row_once(found: Any) -> None:
    one, *ranks = (found[place]["evaluated"] for place in ((1, 0), (2, 0), (2, 1)))
    assert sorted(row for rank in ranks for row in rank["predicted"]) == one["predicted"]
    for own in (one, *ranks):
        assert own["noted"] == own["predicted"]  # as a BasePredictionWriter is told


@pytest.mark.parametrize(
    "attempt, said",
    [
        ("meta", "meta device"),
        ("pipeline", "manual optimisation"),
        ("option", "no option pinz"),
        ("loss", "no option compute_loss"),
        ("batch", "unknown kind of batch"),
        ("iter", "dataloader_iter"),
        ("sharded", "shoal.shard"),
        ("beside", "several loaders"),
        ("none", "returned None"),
    ],
)
def test_refusals_say_what_and_what_to_do(found: Any, attempt: str, said: str) -> None:
    for rank in (0, 1):
        first, *rest = found[2, rank]["refused"]["texts"][attempt].splitlines()
        assert said in first
        assert any("do this" in line or "expected" in line for line in rest)


@pytest.mark.parametrize("version", ["2.5.9", "3.0.0", "3.1"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    adapter = importlib.import_module("shoal.integrations.lightning_package")
    monkeypatch.setattr(lightning, "__version__", version)
    with pytest.raises(shoal.UsageError, match="version of pytorch-lightning") as refused:
        adapter.installed()
    assert version in str(refused.value)
    assert "pip install" in str(refused.value)


def test_without_lightning_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = importlib.import_module("shoal.integrations.lightning_package")
    monkeypatch.setattr(adapter, "_PACKAGES", ("no_such_package",))
    with pytest.raises(shoal.UsageError, match="not installed"):
        adapter.installed()


def test_a_silent_module_logs_nothing() -> None:
    """Without a trainer, or in a measured step, `log` would warn, or wait for other ranks."""
    traceless = importlib.import_module("shoal.integrations.untraced_steps")
    module = lightning.LightningModule()
    with traceless.silent(module, lightning.LightningModule):
        module.log("loss", 1.0)
    with pytest.warns(UserWarning, match="not registered"):
        module.log("loss", 1.0)


def test_a_silent_step_that_fails_leaves_layers_as_they_train() -> None:
    """A step that is measured on one row fails in batch norm, between two toggles."""
    traceless = importlib.import_module("shoal.integrations.untraced_steps")
    module = lightning.LightningModule()
    module.layer, module.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    module.frozen.requires_grad_(False)
    with (
        pytest.raises(ValueError, match="one row"),
        traceless.silent(module, lightning.LightningModule),
    ):
        module.layer.requires_grad_(False)
        module.frozen.requires_grad_(True)
        raise ValueError("one row")
    assert [p.requires_grad for p in module.parameters()] == [True, True, False, False]


def test_an_unseen_step_is_put_back() -> None:
    traceless = importlib.import_module("shoal.integrations.untraced_steps")
    module = lightning.LightningModule()
    module.losses, module.total = [1.0], torch.ones(2)
    losses, total = module.losses, module.total
    with traceless.unseen(module, lightning.LightningModule):
        module.losses.append(2.0)
        module.total += 1
        module.last = 3
    assert module.losses is losses and losses == [1.0]
    assert module.total is total and total.tolist() == [1.0, 1.0]
    assert not hasattr(module, "last")
