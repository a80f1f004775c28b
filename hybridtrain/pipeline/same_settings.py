"""Compares what the scripts of the ranks set: modules, losses and optimizers.

    construction                modules: their classes and plain attributes, such as of a dropout
    first step                  the loss
    updates 1, 2, 4, 8, ...     classes and groups of the optimizers, so that learning rates that
                                a schedule sets differently are found, too

A rank whose script differs in one of these would train its stages or its replica differently, and
nothing else would notice. What must not differ is an error. What may differ on purpose, such as a
number that only the user's code reads, is a warning.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hybridtrain._base.rank_differences import (
    RankFacts,
    check_same,
    differences,
    facts_here,
    plain_attributes,
)
from hybridtrain.pipeline.forward import ForwardStage
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.pipeline.pipeline import Pipeline

_log = logging.getLogger(__name__)

_ALIKE = "run the same script with the same settings on all ranks"
_ADVICE = f": {_ALIKE}"

# Entries of a group that are no settings, or choose a kernel, as a host with other GPUs may do.
_NO_SETTINGS = ("params", "param_names", "foreach", "fused")


Gather = Callable[[RankFacts], Sequence[RankFacts]]


def check_same_modules(net: nn.Module, world: World) -> None:
    """Compares the modules of a model over the ranks; a collective call.

    It compares classes, and the plain attributes of PyTorch's modules. A module of the user's may
    know its rank, so it warns about its attributes of type float, and ignores others.

    Raises:
        ConfigError: a module differs; the message names it.
    """
    if world.size == 1:
        return
    alike = dict[str, str]()
    facts = {f"the number of modules of {type(net).__qualname__}": str(len(list(net.modules())))}
    for name, module in net.named_modules():
        kind = type(module)
        layer = f"the layer {name!r}" if name else "the model"
        facts[f"the class of {layer}"] = kind.__qualname__
        for target, values in zip((facts, alike), settings_of(module), strict=True):
            target.update({f"{k}= of {layer} ({kind.__qualname__})": v for k, v in values.items()})
    # All ranks see the same digests, so all take the same branch.
    if len(set(world.gather(_digest((facts, alike))))) > 1:  # the facts of a large model are long
        check_same(world.gather, facts, _ADVICE)
        _warn_of_difference(world.gather, alike, world.is_main)


def settings_of(value: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Returns attributes of an object that are equal on all ranks: certainly, and probably."""
    values = {name: value for name, value in vars(value).items() if name != "training"}
    if type(value).__module__.startswith("torch."):
        return plain_attributes(values), {}
    return {}, plain_attributes(values, (float,))


def _digest(facts: Any) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _warn_of_difference(gather: Gather, alike: Mapping[str, str], warns: bool) -> None:
    """Compares facts that may differ over the ranks.

    Args:
        gather: returns the facts of the ranks; a collective call, or see `_published`.
        alike: the facts.
        warns: whether this rank warns about the first difference.
    """
    difference = next(differences(gather(facts_here(alike))), None)
    if difference is not None and warns:
        text = "%s differs between the ranks: %s; if that is not intended, %s"
        _log.warning(text, *difference, _ALIKE)


class SettingsCheck:
    """Compares the loss and the optimizers of a model over the ranks.

    In a custom loop, a hook on the first steps of PyTorch's optimizers shows which of them are the
    model's. Ranks begin their steps at different times, and one may have no optimizer, so nothing
    waits: each rank publishes the settings of its own in the store, and compares them with those
    of the first rank that has done so. The error of the first one that differs ends the others.

    Args:
        world: the ranks.

    Attributes:
        has_loss: whether the loss has been compared.
        is_done: whether steps need not look at the optimizers: the loop compares them.
    """

    # Names the model in the store's keys, so the numbers must agree.
    _models = itertools.count()  # created in the same order on all ranks

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = next(self._models)
        self.has_loss = world.size == 1
        self.is_done = world.size == 1 or world.watchdog is None
        self._has_compared = False
        self._steps = 0
        # weak: a loop may replace an optimizer, whose state is twice as large as the model
        self._seen: list[weakref.ref[Optimizer]] = []
        self._held: set[int] = set()  # the ids of the model's parameters
        self._hook: RemovableHandle | None = None

    def check_loss(self, facts: Mapping[str, str], alike: Mapping[str, str]) -> None:
        """Compares facts about the loss, which must and which may be equal; a collective call.

        Raises:
            ConfigError: another rank has a different loss.
        """
        self.has_loss = True
        check_same(self._world.gather, facts, _ADVICE)
        _warn_of_difference(self._world.gather, alike, self._world.is_main)

    def begin_step(self, pipeline: Pipeline) -> None:
        """Begins a step that averages gradients; compares the optimizers that have stepped before.

        Args:
            pipeline: the model's pipeline.

        Raises:
            ConfigError: see `check_optimizers`.
        """
        if self.is_done:
            return
        before, self._steps = self._steps, self._steps + 1
        if before == 0:
            self._held = set(map(id, pipeline.trained))
            self._hook = _on_steps(self)
        elif before & (before - 1) == 0 and self._seen:
            # The first steps have shown all optimizers of the loop; the hook would cost in each
            # step.
            self._remove_hook()
            optimizers = [found for seen in self._seen if (found := seen()) is not None]
            key = f"optimizers/{self._number}/{before}"
            self._compare(
                lambda what: partial(_published, self._world, f"{key}/{what}"),
                optimizers,
                pipeline.stages,
                warns=True,
            )

    def saw(self, optimizer: Optimizer) -> None:
        """Records that an optimizer takes a step."""
        if not any(optimizer is seen() for seen in self._seen) and any(
            id(p) in self._held for group in optimizer.param_groups for p in group["params"]
        ):
            self._seen.append(weakref.ref(optimizer))

    def check_optimizers(self, optimizers: Sequence[Any], stages: Sequence[ForwardStage]) -> None:
        """Compares the optimizers over the ranks; a collective call.

        Ranks with the same stages must have the same groups. The groups of different stages may be
        different on purpose, for example by layer, so a difference is a warning.

        Args:
            optimizers: the optimizers of the model in this process.
            stages: the stages of this process.

        Raises:
            ConfigError: a class, a default or a group differs.
        """
        if self._world.size == 1:
            return
        # A loop that compares here makes the comparison through the store superfluous.
        self.is_done = True
        self._remove_hook()
        self._compare(lambda _: self._world.gather, optimizers, stages, self._world.is_main)

    def _compare(
        self,
        gather_of: Callable[[str], Gather],
        optimizers: Sequence[Any],
        stages: Sequence[ForwardStage],
        warns: bool,
    ) -> None:
        """Compares the optimizers over the ranks.

        Args:
            gather_of: returns the gather for the facts of this name, among the ranks that use it.
            optimizers: the optimizers of the model in this process.
            stages: the stages of this process.
            warns: whether this rank warns about groups that differ between stages, once.

        Raises:
            ConfigError: a class, a default or a group differs.
        """
        everywhere, in_stage = optimizer_facts(optimizers)
        is_divided = self._world.processes_per_replica > 1
        where = f" (stage {', '.join(str(stage.index) for stage in stages)})" * is_divided
        warns, self._has_compared = warns and not self._has_compared, True
        check_same(gather_of("all"), everywhere, _ADVICE)
        of_stage = {f"{name}{where}": text for name, text in in_stage.items()}
        check_same(gather_of(f"groups{where}"), of_stage, _ADVICE)
        if is_divided:
            _warn_of_difference(gather_of("groups of stages"), in_stage, warns)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _published(world: World, key: str, here: RankFacts) -> Sequence[RankFacts]:
    """Publishes the facts of this rank; returns what ranks have published so far.

    Only the first rank whose facts differ from the first published ones needs them; the others get
    their own alone. Otherwise N ranks would make N^2 requests to the store.
    """
    assert world.watchdog is not None
    store, digest, rank = world.watchdog.store, _digest(here.facts), str(world.rank)
    # Before the digest: who reads the digest of the first rank must find its facts.
    store.publish(key, json.dumps(asdict(here)))
    if store.publish_first(f"{key}/digest", digest) == digest:
        return [here]
    # One reader: its error names both ranks and ends the run.
    if store.publish_first(f"{key}/reader", rank) != rank:
        return [here]
    facts = {at: RankFacts(**json.loads(text)) for at, text in store.published(key).items()}
    return [facts.get(at, RankFacts({}, "")) for at in range(world.size)]


def _on_steps(check: SettingsCheck) -> RemovableHandle:
    """Tells `check` of the steps of all optimizers, while it exists."""
    reference = weakref.ref(check)

    def tell(optimizer: Optimizer, *_: Any) -> None:
        if (found := reference()) is not None:
            found.saw(optimizer)

    handle = register_optimizer_step_pre_hook(tell)
    # The hook is on the class of all optimizers, and would outlive the model.
    weakref.finalize(check, handle.remove)
    return handle


def optimizer_facts(optimizers: Sequence[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns facts that all ranks share, and facts that the ranks of a stage share."""
    everywhere, in_stage = dict[str, str](), dict[str, str]()
    count = len(optimizers)
    for number, optimizer in enumerate(optimizers):
        # ranks with other numbers of optimizers are not compared
        which = "the optimizer" if count == 1 else f"optimizer {number} of {count}"
        everywhere[f"the class of {which}"] = type(optimizer).__qualname__
        defaults = _settings(getattr(optimizer, "defaults", {}))
        everywhere |= {f"{name}= of {which}": text for name, text in defaults.items()}
        groups = optimizer.param_groups
        in_stage[f"the number of parameter groups of {which}"] = str(len(groups))
        for index, group in enumerate(groups):
            settings = _settings(group)
            where = f"parameter group {index} of {which}"
            in_stage |= {f"{name}= of {where}": text for name, text in settings.items()}
    return everywhere, in_stage


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Returns the plain values of a group, and those in tensors of one element."""
    values = {name: value for name, value in group.items() if name not in _NO_SETTINGS}
    return plain_attributes(
        {
            name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            for name, value in values.items()
        }
    )
