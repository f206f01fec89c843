"""Checkpoints: jobs killed while they save, full disks, and what saving costs a step.

    .venv/bin/python benchmarks/checkpoints.py kills [--times 200]      about 10 minutes
    sudo .venv/bin/python benchmarks/checkpoints.py full [--times 200]  about 5 minutes; a tmpfs
    sudo .venv/bin/python benchmarks/checkpoints.py cost [--rounds 4]   about 15 minutes; a quiet
                                                                        machine, a lab of 4 hosts

kills, full: a forked job saves again and again, each time numbers that say which save it was. It is
killed at a random moment, or its disk is full at a random place. Then the newest complete
checkpoint is read, every byte of it, and must be one that the job had finished, or the next.

cost: AlexNet with momentum at 1 Gbit/s. Blocks of 20 steps with one save beside them and without
take turns. Printed are the training thread's share in saving, and how much longer blocks are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.checkpoint.run import RunFolder, step_of
from shoal.front.recipe import load as load_recipe

HERE = Path(__file__).parent
STEPS = 20  # from one save to the next


def objects(numel: int) -> dict[str, object]:
    """A model and its optimizer, whose every number can say which save it was."""
    model = nn.Linear(numel // 64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": torch.zeros_like(model.weight)}
    return {"model": model, "optimizer": optimizer}


def mark(saved: dict[str, object], number: int) -> None:
    """Let them say so."""
    model, optimizer = saved["model"], saved["optimizer"]
    assert isinstance(model, nn.Linear) and isinstance(optimizer, torch.optim.Optimizer)
    model.weight.data.fill_(number)
    optimizer.state[model.weight]["momentum_buffer"].fill_(-number)


def job(folder: Path, numel: int, told: int, one_name: bool) -> None:
    """Save until somebody ends this process; tell the number of each save that is done."""
    saved = objects(numel)
    if one_name:
        for number in range(1, 1000):
            mark(saved, number)
            shoal.save(folder / "saved", **saved, number=number)
            os.write(told, f"{number}\n".encode())
        return
    checkpoints = shoal.Checkpoints(folder, every_s=1e-6, keep=2, **saved, number=0)
    checkpoints.resume()
    for number in range(checkpoints.steps + 1, checkpoints.steps + 1000):
        mark(saved, number)
        checkpoints.steps = number
        checkpoints.save(number=number)
        os.write(told, f"{number}\n".encode())


def read(folder: Path, numel: int, one_name: bool) -> int:
    """Which save the newest complete checkpoint is; 0 where there is none. All of it is checked."""
    name = "saved" if one_name else RunFolder(folder).newest()
    saved = objects(numel)
    try:
        number = shoal.load(folder / (name or "none"), **saved, number=0)["number"]
    except shoal.UsageError as error:
        if "there is no such checkpoint" in str(error):
            return 0
        raise
    model, optimizer = saved["model"], saved["optimizer"]
    assert isinstance(model, nn.Linear) and isinstance(optimizer, torch.optim.Optimizer)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert bool((model.weight == number).all()) and bool((momentum == -number).all()), "a mixture"
    assert one_name or step_of(name or "") == number
    return number


def killed(times: int, numel: int = 1 << 20) -> Counter[str]:
    """Kill jobs at random moments; what was found."""
    found: Counter[str] = Counter()
    draw = random.Random(0)
    for turn in range(times):
        one_name = turn % 2 == 1
        with tempfile.TemporaryDirectory(prefix="shoal-checkpoints-") as name:
            folder, last = Path(name), 0
            for _ in range(2):  # the second goes on from where the first was killed
                last = killed_once(folder, numel, one_name, draw, last, found)
    return found


def killed_once(
    folder: Path, numel: int, one_name: bool, draw: random.Random, last: int, found: Counter[str]
) -> int:
    """Kill one job; the number of the checkpoint that is there."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            job(folder, numel, writing, one_name)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        time.sleep(draw.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done = [int(line) for line in told.read().split()]
    half = any(folder.glob("*.tmp-*"))
    number = read(folder, numel, one_name)
    finished = max(done, default=0 if one_name else last)
    if one_name and not done:
        finished = 0  # this job counts from 1 again
    expected = {finished, finished + 1} | ({last} if not done else set())
    assert number in expected, f"checkpoint {number}, where {sorted(expected)} were expected"
    found["killed"] += 1
    found["in the middle of a save"] += half
    found["the one that was being finished"] += number == finished + 1
    return number


def full(times: int) -> Counter[str]:
    """Let jobs save on disks of random sizes until these are full."""
    found: Counter[str] = Counter()
    draw, numel = random.Random(0), 1 << 18
    for turn in range(times):
        one_name = turn % 2 == 1
        with tempfile.TemporaryDirectory(prefix="shoal-checkpoints-") as name:
            size = draw.randrange(1 << 16, 10 << 20)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "shoal-full", name]
            subprocess.run(mount, check=True)
            try:
                found.update(filled(Path(name), numel, one_name))
            finally:
                subprocess.run(["umount", name], check=True)
    return found


def filled(folder: Path, numel: int, one_name: bool) -> Counter[str]:
    """Save until the disk is full; what is there then."""
    saved, done, path = objects(numel), 0, folder / "run"
    checkpoints = None
    try:
        if not one_name:
            checkpoints = shoal.Checkpoints(path, keep=9, **saved, number=0)
        for number in range(1, 100):
            mark(saved, number)
            if checkpoints is None:
                path.mkdir(exist_ok=True)
                shoal.save(path / "saved", **saved, number=number)
                if number == 3:  # it does not grow any more: let something else fill the disk
                    fill(folder)
            else:
                checkpoints.steps = number
                checkpoints.save(number=number)
            done = number
        raise AssertionError("the disk was never full")
    except shoal.UsageError as error:
        assert "No space left" in str(error), error
    finally:
        if checkpoints is not None:
            checkpoints.close()
    number = read(folder / "run", numel, one_name)
    assert number in (done, done + 1), f"checkpoint {number} behind save {done}"
    left = [path.name for path in (folder / "run").glob("*.tmp-*")]
    assert not left, left
    return Counter({"full": 1, "behind no save": int(done == 0), "behind some": int(done > 0)})


def fill(folder: Path) -> None:
    """Leave no room."""
    with suppress(OSError), open(folder / "other", "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def cost_of_rank(rounds: int, out: Path) -> None:
    """One rank of the lab: rank 0 writes the figures."""
    world = shoal.init()
    recipe = load_recipe(HERE.parent / "examples" / "alexnet.py")
    torch.manual_seed(0)
    loader = shoal.shard(recipe.data()[0])
    model, loss_fn = recipe.model(), recipe.loss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, y = recipe.batch(next(iter(loader)))
    shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))
    folder = out.parent / "run"
    blocks: dict[bool, list[float]] = {False: [], True: []}
    taking: list[float] = []
    saved = {"model": model, "optimizer": optimizer}
    with shoal.Checkpoints(folder, every_s=1e7, keep=1, **saved) as checkpoints:
        for turn in range(-1, 2 * rounds):
            saves = turn % 2 == 1
            begin_s = time.perf_counter()
            for step in range(STEPS if turn >= 0 else 3):
                if saves and step == 0:
                    checkpoints.save(wait=False)
                    taking.append(time.perf_counter() - begin_s)
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.step()
            model.state_dict()  # all is there
            if turn >= 0:
                blocks[saves].append(time.perf_counter() - begin_s)
            else:
                checkpoints.save()  # makes the memory that is used again
    if world.rank == 0:
        figures = {
            "plan": str(shoal.plan_of(model)),
            "bytes": sum(path.stat().st_size for path in folder.glob("*/*.safetensors")),
            "blocks_s": blocks[False],
            "blocks_with_save_s": blocks[True],
            "taking_s": taking,
        }
        out.write_text(json.dumps(figures, indent=1))


def cost(rounds: int, hosts: int, rate: str) -> None:
    """Run the lab, and print what saving costs."""
    with tempfile.TemporaryDirectory(prefix="shoal-checkpoints-") as name:
        out = Path(name) / "figures.json"
        rank = [sys.executable, __file__, "rank", "--rounds", str(rounds), "--out", str(out)]
        lab = [sys.executable, "-m", "shoal", "lab", "--hosts", str(hosts), "--rate", rate]
        subprocess.run([*lab, "--", *rank], check=True, cwd=HERE.parent)
        kept = HERE / "results" / "checkpoints.json"
        shutil.copy(out, kept)
        figures = json.loads(out.read_text())
    plain, saving = map(statistics.median, (figures["blocks_s"], figures["blocks_with_save_s"]))
    taking = statistics.median(figures["taking_s"])
    print(figures["plan"])
    print(
        f"{figures['bytes'] / 1e6:.0f} MB; {STEPS} steps {plain:.2f} s, with a save {saving:.2f} s"
    )
    print(f"the training thread saves for {taking:.3f} s: {taking / saving:.2%} of the time")
    print(f"steps are {saving / plain - 1:+.1%} longer")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kills", "full", "cost", "rank"])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "kills":
        print(dict(killed(asked.times)))
    elif asked.what == "full":
        print(dict(full(asked.times)))
    elif asked.what == "cost":
        cost(asked.rounds, asked.hosts, asked.rate)
    else:
        cost_of_rank(asked.rounds, asked.out)


if __name__ == "__main__":
    main()
