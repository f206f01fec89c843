"""Features of training, one in each file. Their contract is contracts/feature.py."""

from shoal.features.accuracy import Accuracy
from shoal.features.check_every import CheckReplicas
from shoal.features.first_steps import FirstSteps
from shoal.features.local_steps import LocalSteps, check_in_step, global_weights, round_number
from shoal.features.lossy import Lossy
from shoal.features.max_error import MaxError
from shoal.features.older_keywords import Older
from shoal.features.pipeline_schedule import PipelineSchedule
from shoal.features.replan import Replan
from shoal.features.staleness import Staleness
from shoal.features.sync_batchnorm import SyncBatchNorm
from shoal.features.update_every import UpdateEvery

__all__ = [
    "Accuracy",
    "CheckReplicas",
    "FirstSteps",
    "LocalSteps",
    "Lossy",
    "MaxError",
    "Older",
    "PipelineSchedule",
    "Replan",
    "Staleness",
    "SyncBatchNorm",
    "UpdateEvery",
    "check_in_step",
    "global_weights",
    "round_number",
]
