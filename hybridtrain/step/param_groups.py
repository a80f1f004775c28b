"""Parameter groups by name patterns, and several optimizers combined into one."""

from __future__ import annotations

import inspect
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain.errors import ConfigError, argument, closest, setting

if TYPE_CHECKING:
    from hybridtrain.model import HybridModel


def fits(name: str, patterns: str | Sequence[str]) -> bool:
    """Returns whether `name` matches a pattern with `*`, `?` and `[...]`, or one of several."""
    pattern_list = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in pattern_list)


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns the current learning rate of each parameter group, as `lr/<its name or index>`."""
    groups = enumerate(optimizer.param_groups)  # a rate may be a tensor, if the user chose so
    return {f"lr/{group.get('name', index)}": float(group["lr"]) for index, group in groups}


def matching(patterns: str | Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """Returns the names that match.

    Raises:
        ConfigError: a pattern matches no name; the message names the argument `key`.
    """
    names = list(names)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = closest(pattern.replace("*", ""), names, cutoff=0.3) or next(iter(names), None)
            hint = f", such as {close}" if close else ""
            raise ConfigError(
                f"{setting(key, pattern)} matches no parameter; patterns must match whole "
                f"names{hint}"
            )
    return [name for name in names if fits(name, patterns)]


def parameter_groups(
    model: HybridModel,
    rules: Sequence[Mapping[str, Any]] = (),
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
    matrices: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Returns the parameters of `model` in groups, for any optimizer of PyTorch.

        groups = parameter_groups(model, [{"match": ["*.bias", "norm*"], "weight_decay": 0.0}])
        optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)

    A parameter belongs to the first rule that matches its name; the others form a last group
    without settings. The groups are the same in every process; a group without parameters of this
    process holds an empty placeholder.

    Args:
        model: the model; the groups contain the trainable parameters of this process's stages.
        rules: mappings with `match` (a name pattern, or several) and the group's settings.
        lr: the learning rate that `layer_decay` starts from.
        layer_decay: the factor of the learning rate from each block to the previous one. A block
            shares a name up to its first number (`layers.3`), or the first name component, in model
            order. A rule's `lr` is decayed as well.
        matrices: the names of parameters that form groups of their own, with `use_muon=True`; the
            other groups then have `use_muon=False`. None: no group has this entry.

    Raises:
        ConfigError: a pattern matches no parameter, or `layer_decay` is given without `lr`.
    """
    trainable = {name: p for name, p in model.net.named_parameters() if p.requires_grad}
    parameters = dict(model.named_parameters())
    for rule in rules:
        if "match" not in rule:
            raise ConfigError(
                f"groups={dict(rule)} lacks {argument('match')}, a pattern for parameter names"
            )
        matching(rule["match"], trainable, "match")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ConfigError(f"{setting('layer_decay', layer_decay)} must be above 0 and at most 1")
    if layer_decay is not None and lr is None:
        raise ConfigError(
            f"{argument('layer_decay')} multiplies a learning rate: also set {argument('lr')}"
        )
    blocks = list(dict.fromkeys(_block(name) for name in trainable))
    groups: dict[tuple[int, str | None, bool | None], dict[str, Any]] = {}
    for name in trainable:
        number = next((i for i, rule in enumerate(rules) if fits(name, rule["match"])), len(rules))
        block = _block(name) if layer_decay is not None else None
        use_muon = None if matrices is None else name in matrices
        key = number, block, use_muon
        if key not in groups:
            rule = {} if number == len(rules) else dict(rules[number])
            rule.pop("match", None)
            if layer_decay is not None and lr is not None and block is not None:
                depth = len(blocks) - 1 - blocks.index(block)
                rule["lr"] = rule.get("lr", lr) * layer_decay**depth
                rule["name"] = block if number == len(rules) else f"{block}.{number}"
            if use_muon is not None:
                rule["use_muon"] = use_muon
            if use_muon and "name" in rule:
                rule["name"] += ".muon"
            groups[key] = {"params": [], **rule}
        if name in parameters:
            groups[key]["params"].append(parameters[name])
    sorted_groups = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    for group in sorted_groups:
        # because an optimizer needs at least one parameter
        group["params"] = group["params"] or [Parameter(torch.empty(0))]
    return sorted_groups or [{"params": [Parameter(torch.empty(0))]}]


def _block(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if re.fullmatch(r"\d+", part)), 0)
    return ".".join(parts[: number + 1])


class CombinedOptimizer(Optimizer):
    """Several optimizers, each with its own parameters, that step as one.

    Its groups are the groups of all optimizers, in order, so that schedules, gradient scalers and
    checkpoints see one optimizer.

    Args:
        optimizers: two or more.

    Raises:
        ConfigError: two of them hold the same parameter.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        held = [
            id(p)
            for optimizer in self.optimizers
            for g in optimizer.param_groups
            for p in g["params"]
        ]
        if len(set(held)) < len(held):
            raise ConfigError("two of the optimizers hold the same parameter")
        groups = [dict(g) for optimizer in self.optimizers for g in optimizer.param_groups]
        self._is_complete = False
        super().__init__(groups, {})
        self._is_complete = True
        self._join()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported, because the group's optimizer would be ambiguous.

        Raises:
            ConfigError: always.
        """
        if self._is_complete:
            raise ConfigError(
                "add the group to one of the optimizers, and create a new CombinedOptimizer"
            )
        super().add_param_group(param_group)

    def _join(self) -> None:
        """Adopts the groups and states of the optimizers, as the same objects."""
        self.param_groups = [g for optimizer in self.optimizers for g in optimizer.param_groups]
        merged: dict[Tensor, Any] = {}
        for optimizer in self.optimizers:
            merged.update(optimizer.state)
        self.state = defaultdict(dict, merged)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps each optimizer; a closure is not supported."""
        if closure is not None:
            raise ValueError("CombinedOptimizer.step does not support a closure")
        for optimizer in self.optimizers:
            optimizer.step()
        self._join()

    def train(self) -> None:
        """Sets the parameters to the values for training; see `show_weights`."""
        for optimizer in self.optimizers:
            show_weights(optimizer, training=True)
        self._join()

    def eval(self) -> None:
        """Sets the parameters to the values to evaluate and save; see `show_weights`."""
        for optimizer in self.optimizers:
            show_weights(optimizer, training=False)
        self._join()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, distributing it to the optimizers.

        Raises:
            ValueError: the number of groups differs.
        """
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                "the state and the optimizers differ in the number of parameter groups"
            )
        groups = iter(state_dict["param_groups"])
        for optimizer in self.optimizers:
            part = [next(groups) for _ in optimizer.param_groups]
            numbers = [number for group in part for number in group["params"]]
            states = {n: state_dict["state"][n] for n in numbers if n in state_dict["state"]}
            optimizer.load_state_dict({"state": states, "param_groups": part})
        self._join()


UNSUPPORTED_OPTIMIZERS = {
    "torchao": "torchao's optimizers keep their state in tensor subclasses, which a checkpoint "
    "cannot store, and round with draws from the global random generator, so that a resumed run "
    "would differ; for state in 8 bits use bitsandbytes' AdamW8bit (optim=adamw8bit)"
}
"""The packages with optimizers that are refused, and why."""


def check_optimizer(optimizer: Optimizer, key: str) -> None:
    """Refuses an optimizer that requires a closure in `step`, such as LBFGS, or is unsupported.

    Raises:
        ConfigError: its `step` requires a closure, or its package is one of
            `UNSUPPORTED_OPTIMIZERS`; the message names the argument `key`.
    """
    for inner in inner_optimizers(optimizer):
        packages = {kind.__module__.partition(".")[0] for kind in type(inner).__mro__}
        for package in packages & UNSUPPORTED_OPTIMIZERS.keys():
            raise ConfigError(f"{key}: {UNSUPPORTED_OPTIMIZERS[package]}")
        closure = inspect.signature(inner.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(_needs_closure(key))


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that a `CombinedOptimizer` combines, or `optimizer` alone."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [inner for part in optimizer.optimizers for inner in inner_optimizers(part)]


def take_step(optimizer: Optimizer, step: Callable[[], object], key: str | None = None) -> None:
    """Calls `step`, a step of `optimizer`; explains a failure caused by a missing closure.

    Raises:
        ConfigError: replaces the error of an optimizer such as SAM, which has an optional argument
            `closure` but requires it; the message names the argument `key`.
    """
    try:
        step()
    except (TypeError, AssertionError, AttributeError, RuntimeError, ValueError) as error:
        failing = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if "closure" not in f"{error} {failing}":
            raise
        key = key or f"optimizer={type(optimizer).__name__}"
        raise ConfigError(_needs_closure(key)) from error


def _needs_closure(key: str) -> str:
    return (
        f"{key}: this optimizer recomputes the loss in a closure, but a step here runs one forward "
        f'and backward. Use a custom loop over model.train_step, see "Optimizers that compute the '
        f'loss again" in docs/custom-steps.md; or choose another optimizer'
    )


def show_weights(optimizer: Optimizer, training: bool) -> None:
    """Sets the parameters to the values for training, or to the ones to evaluate and save.

    These differ for an optimizer with methods `train` and `eval`, such as schedule-free ones; for
    others this has no effect.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        with torch.no_grad():
            switch()


def keys_of_state(optimizer: Optimizer) -> list[frozenset[str]]:
    """Returns for each parameter group the entries that the optimizer itself counts in.

    They are state, such as the number of steps, not settings: the optimizer's constructor creates
    them without an argument.
    """
    keys = []
    for inner in inner_optimizers(optimizer):
        kinds = [kind for kind in type(inner).__mro__ if "__init__" in vars(kind)]
        settings = {name for kind in kinds for name in inspect.signature(kind).parameters}
        made = frozenset(getattr(inner, "defaults", {})) - settings
        keys += [made] * len(inner.param_groups)
    return keys
