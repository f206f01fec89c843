"""The peak of a process whose steps go by codes: above exact by what codes lose, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

# two ranks as threads of a process of its own, with 17 MB of weights each; prints for each way the
# peak of three steps above the process's memory before, in models of a rank
SCRIPT = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import shoal
from shoal.comm.threads import run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal.profiling import steps

torch.set_num_threads(1)
steps._MOST = 1  # ways are pinned, so times do not count
RANKS, WIDTH, LAYERS = 2, 512, 16
CLUSTER = Cluster(Topology(("a", "b")), Link(1e-4, 1e7))
# a layer each, so that three on their way at the same moment are a small part of a model
BUCKETS = shoal.SearchOptions(bucket_bytes=(4 * WIDTH * WIDTH,))

def resident(what):
    found = re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10

def peak(way):
    before = resident("RssAnon")
    files = []
    def work(comm):
        with using(comm, CLUSTER):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            random = torch.Generator().manual_seed(comm.rank)
            x, y = torch.randn(2, 4, WIDTH, generator=random)
            given = model, F.mse_loss, optimizer
            how = {"pins": {"*": way}, "search_options": BUCKETS}
            _, loss_fn, _ = shoal.parallelize(*given, sample=(x, y), **how)
            for step in range(6):
                if step == 3:
                    comm.gather_objects(None, "all have made three steps")
                    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
                    files.append(resident("RssFile"))
                    comm.gather_objects(None, "and go on")
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            comm.gather_objects(None, "the last step has ended")
    run(RANKS, work, timeout_s=300)
    # pages of files come and go as others need memory: those that were there twice are left out
    highest = resident("VmHWM") - max(*files, resident("RssFile"))
    return (highest - before) / (4 * WIDTH * WIDTH * LAYERS) / RANKS

peak(sys.argv[1])  # loads what PyTorch loads late
print(*(peak(way) for way in sys.argv[1:]))
"""
# bound in models: one of losses, and what lanes work with. Three buckets on their way, each a 16th
# of a model, take a copy, a code and decoded values
MOST = 1.5
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


@pytest.mark.slow
@pytest.mark.timeout(400)  # of a machine that others load
@pytest.mark.parametrize(
    ("exact", "codecs"),
    [
        ("sliced:direct", ("int8", "top_k")),
        ("replicate:allreduce", ("low_rank",)),
        ("sliced:direct", ("bfloat16", "int4", "one_bit", "low_rank")),
    ],
)
def test_codes_take_the_memory_of_what_they_lose(exact: str, codecs: tuple[str, ...]) -> None:
    """A number for each value that a rank sends is a model; the rest is passing."""
    ways = [exact, *(f"{exact}+{codec}" for codec in codecs)]
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *ways],
        env={**os.environ, **MALLOC},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    plain, *coded = map(float, made.stdout.split())
    for codec, models in zip(codecs, coded, strict=True):
        assert 0.5 < models - plain < MOST, (codec, models, plain)
