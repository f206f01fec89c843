"""Factors of gradients, from their backward to the `.grad` that every rank makes of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import OwnHook
from shoal.contracts.strategy import Place
from shoal.contracts.transfer import Mark, Round, Transfer
from shoal.core.errors import UsageError
from shoal.core.host_copies import to_host
from shoal.core.names import pins
from shoal.profiling.weight_use import WeightUse
from shoal.strategies.factor_gradients import FactorGradients
from shoal.strategies.factor_pairs import FactorPairs
from shoal.strategies.landing import at_least, has_nan, history
from shoal.strategies.outside_gradients import Elsewhere, summed


class FactorProduct(ABC):
    """A layer's gradient as the product of two factors: `left` (x, or ids) and `right` (dy)."""

    names: tuple[str, str] = ("weight", "bias")  # names of the parameters in the layer
    weight: nn.Parameter
    bias: nn.Parameter | None
    left_width: int
    left_dtype: torch.dtype
    right_width: int

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as F.linear takes it: (outputs, inputs)."""
        return weight

    @abstractmethod
    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        """Write the weight's gradient into `out`, or add it."""


@final
class LinearProduct(FactorProduct):
    """The product of a layer's input and its weight, in either form of the weight."""

    def __init__(self, module: nn.Module, use: WeightUse) -> None:
        weight = module._parameters[use.weight]
        assert weight is not None
        self.weight, self.bias = weight, module._parameters.get(use.bias)
        self.names, self.use = (use.weight, use.bias), use
        self.right_width, self.left_width = self.matrix(weight).shape
        self.left_dtype = weight.dtype

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.t() if self.use.turned else weight

    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        beta, left = 1 if accumulate else 0, left.conj()
        factors = (left.t(), right) if self.use.turned else (right.t(), left)
        torch.addmm(out, *factors, beta=beta, out=out)


@final
class EmbeddingProduct(FactorProduct):
    def __init__(self, module: nn.Embedding) -> None:
        assert isinstance(module.weight, nn.Parameter)
        self.weight, self.bias = module.weight, None
        self.left_width, self.right_width = 1, module.embedding_dim
        self.left_dtype = torch.int64
        self._padding = module.padding_idx

    def into(self, out: Tensor, left: Tensor, right: Tensor, accumulate: bool) -> None:
        ids = left.view(-1)
        if self._padding is not None:
            right = right.masked_fill((ids == self._padding).unsqueeze(1), 0.0)
        if not accumulate:
            out.zero_()
        if out.is_cuda:  # index_add_ adds in any order there; each rank makes this sum by itself
            out.index_put_((ids,), right, accumulate=True)
        else:
            out.index_add_(0, ids, right)


@final
class FactorTransfer(Transfer):
    """One layer's factors in one backward, a pair for each use of the layer."""

    tells = True

    def __init__(self, product: FactorProduct, place: Place, label: str) -> None:
        self.label = label
        self.product = product
        self._ranks = place.ranks
        self._pin = pins(place.layers)
        self._name = next(iter(place.parameters), label)
        self._targets = [
            p for p in (product.weight, product.bias) if p is not None and p.requires_grad
        ]
        self._training = self._targets  # targets without the frozen ones
        self._gradients = FactorGradients()
        self._begun = False  # whether a backward has come here that will send
        self._landed: set[nn.Parameter] = set()  # targets that have all gradients of this backward
        self._pairs = FactorPairs(self._targets, label, self._pin)
        self._packed: _PackedFactors | None = None
        self._found = False  # whether any rank has rows or extra gradients
        self._elsewhere = Elsewhere(self._targets, self._land, lambda: self._accumulators)
        # autograd's nodes at the last call: converting the module to and fro makes new ones
        self._accumulators: list[Any] = []

    def serves(self, module: nn.Module) -> bool:
        """Return whether this call of the layer uses its own weights, in training."""
        trains = any(target.requires_grad for target in self._targets)
        held, (weight, bias) = module._parameters, self.product.names
        own = held.get(weight) is self.product.weight and held.get(bias) is self.product.bias
        return trains and torch.is_grad_enabled() and own

    def called(self, output: Tensor) -> Tensor:
        """Note a call of the layer."""
        self._accumulators = [
            _accumulator(target) for target in self._targets if target.requires_grad
        ]
        return output

    def add(self, left: Tensor, right: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keep one pair of factors, from the call that backward has reached.

        Return the gradients of weight and bias if torch.autograd.grad asks for them. It does so
        inside the backward of an autograd.Function, which continues with them.
        """
        runs = torch._C._will_engine_execute_node
        try:
            lands = any(runs(node) for node in self._accumulators)
        except RuntimeError:  # torch's answer if torch.autograd.grad asks
            return self._own_gradients(left, right)
        if not lands:  # only the gradients of inputs are wanted
            return None, None
        if torch.is_grad_enabled():
            raise history()
        if self._packed is not None:
            raise UsageError(
                "the layer's backward ran again after its factors were sent",
                where=self.label,
                do="use torch.utils.checkpoint with use_reentrant=False, or give parallelize "
                + self._pin,
            )
        backward = self._begin()
        if self._has_hooks():  # hooks see a rank's own gradient, which is then summed like a bucket
            return self._own_gradients(left, right)
        left, right = left.detach(), right.detach()
        weight = self.rounds.weighs()
        if weight is not None:
            right = right * weight
        # the script may fill the same input with the next batch before the pair is sent
        if backward.accumulating:
            left, right = left.clone(), right.clone()
        self._pairs.add(
            left.reshape(-1, self.product.left_width),
            right.reshape(-1, self.product.right_width),
        )
        if backward.accumulating:
            self._pairs.mark()
        return None, None

    def _has_hooks(self) -> bool:
        """Return whether hooks on the parameters must see this rank's gradients."""
        hooks = [hook for t in self._targets for hook in (t._backward_hooks or {}).values()]
        return not all(isinstance(hook, OwnHook) for hook in hooks)

    def _own_gradients(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of weight and bias from this rank's rows alone."""
        if torch.is_grad_enabled():
            raise history()
        product = self.product
        left = left.reshape(-1, product.left_width).to(product.left_dtype).contiguous()
        right = right.reshape(-1, product.right_width).to(product.weight.dtype).contiguous()
        of_weight = torch.empty_like(product.weight)
        product.into(of_weight, left, right, accumulate=False)
        return of_weight, None if product.bias is None else right.sum(0)

    def _begin(self) -> Round:
        """Begin a backward: pairs that were kept and cleared since do not count."""
        backward = self.rounds.current()
        if not self._begun or backward.accumulating:
            self._forget_if_cleared()
        self._begun = not backward.accumulating
        return backward

    def _land(self, target: nn.Parameter) -> None:
        """Note that a parameter has all its gradients. With the last parameter, be ready."""
        backward = self.rounds.current()
        if backward.accumulating:
            if self._elsewhere:
                self._pairs.mark()
            return
        self._landed.add(target)
        if all(other in self._landed for other in self._targets if other.requires_grad):
            backward.ready(self)

    def _forget_if_cleared(self) -> None:
        """Drop the kept pairs and gradients if `.grad` was cleared since."""
        if self._pairs.drop_if_cleared():
            self._elsewhere.drop()

    def pack(self, backward: Round) -> None:
        self._forget_if_cleared()  # a backward may have passed this layer by
        product = self.product
        if self._pairs:
            left, right = self._pairs.joined()
        else:
            left = torch.empty(0, product.left_width, device=product.weight.device)
            right = torch.empty(0, product.right_width, device=product.weight.device)
        # a backward may give it transposed
        mean = (right.to(product.weight.dtype) / self._ranks).contiguous()
        if backward.share != 1:
            mean.mul_(at_least(backward.share))
        if mean.device.type == "cpu" and has_nan(mean) and not has_nan(product.weight):
            backward.found_nan(self._name)
        self._training = self._list_trainable()
        self._pairs.clear()
        more = self._elsewhere.taken(self._training, at_least(backward.share) / self._ranks)
        left = left.to(product.left_dtype).contiguous()
        self._packed = _PackedFactors(left, mean, backward.share, more, backward.mark(self))
        for target in self._training:
            hooks = (target._post_accumulate_grad_hooks or {}).values()
            if not all(isinstance(hook, OwnHook) for hook in hooks):
                raise UsageError(
                    "a hook on accumulated gradients was put on the layer after parallelize: "
                    "factor makes its gradient elsewhere",
                    where=self.label,
                    do=f"look at .grad after backward, or give parallelize {self._pin}",
                )
        self._gradients.begin(self._training)

    def _list_trainable(self) -> list[nn.Parameter]:
        """Return the parameters that train, and frozen ones with pairs from before the freeze."""
        kept = self._pairs.kept_for
        if self._landed and any(not target.requires_grad for target in kept):
            raise UsageError(
                "a parameter was frozen after a backward within accumulate(), and another one of "
                "its layer trains on",
                where=self.label,
                do="freeze it behind optimizer.step(), or give parallelize " + self._pin,
            )
        return [target for target in self._targets if target.requires_grad or target in kept]

    def run(self, comm: Comm) -> None:
        assert self._packed is not None
        gathered = _gather(comm, self._packed)
        self._found = bool(len(gathered.left)) or gathered.more
        if not self._found:
            return
        for target in self._training:
            buffer = self._gradients.buffer(target)
            add = self._gradients.accumulates(target)
            if target is self.product.weight:
                self.product.into(buffer, gathered.left, gathered.right, add)
            else:
                of_rows = gathered.right.sum(0)
                torch.add(buffer if add else torch.zeros_like(buffer), of_rows, out=buffer)
        if gathered.more:
            for target, more in summed(self._packed.more, self._training, comm).items():
                self._gradients.buffer(target).add_(more.div_(gathered.mean_share))

    def publish(self) -> None:
        if self._found:
            self._gradients.publish(self._training)
        self._packed = None
        self._begun = self._found = False
        self._landed.clear()

    def kept(self) -> Sequence[Tensor]:
        return self._gradients.tensors()

    def release(self) -> None:
        self._elsewhere.release()
        self._accumulators = []  # they hold the parameters, and no collector sees that


@dataclass(frozen=True)
class _PackedFactors:
    """Rows of factors that this rank contributes."""

    left: Tensor
    right: Tensor
    share: float
    more: Tensor | None  # extra gradients, flat
    mark: Mark | None  # the round's mark


@dataclass(frozen=True)
class _Gathered:
    """All ranks' rows in rank order. The right factors are divided by the mean of shares."""

    left: Tensor
    right: Tensor
    mean_share: float
    more: bool  # whether any rank has extra gradients


def _gather(comm: Comm, packed: _PackedFactors) -> _Gathered:
    """Gather all ranks' rows. A peer posts its receives when it knows the row counts."""
    left, right, mark = packed.left, packed.right, packed.mark
    word = 0 if mark is None else mark.word
    words = [len(left), packed.share, 2 * word + (packed.more is not None)]
    header = torch.tensor(words, dtype=torch.float64, device="cpu")
    headers = [header if r == comm.rank else torch.empty_like(header) for r in range(comm.size)]
    pending = [comm.receive(headers[r], r) for r in comm.others]
    sends = [comm.send(header, r) for r in comm.others]
    comm.finish(pending)
    rows = [int(header_of_rank[0]) for header_of_rank in headers]
    mean_share = at_least(sum(float(header_of_rank[1]) for header_of_rank in headers) / comm.size)
    all_left, all_right = (
        left.new_empty(sum(rows), left.shape[1]),
        right.new_empty(sum(rows), right.shape[1]),
    )
    lefts, rights = all_left.split(rows), all_right.split(rows)
    pending = [
        comm.receive(parts[r], r) for parts in (lefts, rights) for r in comm.others if rows[r]
    ]
    if len(left):
        own_factors = to_host(left), to_host(right)  # copied from a GPU once for all peers
        pending += comm.send_in_turn((r, own_factors) for r in comm.others)
    lefts[comm.rank].copy_(left)
    rights[comm.rank].copy_(right)
    comm.finish([*pending, *sends])
    if mark is not None and any(int(theirs[2]) >> 1 != mark.word for theirs in headers):
        mark.compare(comm)
    if mean_share != 1:
        all_right.div_(mean_share)
    more = any(int(header_of_rank[2]) & 1 for header_of_rank in headers)
    return _Gathered(all_left, all_right, mean_share, more)


def _accumulator(parameter: Tensor) -> Any:
    function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]
