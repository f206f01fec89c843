"""Every strategy states the bytes it moves: what a real step sends, counted on every rank, is what
`estimate` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from one_process import SMALL, served_by
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.registry import of
from shoal.core.role import Role
from shoal.core.way import strategy_and_exchange
from shoal.front.session_start import using
from shoal.planner.search_options import DEFAULT, SearchOptions
from shoal.planner.timeline import Predictor
from shoal.profiling.identity import trainable_layers
from shoal.rewrite.apply import sites
from shoal.servers.servers import Servers, serve
from shoal_tools.testing.byte_counts import Counts, TracedComm

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HOSTS = ["ab", "abc", "abcd", "aba", "aabb"]  # a letter is the host of a rank
COUNTS_BYTES = 40  # the first forward's row count, to every other rank


class Net(nn.Module):
    """An embedding, tokens in middle layers, a pair of layers, and odd sizes."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 7, sparse=sparse)
        self.hidden = nn.Linear(7, 13, bias=False)
        self.widen, self.narrow = nn.Linear(13, 11, bias=False), nn.Linear(11, 13)
        self.head = nn.Linear(13, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.table(ids)))
        return self.head((hidden + self.narrow(torch.relu(self.widen(hidden)))).mean(1))


def pins() -> list[str]:
    """Every strategy, with every exact exchange that it takes; but "tied", which has a
    model of its own.
    """
    kinds = {name: kind for name, kind in of(Strategy).items() if name != "tied"}
    carried = [
        f"{name}:{exchange}"
        for name, kind in kinds.items()
        for exchange, carrier in of(Exchange).items()
        if carrier.exact and kind().takes(carrier())
    ]
    return carried + [name for name, kind in kinds.items() if not kind.role.takes_exchange]


def kind_of(pin: str) -> type[Strategy]:
    """The strategy that a pin names."""
    return of(Strategy)[strategy_and_exchange(pin)[0]]


def moved(counts: Counts) -> list[int]:
    """Bytes sent, received, and sent to other hosts, so far."""
    return [counts.bytes_sent, counts.bytes_received, counts.bytes_leaving]


@pytest.mark.parametrize("hosts", HOSTS)
# a pipeline states no bytes yet, and its step is not predicted
@pytest.mark.parametrize("pin", [pin for pin in pins() if not kind_of(pin).role.names_ranks])
def test_a_step_sends_the_bytes_that_are_stated(pin: str, hosts: str) -> None:
    assert_stated(pin, hosts)


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize(
    "pin",
    [
        "column",
        "row",
        "column_pair",
        "head",
        "column+bfloat16",
        "row+float16",
        "row_pair+bfloat16",
        "column_pair+float16",
        "head+bfloat16",
    ],
)
def test_chunks_send_what_is_stated_without(pin: str, hosts: str) -> None:
    assert_stated(pin, hosts, search_options=SearchOptions(chunks=(2,)))


@pytest.mark.parametrize("placement", ["round-robin", {"table": 1, "head.weight": 2}], ids=str)
@pytest.mark.parametrize("pin", [pin for pin in pins() if kind_of(pin).role.has_owners])
def test_a_step_sends_the_bytes_that_are_stated_wherever_parameters_are_placed(
    pin: str, placement: str | dict[str, int]
) -> None:
    assert_stated(pin, "aabb", placement)


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize("pin", [pin for pin in pins() if kind_of(pin).role.has_owners])
def test_a_step_sends_the_bytes_that_are_stated_where_layers_are_cut(pin: str, hosts: str) -> None:
    assert_stated(pin, hosts, search_options=SMALL)


def with_margin(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.logsumexp(out, -1) - out.gather(1, y.unsqueeze(1)).squeeze(1) + 0.1).mean()


LOSSES: dict[str, Loss] = {
    "two": lambda out, y: F.cross_entropy(out, y) + F.cross_entropy(out * 2, y),
    "log_softmax": lambda out, y: F.nll_loss(F.log_softmax(out, -1), y),
    "margin": with_margin,
}


class Bags(Net):
    """Looks up bags, of a table whose gradient is sparse or dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(19, 7, sparse=sparse)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.table(ids)))
        return self.head(hidden + self.narrow(torch.relu(self.widen(hidden))))


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize(
    ("pin", "sparse"), [("sparse", True), ("embedding", True), ("embedding", False)]
)
def test_bags_send_the_bytes_that_are_stated(pin: str, sparse: bool, hosts: str) -> None:
    assert_stated(pin, hosts, model=Bags(sparse))


class Tied(Net):
    """Its head has the weight of its table, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 19)
        self.head.weight = self.table.weight
        self.hidden, self.back = nn.Linear(7, 13, bias=False), nn.Linear(13, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(torch.relu(self.hidden(self.table(ids)))).mean(1))


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_weight_that_modules_share_sends_the_bytes_that_are_stated(hosts: str) -> None:
    assert_stated("tied", hosts, model=Tied())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_that_shares_its_weight_states_what_its_losses_send(loss: str) -> None:
    assert_stated("tied", "aabb", loss_fn=LOSSES[loss], model=Tied())


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_states_what_its_losses_send(loss: str, hosts: str) -> None:
    assert_stated("head", hosts, loss_fn=LOSSES[loss])


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
@pytest.mark.parametrize("first", [False, True], ids=["in the middle", "first"])
def test_column_states_what_a_convolution_sends(first: bool, hosts: str) -> None:
    before = [] if first else [nn.Conv2d(3, 3, 1)]
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1)
    body = nn.Sequential(
        *before, conv, nn.Tanh(), nn.Conv2d(5, 4, 2, bias=False), nn.Flatten(), nn.Linear(24, 5)
    )
    assert_stated("column", hosts, model=body, inputs=torch.rand(2 * len(hosts), 3, 7, 5))


def assert_stated(
    pin: str,
    hosts: str,
    placement: str | dict[str, int] = "balanced",
    loss_fn: Loss = F.cross_entropy,
    model: nn.Module | None = None,
    inputs: torch.Tensor | None = None,
    search_options: SearchOptions = DEFAULT,
) -> None:
    """A step's bytes on every rank are those stated; of `Net` and ids, or of another model and its
    inputs.
    """
    torch.manual_seed(0)
    model, ranks, servers = (
        model or Net(sparse=kind_of(pin).role is Role.ROWS),
        len(hosts),
        "xyz"[: 2 * kind_of(pin).role.takes_servers],
    )
    kind = kind_of(pin)
    # serves some layers, which are then looked at otherwise
    chosen = kind.role.is_cut or kind.role.has_tables or kind.role is Role.ROWS
    cluster = Cluster(Topology(tuple(hosts)), Link(1e-4, 1e8), servers=tuple(servers))
    # of a table of 19 rows, one of them twice
    every_id = torch.cat([torch.arange(19), torch.tensor([0])])
    ids = (
        inputs
        if inputs is not None
        else torch.cat([every_id.roll(rank).view(2, 10) for rank in range(ranks)])
    )
    labels = torch.arange(2 * ranks) % 5
    cut = served_by(pin, model, loss_fn, (ids[:2], labels[:2]), cluster) if chosen else {"*": pin}

    def work(comm: ThreadComm) -> tuple[list[int], list[float]]:
        if comm.rank >= ranks:
            serve(comm)
            return [], []
        traced, mine = TracedComm(comm), copy.deepcopy(model)
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        with using(traced, cluster) as session:
            optimizer = torch.optim.SGD(mine.parameters(), 0.1)
            sample = ids[rows], labels[rows]
            pins = {"*": "replicate"} | cut
            _, weighed, _ = shoal.parallelize(
                mine,
                loss_fn,
                optimizer,
                sample=sample,
                pins=pins,
                placement=placement,
                search_options=search_options,
            )
            attached = session.attached[mine]
            servers = session.other(Servers)
            if servers is not None and servers._lane is not None:
                servers._lane.drain()  # orders of the start are no part of a step
            before = moved(traced.counts)
            weighed(mine(ids[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()  # sends nothing
            if not chosen:
                mine.state_dict()  # waits for parameters that are on their way
            counted = [
                after - earlier for after, earlier in zip(moved(traced.counts), before, strict=True)
            ]
        predictor = Predictor(attached.profile, attached.cluster)
        layers = {layer.name: layer for layer in trainable_layers(mine)}
        traffics = (predictor.cost(site).traffic for site in sites(attached.plan, layers))
        costs = [traffic for traffic in traffics if traffic.sent]  # the bias of a head has none
        others, afar = ranks - 1, ranks - hosts.count(hosts[comm.rank])
        stated = [
            sum(t.sent[comm.rank] for t in costs) + COUNTS_BYTES * others,
            sum(t.received[comm.rank] for t in costs) + COUNTS_BYTES * others,
            sum((t.leaving or t.sent)[comm.rank] for t in costs) + COUNTS_BYTES * afar,
        ]
        return counted, stated

    results = run(ranks + len(servers), work, hosts=hosts + servers, servers=len(servers))
    for rank, (counted, stated) in enumerate(results):
        if servers and rank == 0:  # who also gives the servers their orders
            # backward and step, a message each
            assert 0 < counted[0] - stated[0] <= 2 * len(servers) * 4096
            counted[0], counted[2] = stated[0], stated[2]
        assert counted == stated
