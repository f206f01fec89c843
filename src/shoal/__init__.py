"""Shoal trains a PyTorch model on several machines joined by ordinary networks.

A script calls `init`, gives its loader to `shard`, and its model, loss and optimizer to
`parallelize`. The loop stays the one it was.

Examples:
    >>> import shoal
    >>> world = shoal.init()
"""

from shoal.core.beginning import Beginning
from shoal.core.errors import ShoalError, UsageError, WorldError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.outcome import Outcome, Term
from shoal.core.outer_step import Outer
from shoal.core.plan import Choice, Plan
from shoal.core.record import CodecRow
from shoal.core.registry import register, unregister
from shoal.data.sharded import ShardedBatches, ShardedLoader
from shoal.features import (
    Accuracy,
    CheckReplicas,
    FirstSteps,
    LocalSteps,
    Lossy,
    MaxError,
    PipelineSchedule,
    Replan,
    Staleness,
    SyncBatchNorm,
    UpdateEvery,
    global_weights,
    round_number,
)
from shoal.front.checkpoints import Checkpoints
from shoal.front.codec_report import CodecReport, codec_report
from shoal.front.distributed_checkpoint import Stateful
from shoal.front.explain import explain
from shoal.front.launch import launch
from shoal.front.outcomes import outcome
from shoal.front.parallel import parallelize, plan
from shoal.front.plan_queries import is_parallelized, plan_of
from shoal.front.rank_values import gather, mean
from shoal.front.release import unparallelize
from shoal.front.replan import replan
from shoal.front.save_and_load import load, save
from shoal.front.scaled_lr import scaled_lr
from shoal.front.session_start import Served, init, serve
from shoal.front.shard import shard
from shoal.moved import install as _install
from shoal.planner.search_options import SearchOptions
from shoal.session.memory import Memory, memory
from shoal.session.session import World, world

_install()

__all__ = [
    "Accuracy",
    "Beginning",
    "CheckReplicas",
    "Checkpoints",
    "Choice",
    "Cluster",
    "CodecReport",
    "CodecRow",
    "FirstSteps",
    "Link",
    "LocalSteps",
    "Lossy",
    "MaxError",
    "Memory",
    "Outcome",
    "Outer",
    "PipelineSchedule",
    "Plan",
    "Replan",
    "SearchOptions",
    "Served",
    "ShardedBatches",
    "ShardedLoader",
    "ShoalError",
    "Staleness",
    "Stateful",
    "SyncBatchNorm",
    "Term",
    "Topology",
    "UpdateEvery",
    "UsageError",
    "World",
    "WorldError",
    "codec_report",
    "explain",
    "gather",
    "global_weights",
    "init",
    "is_parallelized",
    "launch",
    "load",
    "mean",
    "memory",
    "outcome",
    "parallelize",
    "plan",
    "plan_of",
    "register",
    "replan",
    "round_number",
    "save",
    "scaled_lr",
    "serve",
    "shard",
    "unparallelize",
    "unregister",
    "world",
]
