"""Checks that modules have not changed since their forward was traced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from hybridtrain._torch_private import hooks_of
from hybridtrain.errors import ConfigError
from hybridtrain.graph.frozen import globals_read

# The modules whose code a graph stands for, by name, and the training flags, in the order of the
# modules, with which the graph was traced; empty if they make no difference.
Traced = tuple[Mapping[str, nn.Module], Sequence[tuple[bool, ...]]]


class TraceGuards:
    """The assumptions that the graphs of a model make about the modules that were traced.

    A graph contains the numbers, flags and texts that the forward read from its module, runs no
    hooks of it, and is of one mode of all the modules together.
    """

    def __init__(
        self,
        traced: Iterable[Traced] = (),
        grad_matters: bool = False,
        changes: Collection[tuple[int, str]] = (),
    ) -> None:
        self._traced = list(traced)
        self._grad_matters = grad_matters
        self._hooks = [
            (name, hooks)
            for modules, _ in self._traced
            for name, module in modules.items()
            for hooks in hooks_of(module)
        ]
        simple = (bool, int, float, str, type(None))
        self._attributes = [
            (name, vars(module), key, value)
            for modules, _ in self._traced
            for name, module in modules.items()
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_") and type(value) in simple
            if (id(module), key) not in changes
        ]
        changed = {name for _, name in changes}
        self._attributes += [
            (f"the global {held.get('__name__')}", held, key, held[key])
            for modules, _ in self._traced
            for held, key in globals_read(modules.values())
            if type(held[key]) in simple and key not in changed
        ]

    def check(self) -> None:
        """Makes sure that the graphs still do what the modules would do.

        Raises:
            ConfigError: a module has changed; names it, and what has changed.
        """
        if self._grad_matters:
            self._check_grad_mode()
        for name, hooks in self._hooks:
            if hooks:
                raise ConfigError(
                    f"{name or 'the model'} had a hook registered after tracing, which would not "
                    f"run: register hooks before you create the HybridModel"
                )
        for modules, modes in self._traced:
            now = tuple(module.training for module in modules.values())
            if modes and now not in modes:
                name = next(
                    name
                    for name, is_on, was_on in zip(modules, now, modes[0], strict=True)
                    if is_on != was_on
                )
                raise ConfigError(
                    f"module {name!r} was switched to another mode than the model around it, whose "
                    f"forward depends on the mode: let its train() keep that mode when it is traced"
                )
        for name, attributes, key, value in self._attributes:
            if attributes[key] != value and value == value:  # a NaN is never equal
                raise ConfigError(
                    f"{name or 'the model'}.{key} has changed from {value!r} to "
                    f"{attributes[key]!r} since the model was traced: create a new HybridModel, or "
                    f"use it in a submodule without submodules, which is called and not traced"
                )

    def _check_grad_mode(self) -> None:
        root = next(iter(self._traced[0][0].values()))
        if torch.is_grad_enabled() != root.training:
            usual = "training with gradients, and evaluation without"
            now = "without" if root.training else "with"
            raise ConfigError(
                f"{type(root).__name__} asks torch.is_grad_enabled() and was traced for {usual}: "
                f"it cannot run in {'train' if root.training else 'eval'}() mode {now} them"
            )
