"""Parameter groups by patterns for the names of parameters, and several optimizers as one."""

from __future__ import annotations

import inspect
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    each = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in each)


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Returns the present rate of each parameter group, as `lr/<its name or number>`."""
    groups = enumerate(optimizer.param_groups)  # a rate is a tensor, if the user chose so
    return {f"lr/{group.get('name', index)}": float(group["lr"]) for index, group in groups}


def matching(patterns: str | Sequence[str], names: Iterable[str], key: str) -> list[str]:
    """Returns those of `names` that match.

    Raises:
        ConfigError: a pattern matches none; names `key`, the argument.
    """
    names = list(names)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = closest(pattern.replace("*", ""), names, cutoff=0.3) or next(iter(names), None)
            hint = f", such as {close}" if close else ""
            raise ConfigError(
                f"{setting(key, pattern)} matches no parameter: it is compared with whole "
                f"names{hint}"
            )
    return [name for name in names if fits(name, patterns)]


def parameter_groups(
    model: HybridModel,
    rules: Sequence[Mapping[str, Any]] = (),
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Returns the parameters of `model` in groups, for any optimizer of PyTorch.

        groups = parameter_groups(model, [{"match": ["*.bias", "norm*"], "weight_decay": 0.0}])
        optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)

    A parameter belongs to the first rule that matches its name, the others to a last group without
    settings. The groups are the same in every process; one of which this process has no parameter
    holds an empty one.

    Args:
        model: whose trainable parameters, of this process's stages, are in the groups.
        rules: each a mapping of `match`, a pattern for names or several, and the group's settings.
        lr: the learning rate that `layer_decay` begins with.
        layer_decay: multiplies the learning rate from each block to the one before. A block is what
            has the same name up to its first number (`layers.3`), or the same first component, in
            the order of the model. A rule's own `lr` is multiplied as well.

    Raises:
        ConfigError: a pattern matches no parameter, or `layer_decay` has no `lr`.
    """
    trainable = {name: p for name, p in model.net.named_parameters() if p.requires_grad}
    own = dict(model.named_parameters())
    for rule in rules:
        if "match" not in rule:
            raise ConfigError(
                f"groups={dict(rule)} lacks {argument('match')}, a pattern for parameter names"
            )
        matching(rule["match"], trainable, "match")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ConfigError(
            f"{setting('layer_decay', layer_decay)} must be more than 0 and at most 1"
        )
    if layer_decay is not None and lr is None:
        raise ConfigError(f"{argument('layer_decay')} multiplies a learning rate: give lr= as well")
    blocks = list(dict.fromkeys(_block(name) for name in trainable))
    groups: dict[tuple[int, str | None], dict[str, Any]] = {}
    for name in trainable:
        number = next((i for i, rule in enumerate(rules) if fits(name, rule["match"])), len(rules))
        block = _block(name) if layer_decay is not None else None
        key = number, block
        if key not in groups:
            rule = {} if number == len(rules) else dict(rules[number])
            rule.pop("match", None)
            if layer_decay is not None and lr is not None and block is not None:
                depth = len(blocks) - 1 - blocks.index(block)
                rule["lr"] = rule.get("lr", lr) * layer_decay**depth
                rule["name"] = block if number == len(rules) else f"{block}.{number}"
            groups[key] = {"params": [], **rule}
        if name in own:
            groups[key]["params"].append(own[name])
    found = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    for group in found:
        # as an optimizer wants one at least
        group["params"] = group["params"] or [Parameter(torch.empty(0))]
    return found or [{"params": [Parameter(torch.empty(0))]}]


def _block(name: str) -> str:
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if re.fullmatch(r"\d+", part)), 0)
    return ".".join(parts[: number + 1])


class CombinedOptimizer(Optimizer):
    """Several optimizers, each over its own parameters, that step as one.

    Its groups are those of all of them, in order, so that schedules, gradient scalers and
    checkpoints see one optimizer.

    Args:
        optimizers: two or more.

    Raises:
        ConfigError: two of them hold the same parameter.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        held = [id(p) for each in self.optimizers for g in each.param_groups for p in g["params"]]
        if len(set(held)) < len(held):
            raise ConfigError("two of the optimizers hold the same parameter")
        groups = [dict(g) for each in self.optimizers for g in each.param_groups]
        self._is_complete = False
        super().__init__(groups, {})
        self._is_complete = True
        self._join()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: which of the optimizers should have it?

        Raises:
            ConfigError: always.
        """
        if self._is_complete:
            raise ConfigError(
                "add the group to one of the optimizers, and make the CombinedOptimizer anew"
            )
        super().add_param_group(param_group)

    def _join(self) -> None:
        """Takes the groups and states of the optimizers, as the same objects."""
        self.param_groups = [g for each in self.optimizers for g in each.param_groups]
        merged: dict[Tensor, Any] = {}
        for each in self.optimizers:
            merged.update(each.state)
        self.state = defaultdict(dict, merged)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps each; a closure is not supported."""
        if closure is not None:
            raise ValueError("a CombinedOptimizer takes no closure")
        for each in self.optimizers:
            each.step()
        self._join()

    def train(self) -> None:
        """Gives the parameters the values to train on; see `show_weights`."""
        for each in self.optimizers:
            show_weights(each, training=True)
        self._join()

    def eval(self) -> None:
        """Gives the parameters the values to evaluate and save; see `show_weights`."""
        for each in self.optimizers:
            show_weights(each, training=False)
        self._join()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all parameters."""
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, each optimizer its part.

        Raises:
            ValueError: it has another number of groups.
        """
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError("the state is of an optimizer with another number of parameter groups")
        groups = iter(state_dict["param_groups"])
        for each in self.optimizers:
            own = [next(groups) for _ in each.param_groups]
            numbers = [number for group in own for number in group["params"]]
            states = {n: state_dict["state"][n] for n in numbers if n in state_dict["state"]}
            each.load_state_dict({"state": states, "param_groups": own})
        self._join()


def check_steps_alone(optimizer: Optimizer, key: str) -> None:
    """Refuses an optimizer whose step must be given a closure, as that of LBFGS.

    Raises:
        ConfigError: it is one; `key` says where it was given.
    """
    for each in getattr(optimizer, "optimizers", [optimizer]):
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ConfigError(_needs_closure(key))


def take_step(optimizer: Optimizer, step: Callable[[], object], key: str | None = None) -> None:
    """Calls `step`, a step of `optimizer`; says what to do if it fails for want of a closure.

    Raises:
        ConfigError: in place of the error of an optimizer such as SAM, whose step has `closure` as
            an optional argument, and asks for it; `key` says where it was given.
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
        f"{key}: its step computes the loss again, by a closure, and a step here has one forward "
        f'and backward. In your own loop over model.train_step it works, see "Optimizers that '
        f'compute the loss again" in docs/custom-steps.md; or choose another optimizer'
    )


def show_weights(optimizer: Optimizer, training: bool) -> None:
    """Gives the parameters the values to train on, or those to evaluate and save.

    These differ for an optimizer with methods `train` and `eval`, as schedule-free ones have; for
    others nothing happens.
    """
    switch = getattr(optimizer, "train" if training else "eval", None)
    if callable(switch):
        with torch.no_grad():
            switch()


def keys_of_state(optimizer: Optimizer) -> list[frozenset[str]]:
    """Returns for each parameter group the entries that the optimizer counts in.

    They are not settings, but a part of its state, such as the number of steps: its constructor
    makes them, and has no argument for them.
    """
    keys = []
    for each in getattr(optimizer, "optimizers", [optimizer]):
        kinds = [kind for kind in type(each).__mro__ if "__init__" in vars(kind)]
        settings = {name for kind in kinds for name in inspect.signature(kind).parameters}
        made = frozenset(getattr(each, "defaults", {})) - settings
        keys += [made] * len(each.param_groups)
    return keys
