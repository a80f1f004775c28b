"""Checks that modules have not changed since their forward was traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hybridtrain._torch_private import hooks_of
from hybridtrain.errors import ConfigError
from hybridtrain.graph.frozen import globals_read
from hybridtrain.graph.mode_graphs import ModeGraphs

_SIMPLE = (bool, int, float, str, type(None))


class TraceGuards:
    """The assumptions that the graphs of a model make about the modules that were traced.

    A graph contains the numbers, flags and texts that the forward read from its module, runs no
    hooks of it, and is of one mode of all the modules together.
    """

    def __init__(self, graphs: Sequence[ModeGraphs] = ()) -> None:
        # not the graphs themselves, which hold tensors
        self._modes = [(graph.expanded, graph.modes) for graph in graphs if graph.modes]
        self._root = graphs[0].module if any(graph.grad_matters for graph in graphs) else None
        traced = [named for graph in graphs for named in graph.expanded.items()]
        self._hooks = [(name, hooks) for name, module in traced for hooks in hooks_of(module)]
        self._values = [
            (name, vars(module), key, value)
            for name, module in traced
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_") and type(value) in _SIMPLE
        ]
        self._values += [
            (f"the global {held.get('__name__')}", held, key, held[key])
            for graph in graphs
            for held, key in globals_read(graph.expanded.values())
            if type(held[key]) in _SIMPLE
        ]

    def check(self) -> None:
        """Makes sure that the graphs still do what the modules would do.

        Raises:
            ConfigError: a module has changed; names it, and what has changed.
        """
        if self._root is not None:
            _check_grad_mode(self._root)
        for name, hooks in self._hooks:
            if hooks:
                raise ConfigError(
                    f"{name or 'the model'} had a hook registered after tracing, which would not "
                    f"run: register hooks before you create the HybridModel"
                )
        for modules, modes in self._modes:
            now = tuple(module.training for module in modules.values())
            if now not in modes:
                flags = zip(modules, now, modes[0], strict=True)
                name = next(name for name, is_on, was_on in flags if is_on != was_on)
                raise ConfigError(
                    f"module {name!r} was switched to another mode than the model around it, whose "
                    f"forward depends on the mode: let its train() keep that mode when it is traced"
                )
        for name, attributes, key, was in self._values:
            value = attributes.get(key, "deleted")
            # a NaN is never equal, and a comparison with a tensor is not one flag
            if value is not was and (type(value) not in _SIMPLE or value != was == was):
                raise ConfigError(
                    f"{name or 'the model'}.{key} has changed from {was!r} to {value!r} since the "
                    f"model was traced: create a new HybridModel, or use it in a submodule without "
                    f"submodules, which is called and not traced"
                )


def _check_grad_mode(root: nn.Module) -> None:
    if torch.is_grad_enabled() != root.training:
        usual = "training with gradients, and evaluation without"
        now = "without" if root.training else "with"
        raise ConfigError(
            f"{type(root).__name__} asks torch.is_grad_enabled() and was traced for {usual}: "
            f"it cannot run in {'train' if root.training else 'eval'}() mode {now} them"
        )
