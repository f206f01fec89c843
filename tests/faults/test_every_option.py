"""Every option of the library with values that are none: accepted on purpose, or refused in words.

A test lists the values that an option takes. Each other one is a UsageError that names the option
and says how to go on, never a bare traceback and never a value that means nothing. Options are
found in the code, so a new one is tried as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.codec import Codec
from shoal.contracts.feature import Feature
from shoal.core.errors import SampleError, UsageError
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.front.options import keywords
from shoal.front.session_start import using
from shoal.profiling.identity import model_digest

pytestmark = pytest.mark.quick
Call = Callable[[Any], Any]

VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "0": 0,
    "3": 3,
    "1.5": 1.5,
    "1e300": 1e300,
    "a_huge_int": 10**40,
    "True": True,
    "x": "x",
    "no_text": "",
    "bytes": b"x",
    "None": None,
    "[]": [],
    "[1, 'x']": [1, "x"],
    "{}": {},
    "{'a': nan}": {"a": math.nan},
    "a_tensor": torch.ones(2),
}
NOTHING = "None [] {}"  # values that ask for nothing
COUNT, NUMBER = "0 3", "1.5 3"
ENDLESS = "0 3 1.5 inf 1e300 a_huge_int"
# the values that an option takes; an option that is not here takes none
TAKEN: dict[str, str] = {
    "parallelize(buffers)": "{}",
    "parallelize(check_every)": COUNT,
    "parallelize(codecs)": NOTHING,
    "parallelize(compute_loss)": "None",
    "parallelize(count)": "None",
    "parallelize(first)": f"None {COUNT}",
    "parallelize(features)": "[] {} no_text",
    "parallelize(left_alone)": "[] {} no_text",
    "parallelize(local_steps)": "None 3",
    "parallelize(lossy)": "None",
    "parallelize(max_error)": f"None {NUMBER}",
    "parallelize(memory_limit)": f"None {NUMBER}",
    "parallelize(micro_batches)": "None 3",
    "parallelize(outer)": "None",
    "parallelize(pins)": "None {}",
    "parallelize(placement)": "{}",
    "parallelize(replan)": "True",
    "parallelize(staleness)": "0",  # others need servers
    "parallelize(strategies)": "None",
    "parallelize(sync_batchnorm)": "True",
    "parallelize(total_steps)": "None",
    "parallelize(update_every)": "None {}",
    "CheckReplicas(every)": COUNT,
    "Accuracy(total_steps)": "None",
    "FirstSteps(first)": COUNT,
    "LocalSteps(outer)": "None",
    "LocalSteps(steps)": "3",
    "MaxError(bound)": f"None {NUMBER}",
    "Replan(on)": "True",
    "Staleness(steps)": f"None {COUNT}",
    "SyncBatchNorm(convert)": "True",
    "UpdateEvery(periods)": "{}",
    "Outer(grace_s)": f"0 {NUMBER}",
    "Outer(grows)": "True",
    "Outer(islands)": "None True",
    "Outer(lag)": f"None {COUNT}",
    "Outer(lr)": f"None {NUMBER}",
    "Outer(momentum)": "None 0",
    "Outer(quorum)": "None",
    "Outer(warmup_steps)": COUNT,
    "SearchOptions(least_part_bytes)": "3",
    "SearchOptions(most_layers)": "3",
    "Int8(block)": "3",
    "LowRank(columns)": COUNT,
    "LowRank(rank)": "3",
    "shard(shards_itself)": "None",
    "shard(shares)": "None",
    "mean(value)": "nan inf -1 0 3 1.5 1e300 a_huge_int True a_tensor",
    "mean(weight)": "3 1.5 True",
    "plan(cluster)": "None",
    "scaled_lr(base_batch)": NUMBER,
    "scaled_lr(batch)": NUMBER,
    "scaled_lr(warmup_steps)": COUNT,
    "Link(burst_bytes)": ENDLESS,
    "Link(bytes_per_s)": "inf 3 1.5 1e300 a_huge_int",  # one rank alone has a link without end
    "Link(cpu_s_per_byte)": ENDLESS,
    "Link(latency_s)": "0 3 1.5",
    "Link(tried)": ENDLESS,
    "Topology(processors)": "[]",
    "Topology(servers)": "0",
    "Topology(tail)": "0",
    "Cluster(cores_per_rank)": NUMBER,
    "Cluster(duplex)": "0 3 1.5",
    "Cluster(pack_byte_s)": "0 3 1.5",
    "Cluster(pack_each_s)": "0 3 1.5",
    "Cluster(servers)": "[]",
    "Cluster(tail)": "[]",
    "Plan(bucket_bytes)": "3",
    "Plan(chunks)": "3",
    "Plan(features)": "{}",
    "Plan(joined)": "True",
    "Plan(lanes)": "3",
    "Plan(late)": COUNT,
    "Plan(least_part_bytes)": "3",
    "Plan(local_steps)": "0",
    "Plan(micro_batches)": "3",
    "Plan(outer)": "None",
    "Plan(placement)": "{}",
    "Plan(predicted_s)": "0 3 1.5",
    "Plan(staleness)": "0",
    "Plan(update_every)": "{}",
}
# how messages call an option whose name says too little
CALLED = {
    "Outer(lr)": "learning rate",
    "Outer(rule)": "outer rule",
    "LocalSteps(steps)": "local_steps",
    "CheckReplicas(every)": "check_every",
    "MaxError(bound)": "max_error",
    "Replan(on)": "replan",
    "Staleness(steps)": "staleness",
    "SyncBatchNorm(convert)": "sync_batchnorm",
    "UpdateEvery(periods)": "update",
    "parallelize(codecs)": "codec",
    "parallelize(strategies)": "strateg",
    "parallelize(update_every)": "update",
    "shard(loader)": "shard takes a DataLoader",
    "scaled_lr(rule)": "rule",
    "Topology(hosts)": "host",
    "Choice(layer)": "layer",
    "Choice(strategy)": "strategy",
    "Plan(choices)": "choice|layers",
    "Plan(features)": "feature",
    "Plan(ranks)": "rank",
    "Plan(staleness)": "staleness|servers",
    "Plan(update_every)": "update",
}
# fields that only measuring fills
MEASURED = {"paces", "codings", "moves", "ahead", "apart", "steady"}
LINK, TOPOLOGY = shoal.Link(1e-4, 1e8), shoal.Topology(("one", "other"))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def parallelize(**asked: Any) -> Any:
    net = model()
    return shoal.parallelize(net, nn.MSELoss(), sgd(net), **asked)


def plan(**changed: Any) -> Plan:
    choices = tuple(shoal.Choice(layer, "replicate", "ring") for layer in ("0", "1"))
    known = {"ranks": 1, "model": model_digest(model()), "choices": choices}
    return Plan(**{**known, "bucket_bytes": 1 << 20, "lanes": 2, **changed})


def records() -> Iterator[tuple[type[Any], dict[str, Any]]]:
    """Every record that a caller may make, with what it needs beside the field that is tried."""
    for kind in (*of(Feature).values(), *of(Codec).values()):
        if kind.__module__.startswith("shoal."):
            yield kind, {}
    yield shoal.Outer, {}
    yield shoal.SearchOptions, {}
    yield shoal.Link, {"latency_s": 1e-4, "bytes_per_s": 1e8}
    yield shoal.Topology, {"hosts": ("one", "other")}
    yield shoal.Cluster, {"topology": TOPOLOGY, "link": LINK}


def of_record(kind: type[Any], field: Field[Any], needed: dict[str, Any]) -> Call:
    return lambda value: kind(**{**needed, field.name: value})


def of_keyword(keyword: str) -> Call:
    return lambda value: parallelize(**{keyword: value})


def of_plan(name: str) -> Call:
    return lambda value: parallelize(plan=plan(**{name: value}))


def of_choice(name: str) -> Call:
    known = {"layer": "0", "strategy": "replicate", "exchange": "ring"}
    rest = shoal.Choice("1", "replicate", "ring")
    return lambda value: parallelize(
        plan=plan(choices=(shoal.Choice(**{**known, name: value}), rest))
    )


def calls() -> dict[str, Call]:
    """What is tried, by the option's name."""
    found: dict[str, Call] = {}
    found |= {f"parallelize({k})": of_keyword(k) for k in [*keywords(), "lossy", "features"]}
    for kind, needed in records():
        for field in fields(kind):
            if field.name not in MEASURED and field.init:
                found[f"{kind.__name__}({field.name})"] = of_record(kind, field, needed)
    found |= {f"Plan({field.name})": of_plan(field.name) for field in fields(Plan)}
    found |= {f"Choice({field.name})": of_choice(field.name) for field in fields(shoal.Choice)}
    for name in ("batch", "shares", "shards_itself"):
        found[f"shard({name})"] = lambda value, name=name: shoal.shard(
            DataLoader(range(8), batch_size=2), **{name: value}
        )
    for name in ("batch", "base_batch", "rule", "warmup_steps"):
        found[f"scaled_lr({name})"] = lambda value, name=name: shoal.scaled_lr(
            sgd(model()), **{"batch": 4, "base_batch": 2, name: value}
        )
    net = model()
    return found | {
        "parallelize(model)": lambda value: shoal.parallelize(value, nn.MSELoss(), sgd(net)),
        "parallelize(optimizer)": lambda value: shoal.parallelize(net, nn.MSELoss(), [value]),
        "scaled_lr(optimizer)": lambda value: shoal.scaled_lr(value, batch=4, base_batch=2),
        "shard(loader)": lambda value: None if is_batches(value) else shoal.shard(value),
        "mean(value)": shoal.mean,
        "mean(weight)": lambda value: shoal.mean(1.0, weight=value),
        "plan(cluster)": lambda value: shoal.plan(
            net, nn.MSELoss(), sgd(net), sample=None, cluster=value
        ),
    }


def is_batches(value: Any) -> bool:
    return isinstance(value, list | torch.Tensor)


CALLS = calls()


@pytest.mark.parametrize("option", CALLS)
@pytest.mark.filterwarnings("ignore:shoal.mean. the weight is 0")
def test_an_option_is_taken_or_refused_in_words(option: str) -> None:
    taken = TAKEN.get(option, "").split()
    called = CALLED.get(option, option.partition("(")[2].rstrip(")"))
    with using(ThreadComm()):
        for name, value in VALUES.items():
            if option == "shard(loader)" and is_batches(value):
                continue  # an iterable, whose parts are batches
            error = heard(CALLS[option], value)
            if name in taken:
                assert error is None, f"{option} with {name}"
            elif (option, name) != ("mean(weight)", "0"):  # NaN and a warning, which is a test's
                assert error is not None, f"{option} takes {name}"
                assert error.do or error.expected, f"{option} with {name}: {error}"
                assert re.search(called, str(error)), f"{option} with {name}: {error}"


def heard(call: Call, value: Any) -> UsageError | None:
    """Return the error of a call that is refused. Any other error fails the test."""
    try:
        call(value)
    except SampleError:  # which comes behind all checks of options
        return None
    except UsageError as error:
        return error
    return None


def test_the_lists_name_options_that_there_are() -> None:
    assert TAKEN.keys() | CALLED.keys() <= CALLS.keys()
