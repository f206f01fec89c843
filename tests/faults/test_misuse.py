"""Models, losses and hooks that `parallelize` or the first step refuses where they stand."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from bad_cases import batch, model, sgd
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using


def test_the_same_model_twice() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8))):
            its_model = model()
            for _ in range(2):
                shoal.parallelize(
                    its_model,
                    nn.CrossEntropyLoss(),
                    sgd(its_model.parameters()),
                    sample=batch(comm.rank),
                )

    with pytest.raises(UsageError, match="parallelised already"):
        run(2, work)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.functional.mse_loss], ids=["module", "function"])
def test_a_loss_that_counts_for_two_models_is_refused(loss: Any) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8), 1.0)):
            first, second = nn.Linear(6, 3), nn.Linear(6, 3)
            sample = torch.full((2, 6), 1.0 + comm.rank), torch.ones(2, 3)

            def parallelized(model: nn.Module, loss_fn: Any) -> Any:
                options = {"sample": sample, "count": lambda output, y: len(y)}
                return shoal.parallelize(model, loss_fn, sgd(model.parameters()), **options)[1]

            used = parallelized(first, copy.deepcopy(loss))
            with pytest.raises(UsageError, match="counted for another model already"):
                parallelized(second, used)
            with pytest.raises(UsageError, match="counted for another model already"):
                shoal.parallelize(second, used, sgd(second.parameters()), sample=sample)
            parallelized(second, copy.deepcopy(used) if isinstance(used, nn.Module) else loss)

    run(2, work, timeout_s=20)


@pytest.mark.parametrize("way", ["factor", "replicate"])
def test_a_hook_on_accumulated_gradients_is_refused_as_it_would_see_one_rank_alone(
    way: str,
) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b")), Link(1e-4, 1e8))):
            its_model, (x, y) = model(), batch(comm.rank)
            _, loss_fn, _ = shoal.parallelize(
                its_model,
                nn.CrossEntropyLoss(),
                sgd(its_model.parameters()),
                sample=(x, y),
                pins={"head": way},
            )
            its_model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
            loss_fn(its_model(x), y).backward()

    with pytest.raises(UsageError, match=r"hooks? on (the )?accumulated gradient"):
        run(2, work)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"start_timeout_s": -1}])
def test_time_outs_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="more than 0 s"):
        shoal.init(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "way",
    [
        "sliced",
        "column",
        pytest.param("replicate", marks=pytest.mark.slow),
        pytest.param("factor", marks=pytest.mark.slow),
    ],
)
def test_a_module_of_a_model_that_was_parallelised_is_refused_and_its_copy_is_not(way: str) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("h0", "h1")), Link(1e-4, 1e8), 1.0)):
            encoder, loss = nn.Linear(6, 6), nn.CrossEntropyLoss()
            first = nn.Sequential(encoder, nn.Linear(6, 3))
            shoal.parallelize(
                first,
                loss,
                sgd(first.parameters()),
                sample=batch(comm.rank),
                pins={"0": way, "1": "replicate"},
            )
            copied = copy.deepcopy(encoder)
            del first
            gc.collect()
            second = nn.Sequential(encoder, nn.Linear(6, 3))
            with pytest.raises(UsageError, match="was that of a parallelised model") as caught:
                shoal.parallelize(second, loss, sgd(second.parameters()), sample=batch(comm.rank))
            assert "parameter 0.weight" in str(caught.value)
            third = nn.Sequential(copied, nn.Linear(6, 3))
            shoal.parallelize(third, loss, sgd(third.parameters()), sample=batch(comm.rank))
            loss(third(batch(comm.rank)[0]), batch(comm.rank)[1]).backward()

    run(2, work, timeout_s=20)


def test_a_parameter_of_two_parallelised_models_is_refused() -> None:
    def work(comm: ThreadComm) -> str:
        with using(comm, Cluster(Topology(("h0", "h1")), Link(1e-4, 1e8), 1.0)):
            body = nn.Linear(6, 6)
            actor, critic = (
                nn.Sequential(body, nn.Linear(6, 3)),
                nn.Sequential(body, nn.Linear(6, 3)),
            )
            loss = nn.CrossEntropyLoss()
            shoal.parallelize(actor, loss, sgd(actor.parameters()), sample=batch(comm.rank))
            with pytest.raises(UsageError, match="another parallelised model too") as caught:
                shoal.parallelize(critic, loss, sgd(critic.parameters()), sample=batch(comm.rank))
            return str(caught.value)

    assert all("parameter 0.weight" in told for told in run(2, work, timeout_s=20))
