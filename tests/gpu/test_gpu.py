"""What needs a GPU. One is enough: two processes share it. `make test-gpu` runs these."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import gpu_overhead
import on_ranks
import pytest
import torch
from torch import nn

import shoal
from free_ports import free_port
from shoal.comm.threads import ThreadComm
from shoal.front.session_start import using

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.timeout(300),
]

# Ranks on one GPU: NCCL takes it for those of two hosts, which only have each other's network.
BY_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}


def trained(own_variables: Mapping[str, str], *cases: str) -> list[str]:
    """What two ranks on one GPU print; of each, NCCL_HOSTID is its own where NCCL is to carry."""
    port = str(free_port())
    with Path(os.devnull).open() as nothing:
        ranks = [
            subprocess.Popen(
                [sys.executable, on_ranks.__file__, *cases],
                env={
                    **os.environ,
                    **own_variables,
                    **({"NCCL_HOSTID": f"host{rank}"} if own_variables else {}),
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                stdin=nothing,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
    printed = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)
    return printed[0].splitlines()


def test_two_ranks_on_one_gpu_train_as_one_process() -> None:
    lines = trained({})
    assert "carried by NCCL: False" in lines


def test_ranks_that_nccl_reaches_train_as_one_process() -> None:
    lines = trained(BY_NCCL)
    assert "carried by NCCL: True" in lines


@pytest.mark.parametrize("strategy", ["replicate", "sliced"])
def test_a_step_waits_for_the_gpu_nowhere(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(8, (32,), device="cuda")
    with shoal.core.registry.registered(gpu_overhead.Loopback), using(ThreadComm()):
        work = gpu_overhead.Work(model, optimizer, nn.CrossEntropyLoss(), x, y)
        work = gpu_overhead.attached(work, strategy)
        for _ in range(3):
            work.step()
        with warnings.catch_warnings(action="ignore"):  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                work.step()
            torch.accelerator.current_stream().record_event().synchronize()
        finally:
            torch.cuda.set_sync_debug_mode("default")
