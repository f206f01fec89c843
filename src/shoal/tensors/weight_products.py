"""Finds products of rows with a layer's weight in the layer's own forward, and replaces them.

    y = x·Wᵀ + b    F.linear(x, W, b), torch.einsum("...i,oi->...o", x, W)
    y = x·W + b     torch.addmm(b, x, W), x @ W, torch.einsum("...i,io->...o", x, W)

W may be transposed by `t`, `T`, `transpose` and similar. The bias may be added right after the
product. The rest of the forward runs as it stands, on this rank's own rows. So a layer of any class
can be cut or have its factors sent, if its forward multiplies with its weight.

Costs a Python call for each function of torch in that forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.core.errors import UsageError

_MULTIPLIES = frozenset(("matmul", "__matmul__", "mm"))
_ADDS = frozenset(("add", "add_", "__add__", "__iadd__", "__radd__"))
_TURNS = frozenset(
    ("t", "__get__", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
)


class Product(NamedTuple):
    """A product of rows and a weight: its input, and its form."""

    x: Tensor
    turned: bool  # whether y = x·W, not x·Wᵀ
    adds: bool  # whether the same function adds the bias


class Products(TorchFunctionMode):
    """Watches one call of a layer's own forward for products with its weight.

    Args:
        weight: the layer's matrix.
        bias: its vector, or None.
        turned: the form of the products that are replaced, as in `Product`.
        adds_late: whether the next function after the product adds the bias.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, turned: bool = False, adds_late: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._form = turned, adds_late
        self._shape = torch.empty(weight.shape, device="meta")
        self._turned: list[Tensor] = []  # stand-ins for the transposed weight
        self._due: Tensor | None = None  # a product that waits for its bias

    def multiply(self, product: Product, plain: Callable[[], Any]) -> Any:
        """Return a product's output. `plain` calls torch's own function."""
        return plain()

    def takes(self, product: Product) -> bool:
        """Return whether to replace a product. Torch computes others with the whole weight."""
        turned, adds_late = self._form
        has_bias = self.bias is None or product.adds or adds_late
        return has_bias and product.turned == turned

    def with_bias(self, due: Tensor, plain: Callable[[], Any]) -> Any:
        """Return a product with the bias that is added after it."""
        return due

    def without_bias(self, func: Callable[..., Any]) -> None:
        """Raise UsageError, because a function uses a product before the bias was added."""
        raise UsageError(
            "a layer used the product of its input and its weight before it added the bias, which "
            "it did not do on the sample",
            got=name_of(func),
            do='pin the layer to "replicate"',
        )

    def reads(self, func: Callable[..., Any], values: Sequence[Any]) -> None:
        """Note a function that makes a tensor and is no such product, with its arguments."""

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call the layer's own forward."""
        with self:
            output = forward(*args, **kwargs)
        if self._due is not None:
            self._due = None
            self.without_bias(forward)
        return output

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._due is not None:
            if _is_sum(func, args, kwargs, self._due, self.bias):
                due, self._due = self._due, None
                return self.with_bias(due, lambda: func(*args, **kwargs))
            if _has(args, self._due):
                result = func(*args, **kwargs)
                if isinstance(result, Tensor):
                    self._due = None
                    self.without_bias(func)
                return result  # its shape, or its type
        if args and args[0] is self.weight and getattr(func, "__name__", "") in _TURNS:
            sign = func(self._shape, *args[1:], **kwargs)
            if isinstance(sign, Tensor) and _is_turned(sign, self._shape):
                self._turned.append(sign)
                return sign
        product = self._product(func, args, kwargs)
        if product is None or not self.takes(product):
            result = func(*self._fill_in(args), **kwargs)
            if isinstance(result, Tensor | tuple | list):
                self.reads(func, args)
            return result
        result = self.multiply(product, lambda: func(*self._fill_in(args), **kwargs))
        if self.bias is not None and not product.adds:
            self._due = result
        return result

    def has_sign(self, values: Sequence[Any]) -> bool:
        """Return whether the transposed weight is among these arguments."""
        return any(_has(values, sign) for sign in self._turned)

    def _fill_in(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments with the transposed weight in place of its stand-ins."""
        return [self.weight.t() if _has(self._turned, arg) else arg for arg in args]

    def _product(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Product | None:
        """Return a call's product with the weight; None if the call is no such product."""
        name, bias, turned = getattr(func, "__name__", ""), None, None
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
            x, bias = named.get("input"), named.get("bias")
            as_it_is = self._is_turned_weight(named.get("weight"))
            turned = None if as_it_is is None else not as_it_is
        elif name in _MULTIPLIES and len(args) == 2 and not kwargs:
            x, turned = args[0], self._is_turned_weight(args[1])
        elif name == "addmm" and len(args) == 3 and not kwargs:
            bias, x, turned = args[0], args[1], self._is_turned_weight(args[2])
        elif name == "einsum" and len(args) == 3 and not kwargs:
            x, turned = self._of_letters(*args)
        else:
            return None
        if turned is None or not isinstance(x, Tensor) or x is self.weight:
            return None
        if bias is not None and bias is not self.bias:
            return None
        return Product(x, turned, adds=bias is not None)

    def _is_turned_weight(self, factor: Any) -> bool | None:
        """Return whether x @ factor is x·W (True) or x·Wᵀ (False); None if it is neither."""
        if factor is self.weight:
            return True
        return False if _has(self._turned, factor) else None

    def _of_letters(self, equation: Any, first: Any, second: Any) -> tuple[Any, bool | None]:
        """Return the rows and the form of an einsum."""
        if not isinstance(equation, str):
            return None, None
        inputs, arrow, out = equation.replace(" ", "").partition("->")
        operands = dict(zip(inputs.split(","), (first, second), strict=False))
        if not arrow or len(operands) != 2:
            return None, None
        for (rows, x), (letters, factor) in (
            tuple(operands.items()),
            tuple(reversed(operands.items())),
        ):
            as_it_is = self._is_turned_weight(factor)
            if as_it_is is None or len(set(letters)) != 2 or len(letters) != 2 or not rows:
                continue
            ahead, summed = rows[:-1], rows[-1]
            other = letters.replace(summed, "")
            is_product = len(other) == 1 and not set(ahead.replace(".", "")) & set(letters)
            if is_product and out == ahead + other:
                return x, as_it_is == (letters[0] == summed)
        return None, None


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name; for a getter, the attribute's name."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def _is_turned(sign: Tensor, whole: Tensor) -> bool:
    shape = whole.shape[::-1]
    return sign._base is whole and sign.shape == shape and sign.stride() == whole.stride()[::-1]


def _is_sum(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    product: Tensor,
    bias: Tensor | None,
) -> bool:
    """Return whether a call adds a bias to a product, and nothing else."""
    if getattr(func, "__name__", "") not in _ADDS or len(args) != 2 or kwargs:
        return False
    return (args[0] is product and args[1] is bias) or (args[1] is product and args[0] is bias)


def _has(values: Sequence[Any], one: Any) -> bool:
    """Return whether values have this very object; an equal one does not count."""
    return any(value is one for value in values)
