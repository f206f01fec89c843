"""The contenders of `shoal bench` train: two processes give the parameters of one on the global
batch.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn

from shoal.core.errors import UsageError
from shoal_tools.contenders.ddp_hooks import hook_by_name
from shoal_tools.contenders.peers import (
    Peer,
    Workload,
    ddp,
    fsdp2,
    plain,
    ready,
    slowest_rank,
    step_times,
    tuned_ddp,
)

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
Y = X.sin().sum(1, keepdim=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 1)).double()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def workload(rows: slice) -> Workload:
    return Workload(model, nn.MSELoss(), optimizer, (X[rows], Y[rows]))


def trained(peer: Peer, rows: slice) -> torch.Tensor:
    for _ in range(3):
        peer.step(X[rows], Y[rows])
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in peer.model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def low_rank_is_trained(rank: int, rows: slice) -> None:
    """With hooks of rank 1, in two buckets: replicas stay alike, are not exact, and learn."""
    x, y = X.repeat(1, 8), Y.repeat(1, 200)

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 200), nn.Tanh(), nn.Linear(200, 200)).double()

    def gradient_descent(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    work = Workload(wide, nn.MSELoss(), gradient_descent, (x[rows], y[rows]))
    coded = ddp(work, bucket_cap_mb=0.1, hook=hook_by_name("powersgd1"))
    assert coded.name == "ddp:powersgd1 (own), 0.1 MB buckets"
    exact = ddp(work)
    losses = []
    for _ in range(12):
        losses.append(coded.forward(*work.batch).item())
        coded.step(*work.batch)
        exact.step(*work.batch)
    assert losses[-1] < 0.5 * losses[0]
    flat = torch.cat([p.detach().flatten() for p in coded.model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(*both)
    other = torch.cat([p.detach().flatten() for p in exact.model.parameters()])
    assert (flat - other).abs().max() > 1e-4
    coded.close()
    exact.close()


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    expected = trained(plain(workload(slice(0, 8))), slice(0, 8))
    mine = slice(4 * rank, 4 * rank + 4)
    alone = trained(plain(workload(mine)), mine)
    assert (alone - expected).abs().max() > 1e-3, "plain does not communicate"
    for contender in (ddp, fsdp2):
        peer = contender(workload(mine))
        torch.testing.assert_close(
            trained(peer, mine), expected, rtol=1e-10, atol=1e-10, msg=peer.name
        )
        peer.close()
    for name, error in (("fp16", 1e-3), ("bf16", 1e-2), ("powersgd4", 1e-10)):  # too small for it
        peer = ddp(workload(mine), hook=hook_by_name(name))
        torch.testing.assert_close(
            trained(peer, mine), expected, rtol=error, atol=error, msg=peer.name
        )
        peer.close()
    low_rank_is_trained(rank, mine)
    fused = Workload(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
        (X[mine], Y[mine]),
    )
    assert ready("fsdp2", fused).name in ("fsdp2, its optimizer not fused", "fsdp2"), (
        "by whether torch has a rule for it"
    )
    with pytest.raises(UsageError, match="fsdp2 cannot train this recipe"):
        ready("fsdp2", Workload(model, nn.MSELoss(), optimizer, (X[mine].float(), Y[mine])))
    work = Workload(lambda: nn.BatchNorm1d(3).double(), nn.MSELoss(), optimizer, (X[mine], X[mine]))
    wrapped, single = ddp(work), plain(work)
    for _ in range(2):
        wrapped.step(*work.batch)
        single.step(*work.batch)
    own = single.model.running_mean
    torch.testing.assert_close(
        wrapped.model.module.running_mean, own, msg="buffers stay each rank's own"
    )
    fastest = tuned_ddp(workload(mine), candidates_mb=(1, 4), num_steps=1)
    names: list[str] = ["", ""]
    dist.all_gather_object(names, fastest.name)
    assert names[0] == names[1]
    assert names[0] in ("ddp, 1 MB buckets", "ddp, 4 MB buckets")
    assert len(list(step_times(fastest, (X[mine], Y[mine]), num_steps=2))) == 2
    assert slowest_rank([1.0 + rank, 5.0 + rank, 2.0 + rank]) == 3.0
    dist.barrier()
    # all was right; torch's own threads now and then abort a process that ends in the ordinary way
    os._exit(0)


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_are_as_one(tmp_path):
    spawn(one_of_two, args=(str(tmp_path),), nprocs=2)


def test_without_a_process_group_it_says_so():
    for contender in (ddp, fsdp2):
        with pytest.raises(UsageError, match="init_process_group"):
            contender(workload(slice(0, 8)))


class OwnLoss(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


def test_a_model_may_return_its_loss_in_a_dict():
    peer = plain(Workload(lambda: OwnLoss(3, 2).double(), None, optimizer, (X, None)))
    before = peer.model.weight.detach().clone()
    peer.step(X, None)
    assert not torch.equal(peer.model.weight, before)
