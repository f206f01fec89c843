"""How steps and exchanges grow with hosts: simulated from few, measured on more.

    sudo .venv/bin/python benchmarks/laws.py hosts     two models on 2, 3, 4, 6 and 8 hosts, each
                                                       with a fifth of a core; what 2 to 4 foresee
                                                       of 6 and 8: 15 min
    sudo .venv/bin/python benchmarks/laws.py measure   exchanges alone on 2 to 8 hosts: 4 min
    python benchmarks/laws.py plot                     docs/lab/laws.svg: those, and 2 to 1,024
                                                       hosts simulated (needs matplotlib)

`hosts` measures a model as `shoal plan --save-profile` does, and trains some steps under the
planner's own plan. Then `simulate` is asked for 6 and 8 hosts by the profile of 2, of 3 and of 4.

`plot` fits nothing: links give their payload rate, and a message takes 0.2 ms. What it simulates is
the planner's price of one bucket (`Predictor.cost`). FireCaffe's tree sends whole buckets level
by level, which Shoal has only as a contender of exchanges.py; its line is the formula there.

Figures in results/laws-hosts.json and laws-exchanges.json. Laws: Iandola et al., "FireCaffe",
CVPR 2016, section 4: a server is linear in hosts, a tree logarithmic; rings and slices are flat.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cell_models import MODELS
from exchanges import MB, PAYLOAD, Case, climb, descend
from exchanges import measure as measured_in_lab

import shoal
from shoal.contracts.launcher import Job
from shoal.core.facts import Cluster, LayerProfile, Link, ModelProfile, ParameterProfile, Topology
from shoal.core.foresight import Network, Question
from shoal.core.plan import Site
from shoal.planner.imagined_hosts import imagined
from shoal.planner.timeline import Predictor
from shoal.profiling.profile_file import Measured
from shoal.session.session import current
from shoal_tools.contenders.peers import Peer, Workload, slowest_rank, step_times
from shoal_tools.launch.lab import Lab
from shoal_tools.simulate import simulate

HERE = Path(__file__).parent
HOSTS, EXCHANGES = HERE / "results/laws-hosts.json", HERE / "results/laws-exchanges.json"
PLOT = HERE.parent / "docs/lab/laws.svg"
SHARE = 0.2  # of a core, of each rank
SIZES, FROM, FORESEEN = (2, 3, 4, 6, 8), (2, 3, 4), (6, 8)
CASES = (("gpt", "300mbit"), ("plain", "300mbit"))
TURN_S, FEWEST, MOST = 8.0, 8, 60  # seconds of measuring, and numbers of steps
NBYTES, RATE, LATENCY_S = 4 * MB, 25e6 * PAYLOAD, 2e-4  # of an exchange; 200 Mbit/s
LEVELS = "tree, level by level"
# by their names in the plot: strategy, exchange, and the contender of exchanges.py
LAWS = {
    "server": ("server", "direct", "one server"),
    LEVELS: ("", "", "tree, one chunk"),
    "tree, in chunks": ("replicate", "tree", "tree"),
    "ring": ("replicate", "ring", "ring"),
    "slices": ("sliced", "direct", "direct"),
}


def hosts() -> None:
    """Measure two models on each number of hosts, and compare with what fewer foresee."""
    rows = []
    for model, rate in CASES:
        with TemporaryDirectory() as folder:
            paths = {size: Path(folder) / f"{size}.json" for size in SIZES}
            for size, path in paths.items():
                command = (sys.executable, __file__, "rank", model, str(path))
                lab = Lab(hosts=size, rate=rate, cores=SHARE)
                if code := lab.launch(Job(command, size)).exit_code:
                    sys.exit(code)
            found = {size: json.loads(path.read_text()) for size, path in paths.items()}
        for size in FORESEEN:
            row = {"model": model, "rate": rate, "hosts": size, "step_s": found[size]["step_s"]}
            row["planner_s"] = found[size]["predicted_s"]
            for few in FROM:
                known = Measured.from_json(found[few]["profile"])
                question = Question(straggler=0.0)
                (scale,) = simulate(known.profile, known.cluster, [size], question).scales
                row[f"from_{few}_s"] = scale.step_s
            rows.append(row)
        few = [{"hosts": n, "step_s": found[n]["step_s"], "model": model} for n in FROM]
        rows += [{**row, "planner_s": found[row["hosts"]]["predicted_s"]} for row in few]
        HOSTS.write_text(json.dumps(rows, indent=1) + "\n")
    tabulate(rows)


def rank(model: str, path: Path) -> None:
    """Measure a model on the ranks of a lab; rank 0 writes it down."""
    torch.set_num_threads(1)
    session, kind = shoal.init(), MODELS[model]
    batch = kind.batch(torch.Generator().manual_seed(session.rank))
    torch.manual_seed(0)
    work = Workload(kind.model, kind.loss, kind.optimizer, batch)
    peer = Peer(model, work.model(), work)
    peer.model, peer.loss, peer.optimizer = shoal.parallelize(
        peer.model, peer.loss, peer.optimizer, sample=batch
    )
    its = current().attached[peer.model]
    steps = max(FEWEST, min(int(TURN_S / its.plan.predicted_s), MOST))
    step_s = slowest_rank(list(step_times(peer, batch, steps, num_warm_up=2)))
    if session.rank == 0:
        profile = Measured(its.profile, its.cluster).to_json()
        found = {"step_s": step_s, "predicted_s": its.plan.predicted_s, "profile": profile}
        path.write_text(json.dumps(found))
        told = f"predicted {1e3 * its.plan.predicted_s:.0f} ms, measured {1e3 * step_s:.0f} ms"
        print(f"{model} on {session.size} hosts: {told}", flush=True)


def tabulate(rows: list[dict[str, Any]]) -> None:
    """The table of docs/lab/foresight.md."""
    head = " | ".join(f"from {few}" for few in FROM)
    print(f"| model, hosts | measured, ms | planner there | {head} |\n|---|---|---|{'---|' * 3}")
    for row in rows:
        foreseen = [
            f"{row[f'from_{few}_s'] / row['step_s'] - 1:+.0%}" if f"from_{few}_s" in row else ""
            for few in FROM
        ]
        off = f"{row['planner_s'] / row['step_s'] - 1:+.0%}"
        cells = [f"{row['model']}, {row['hosts']}", f"{1e3 * row['step_s']:.0f}", off, *foreseen]
        print(f"| {' | '.join(cells)} |".replace("%", " %"))


def measure() -> None:
    """Measure exchanges on 2, 4, 6 and 8 hosts; a server has one more."""
    rows = []
    for size in (2, 4, 6, 8):
        among = tuple(name for _, _, name in LAWS.values() if name != "one server")
        rows += measured_in_lab(Case(size, "200mbit", NBYTES, 1, among, turns=2, turn_s=0.7))
        alone = Case(size + 1, "200mbit", NBYTES, 1, ("one server",), turns=2, turn_s=0.7)
        rows += measured_in_lab(alone)
        EXCHANGES.write_text(json.dumps(rows, indent=1) + "\n")


def simulated_s(law: str, size: int) -> float:
    """Seconds of one bucket on so many hosts."""
    if law == LEVELS:
        levels = climb(0, size) + descend(0, size)
        return levels * (NBYTES / RATE + LATENCY_S)
    strategy, exchange, _ = LAWS[law]
    numel = NBYTES // 4
    weight = ParameterProfile("weight", (numel,), numel, 4, used=True, ready_s=0.0)
    profile = ModelProfile((LayerProfile("layer", "Conv2d", (weight,)),), 0.0, 0.0, 0.0, digest="")
    alone = Cluster(Topology(("here",)), Link(0.0, math.inf), 16.0)
    cluster = imagined(alone, size, Network(RATE, LATENCY_S))
    if strategy == "server":
        # workers own nothing, as where they run ahead: else they would take a part of its work
        cluster = Cluster(cluster.topology, cluster.link, 16.0, servers=("server",), ahead=True)
    cost = Predictor(profile, cluster).cost(Site(("layer",), strategy, exchange))
    seconds = [phase.alone_s for phase in cost.phases]
    # the contender sends back what is summed while the rest comes in
    return max(seconds) if strategy == "server" else sum(seconds)


def plot() -> None:
    """Draw the laws: lines simulated, points measured."""
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        sys.exit("the plot needs matplotlib: pip install matplotlib, in any environment with Shoal")
    rows = json.loads(EXCHANGES.read_text())
    pyplot.rcParams.update({"svg.hashsalt": "shoal", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(6.2, 4.0))
    sizes = [2**power for power in range(1, 11)]
    for law, (_, _, contender) in LAWS.items():
        (drawn,) = axes.plot(sizes, [simulated_s(law, size) for size in sizes], linewidth=1)
        own = [row for row in rows if row["contender"] == contender]
        workers = [row["hosts"] - (contender == "one server") for row in own]
        seconds = [row["seconds"] for row in own]
        axes.plot(workers, seconds, "o", markersize=4, color=drawn.get_color(), label=law)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set(xlabel="hosts", ylabel=f"seconds for {NBYTES // MB} MB")
    title = "200 Mbit/s: measured (points), simulated and not fitted (lines)"
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PLOT, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Serve as a rank of a lab, or run what is named."""
    match sys.argv[1:]:
        case ["rank", model, path]:
            rank(model, Path(path))
        case ["hosts"]:
            hosts()
        case ["measure"]:
            measure()
        case ["plot"]:
            plot()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
