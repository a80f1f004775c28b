"""Sizes that are symbols, in tensors without values, and what is computed of them.

PyTorch's `ShapeEnv`, the part of `torch.compile` that knows what holds for all sizes. The modules
`torch.fx.experimental.symbolic_shapes` and `torch.utils._sympy` have no public counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from hybridtrain._base.torch_private import FakeTensorMode


class SymbolicSizes:
    """Numbers that code on tensors without values computes with, without knowing them.

    If the code asks about a number, the answer is that of an example, and becomes a condition.
    """

    def __init__(self) -> None:
        # A number that depends on values is an error, as without symbols.
        self._env: Any = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._symbols: list[sympy.Symbol] = []

    def new(self, example: int) -> Any:
        """Returns a symbolic number of at least 2, with an example of it.

        Raises:
            ValueError: the example is 0 or 1, of which PyTorch makes no symbols.
        """
        if example < 2:
            raise ValueError(example)
        source = ConstantSource(f"number{len(self._symbols)}")  # for PyTorch's messages
        symbol = self._env.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
        self._symbols.append(symbol)
        return self._env.create_symintnode(symbol, hint=example, source=source)

    @contextmanager
    def of(self, mode: FakeTensorMode) -> Iterator[None]:
        """Lets the fake tensors of a mode have these numbers as sizes and strides in the block."""
        before, mode.shape_env = mode.shape_env, self._env
        try:
            # else operators that consist of others fix the numbers in PyTorch 2.11
            with enable_python_dispatcher():
                yield
        finally:
            mode.shape_env = before

    def formula(self, results: Sequence[Any]) -> Callable[[Sequence[int]], list[Any] | None]:
        """Returns what computes numbers as the code has computed them.

        Args:
            results: numbers, some of them symbolic.

        Returns:
            a function of the values of the symbols, in the order of `new`. It returns the results;
            None if an answer to a question would have been another one.
        """
        env = self._env
        if env.deferred_runtime_asserts:
            raise ValueError("a condition depends on values")
        ranges = [env.var_to_range[symbol] for symbol in self._symbols]
        conditions = self._compiled([guard.expr for guard in env.guards])
        values = self._compiled(
            [r.node.expr if isinstance(r, torch.SymInt) else sympy.Integer(r) for r in results]
        )

        def compute(numbers: Sequence[int]) -> list[Any] | None:
            if not all(r.lower <= n <= r.upper for r, n in zip(ranges, numbers, strict=True)):
                return None
            return values(*numbers) if all(conditions(*numbers)) else None

        return compute

    def _compiled(self, expressions: Sequence[Any]) -> Callable[..., list[Any]]:
        if any(expression.free_symbols - set(self._symbols) for expression in expressions):
            raise ValueError("a number depends on values")
        function: Callable[..., list[Any]] = sympy.lambdify(
            self._symbols, list(expressions), modules=[SYMPY_INTERP], printer=PythonPrinter()
        )
        return function
