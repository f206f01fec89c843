"""`ShoalTrainer` and `ShoalMixin`: Hugging Face's Trainer, with Shoal in place of DDP.

    1  init      Shoal joins the ranks; the trainer's accelerator becomes a `ShoalAccelerator`
    2  first     the first training step parallelises the model, by the trainer's own compute_loss
    3  weigh     a loss that is divided by the items of all ranks counts every rank alike. Any other
                 one is a mean over this rank's rows
    4  save      every rank takes part in reading weights and state, and the first one writes

Guarded by tests/trainers/.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer

from shoal.contracts.sample import own_loss
from shoal.front.rank_values import mean
from shoal.front.session_start import init
from shoal.integrations.accelerate import ShoalAccelerator
from shoal.integrations.checks import OPTIONS, check_model, check_version
from shoal.session.compiled_models import without_compilation

check_version("transformers", transformers.__version__, (4, 57), (6,))


class ShoalMixin:
    """A part of a trainer that trains by Shoal's plan. It stands before the trainer's class.

    It takes all arguments of the trainer, and the options of `shoal.parallelize`, such as `pins`.
    Start the script by torchrun.

    Examples:
        >>> class Tuned(ShoalMixin, Trainer):
        ...     pass
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        names = (OPTIONS - {"compute_loss", "count"}) & options.keys()
        self.shoal_options = {name: options.pop(name) for name in names}
        self.shoal_items: Any = None  # number on all ranks that divides the last loss
        self.shoal_divides: bool | None = None  # whether the model divides by it; None: not known
        init()
        if isinstance(model := options.get("model", args[0] if args else None), nn.Module):
            check_model(model)
        super().__init__(*args, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as the trainer does, and have it train by Shoal."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the trainer's
        own: Any = self
        own.accelerator.__class__ = ShoalAccelerator
        own.accelerator.take_options({})
        of_gather = getattr(own.gather_function, "keywords", {})
        own.gather_function = partial(own.accelerator.gather_for_metrics, **of_gather)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        """Train on a batch. The first one parallelises the model."""
        own: Any = self
        if without_compilation(model) not in own.accelerator.functions:
            items = args[0] if args else named.get("num_items_in_batch")
            divides = self._divides(model, own._prepare_inputs(inputs), items)
            options = {"weigh": "ranks" if divides else "rows", **self.shoal_options}
            vars(self).pop("compute_loss", None)  # drop the function of an earlier plan
            own.compute_loss = own.accelerator.begin_with(model, own.compute_loss, **options)
        return super().training_step(model, inputs, *args, **named)  # type: ignore[misc]

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        """Compute the loss. A model that does not divide by the number of items gets none.

        Else Trainer would multiply its mean by the number of ranks.
        """
        items = named.get("num_items_in_batch")
        if items is not None and not self._divides(model, inputs, items):
            named["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **named)  # type: ignore[misc]

    def _divides(self, model: nn.Module, inputs: Any, items: Any) -> bool:
        """Return whether the loss is divided by a number of items, as the first batch shows."""
        own: Any = self
        if items is None:
            return False
        if self.shoal_divides is None:
            by_model = own.model_accepts_loss_kwargs and own.compute_loss_func is None
            self.shoal_divides = not (by_model and _is_mean(model, inputs, items))
        return self.shoal_divides

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
        """Evaluate a batch. A loss that is divided by the items of all ranks is added up."""
        self.shoal_items = None
        loss, *rest = super().prediction_step(model, inputs, *args, **named)  # type: ignore[misc]
        if loss is not None and self.shoal_items is not None and self.shoal_divides is not False:
            loss = mean(loss)  # ranks may have unlike numbers of rows, and each counts alike
        return loss, *rest

    def _get_num_items_in_batch(self, *args: Any, **named: Any) -> Any:
        items = super()._get_num_items_in_batch(*args, **named)  # type: ignore[misc]
        own: Any = self
        self.shoal_items = items if own.args.average_tokens_across_devices else None
        return items

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the weights, of which every rank may have a part."""
        own: Any = self
        if state_dict is None and own.accelerator.functions:
            state_dict = own.model.state_dict()
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state, of which every rank may have a part."""
        own: Any = self
        if not own.args.should_save:
            own.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def _is_mean(model: nn.Module, inputs: Any, items: Any) -> bool:
    """Return whether a model that is given a number of items computes a mean all the same.

    BERT's classifier does so. It takes any word, and its loss takes none.
    """
    if not isinstance(inputs, Mapping) or "labels" not in inputs:
        return False
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # no dropout
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            once, twice = (
                own_loss(model(**inputs, num_items_in_batch=times * items)) for times in (1, 2)
            )
            return once is not None and bool(once) and torch.equal(once, twice)
    finally:
        for module, mode in modes:
            module.training = mode


class ShoalTrainer(ShoalMixin, Trainer):
    """Hugging Face's `Trainer` on all ranks, by Shoal's plan.

    It takes all arguments of `Trainer`, and the options of `shoal.parallelize`, such as `pins`.
    Start the script by torchrun.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM, TrainingArguments
        >>> small = BertConfig(
        ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     intermediate_size=8,
        ... )
        >>> trainer = ShoalTrainer(
        ...     BertForMaskedLM(small), TrainingArguments(use_cpu=True), pins={"*": "sliced"}
        ... )
    """
