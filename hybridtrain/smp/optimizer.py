"""A script's optimizer, created over the whole model and used on this process's stages."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hybridtrain.errors import ConfigError, UserError, did_you_mean, naming
from hybridtrain.model import HybridModel
from hybridtrain.smp.amp import GradScaler
from hybridtrain.smp.bodies import refuse_in_body
from hybridtrain.smp.config import NAMING
from hybridtrain.smp.ranks import PARTIAL, CommGroup, allgather, whole
from hybridtrain.smp.runtime import current
from hybridtrain.step import ReplicaShares

_SCALE_ARGUMENTS = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class DistributedOptimizer(Optimizer):
    """The given optimizer with the methods of smp 1.x; it stays an instance of its class.

        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    Create it before the first step, over the parameters of the plain module or of the
    `DistributedModel`. From the first step on, its parameter groups contain the parameters of this
    process's stages; the number of groups does not change.

    Args:
        optimizer: any optimizer of `torch.optim`, or with the same interface.
        static_loss_scale: with `fp16` in the configuration, the loss scale; None: dynamic.
        dynamic_loss_scale: adapt the loss scale to overflows.
        **dynamic_loss_args: `init_scale`, `scale_factor`, `scale_window` and `min_scale`;
            `delayed_shift` and `consecutive_hysteresis` have no effect.

    Attributes:
        loss_scaler: scales the loss; None without `fp16`.
        overflow: True if the last `step` was skipped because a gradient was not finite.

    Raises:
        ConfigError: `optimizer` is not an optimizer, an argument is unknown, or its `step` was
            replaced by anything but a learning-rate scheduler of `torch.optim`.
        UserError: the model has already been partitioned.
    """

    loss_scaler: GradScaler | None

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> DistributedOptimizer:
        """Returns `optimizer` itself, as an instance of a class derived from both."""
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"smp.DistributedOptimizer takes a torch optimizer, not {optimizer!r:.100}"
            )
        if not isinstance(optimizer, DistributedOptimizer):
            kind = type(optimizer)
            replaced = vars(optimizer).get("step")
            if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
                raise ConfigError(
                    "the optimizer's step was replaced before smp.DistributedOptimizer: call "
                    "smp.DistributedOptimizer first"
                )
            optimizer.__class__ = type(
                f"Distributed{kind.__name__}", (DistributedOptimizer, kind), {}
            )
            if replaced is not None:
                _track_steps(optimizer)
        return optimizer  # type: ignore[return-value]

    def __init__(  # the optimizer's own __init__ has run
        self,
        optimizer: Any,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        **dynamic_loss_args: Any,
    ) -> None:
        refuse_in_body("smp.DistributedOptimizer()", "before")
        runtime = current()
        arguments = dict(
            dynamic_loss_args.pop("dynamic_loss_args", None) or {}, **dynamic_loss_args
        )
        for name in arguments:
            if name not in _SCALE_ARGUMENTS:
                hint = did_you_mean(name, _SCALE_ARGUMENTS, "arguments")
                raise ConfigError(f"smp.DistributedOptimizer: unknown argument {name}: {hint}")
        self.loss_scaler = None
        if runtime.config.fp16:
            dynamic = dynamic_loss_scale or static_loss_scale is None
            self.loss_scaler = _scaler(
                {**_SCALE_ARGUMENTS, **arguments}, dynamic, static_loss_scale
            )
        self.overflow = self._updates = False
        if any(optimizer is self for optimizer in runtime.optimizers):
            return
        _check_not_divided("smp.DistributedOptimizer")
        self._shares: ReplicaShares | None = None
        # once the model is partitioned: by group, the indices of all parameters, as in a plain
        # optimizer over the whole model, and of this process's parameters
        self._numbers: list[list[int]] | None = None
        self._own_numbers: list[int] = []
        runtime.optimizers.append(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, before the first step.

        Raises:
            UserError: called inside a step, or the model has already been partitioned.
        """
        refuse_in_body("optimizer.add_param_group()", "before")
        _check_not_divided("optimizer.add_param_group")
        super().add_param_group(param_group)

    @naming(NAMING)
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters of this process's stages, unless a gradient is not finite.

        In that case all processes skip the update, and a warning names the origin of the value.
        With `fp16`, the gradients are first divided by the loss scale, and an overflow causes no
        warning. A step with a closure is not checked.

        All processes of a pipeline must call it together.

        Raises:
            UserError: called inside a step, or with a closure and `fp16`.
        """
        refuse_in_body("optimizer.step()", "after")  # before the norm, which waits for all stages
        if closure is not None and self.loss_scaler is not None:
            raise UserError(
                "optimizer.step(closure) cannot be combined with fp16, which must check the "
                "gradients before the update: run the step first, then call optimizer.step()"
            )
        model = current().model
        step = None if model is None else model.optimizer_step
        # the script's own scaler decides itself, and passes its decision to a fused optimizer
        decided = self._updates or hasattr(self, "found_inf")
        if model is not None and not model.gradients_are_averaged:
            decided = True  # replicas may differ in which gradients are finite
        if step is not None and closure is None and not decided:
            self.overflow = self._updates = True
            try:
                step.take(self)  # calls this method again, or does not
            finally:
                self._updates = False
            step.end()
            return None
        self.overflow = False
        with self._own_share():
            result = super().step(closure) if closure is not None else super().step()
        if self._shares is not None:
            self._shares.send_updates()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients.

        Raises:
            UserError: called inside a step.
        """
        refuse_in_body("optimizer.zero_grad()", "before")
        super().zero_grad(set_to_none)

    @naming(NAMING)
    def clip_master_grads(self, max_norm: float) -> Tensor:
        """Clips the gradient norm of all stages to `max_norm`; returns the norm before clipping.

        Raises:
            UserError: called inside a step, or before the first one.
        """
        refuse_in_body("optimizer.clip_master_grads()", "after")
        model = current().model
        if model is None or model.optimizer_step is None:
            raise UserError("no smp.DistributedModel exists, or it has not run a step yet")
        return model.optimizer_step.clip(max_norm)

    @property
    def optimizer(self) -> DistributedOptimizer:
        """The wrapped optimizer: this object itself."""
        return self

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 without `fp16`."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.get_scale()

    def take_own_parameters(self, hybrid: HybridModel, of_model: Container[int]) -> None:
        """Removes the parameters of stages in other processes, once the model is partitioned.

        Args:
            hybrid: the partitioned model.
            of_model: the ids of all parameters that the model had; parameters of the script itself
                stay.
        """
        parameters_here = {id(p) for p in hybrid.parameters()}
        number = count()
        self._numbers = []
        for group in self.param_groups:
            group["params"], parameters = [], group["params"]
            self._numbers.append([next(number) for _ in parameters])
            for p, its_number in zip(parameters, self._numbers[-1], strict=True):
                if id(p) in parameters_here or not (p.is_meta or id(p) in of_model):
                    group["params"].append(p)
                    self._own_numbers.append(its_number)
                else:
                    self.state.pop(p, None)
        if current().config.shard_optimizer_state and current().world.data_parallel_size > 1:
            self._shares = ReplicaShares(hybrid)
            self._shares.add(p for group in self.param_groups for p in group["params"])
            self._keep_own_share()

    @contextmanager
    def _own_share(self) -> Iterator[None]:
        """Makes the groups contain only the parameters that this replica updates."""
        if self._shares is None:
            yield
            return
        all_parameters = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if self._shares.owns(p)]
        try:
            yield
        finally:
            for group, parameters in zip(self.param_groups, all_parameters, strict=True):
                group["params"] = parameters

    def _keep_own_share(self) -> None:
        """Drops the state of parameters that another replica updates."""
        if self._shares is not None:
            for parameter in [p for p in self.state if not self._shares.owns(p)]:
                del self.state[parameter]

    @naming(NAMING)
    def state_dict(self) -> dict[str, Any]:
        """Returns the state for the whole model, which a plain optimizer can load.

        Parameters have the indices of the original optimizer. All processes of a pipeline must call
        it together, and of all replicas with `shard_optimizer_state`. With stages in several
        processes, tensors are on the CPU. With `fp16`, the state includes the loss scale.

        Raises:
            UserError: called inside a step.
        """
        refuse_in_body("optimizer.state_dict()")
        return self._numbered(is_whole=True)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Returns the state for this process's stages, marked as partial.

        Args:
            gather_if_shard: with `shard_optimizer_state`, combine the entries of all replicas,
                which must call this together; False: only the entries of this replica.
        """
        return {**self._numbered(is_whole=False, gathers=bool(gather_if_shard)), PARTIAL: True}

    @naming(NAMING)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state for a whole model, or the partial states of all pipeline processes.

        With `fp16` and a dynamic loss scale, the scale is loaded too, if present.

        Raises:
            ConfigError: the parameter groups differ.
            UserError: called inside a step.
        """
        refuse_in_body("optimizer.load_state_dict()")
        state = whole(state_dict)
        groups = state["param_groups"]
        current_groups = Optimizer.state_dict(self)["param_groups"]
        numbers = self._numbers or [group["params"] for group in current_groups]
        if [list(group["params"]) for group in groups] != numbers:
            raise ConfigError(
                "the state has parameter groups that differ from the optimizer's: construct the "
                "optimizer with the same groups as the saved one"
            )
        entries = state["state"]
        if self._numbers is not None:
            places = {number: place for place, number in enumerate(self._own_numbers)}
            entries = {places[n]: entry for n, entry in entries.items() if n in places}
        merged = [
            {**saved, "params": current["params"]}
            for saved, current in zip(groups, current_groups, strict=True)
        ]
        Optimizer.load_state_dict(self, {"state": entries, "param_groups": merged})
        self._keep_own_share()
        self.load_loss_scale(state_dict.get("loss_scaler"))

    def loss_scaler_state(self) -> dict[str, Any]:
        """Returns the entry of a state with the loss scale; empty without `fp16`."""
        return {} if self.loss_scaler is None else {"loss_scaler": self.loss_scaler.state_dict()}

    def load_loss_scale(self, state: Mapping[str, Any] | None) -> None:
        """Loads the loss scale of a state, unless this optimizer's is static."""
        if self.loss_scaler is not None and state is not None:
            self.loss_scaler.load_scale(state)

    def _numbered(self, is_whole: bool, gathers: bool = True) -> dict[str, Any]:
        """Returns the state with the indices of all parameters; of all stages if `is_whole`."""
        local = Optimizer.state_dict(self)
        if self._numbers is None:
            return {**local, **self.loss_scaler_state()}
        state = {self._own_numbers[place]: entry for place, entry in local["state"].items()}
        spread = [CommGroup.RDP_GROUP] if self._shares is not None and gathers else []
        if is_whole and current().world.pipeline_group is not None:
            spread.append(CommGroup.MP_GROUP)
        # Each process has some of the entries. Combine those of the replicas first, so that the
        # processes of a pipeline then have everything they must send.
        for processes in spread:
            state_on_cpu = tree_map_only(Tensor, lambda t: t.detach().cpu(), state)
            parts = allgather(state_on_cpu, processes)
            state = {number: entry for part in parts for number, entry in part.items()}
        if CommGroup.MP_GROUP in spread:
            state = dict(sorted(state.items()))
        groups = [
            {**group, "params": numbers}
            for group, numbers in zip(local["param_groups"], self._numbers, strict=True)
        ]
        return {"state": state, "param_groups": groups, **self.loss_scaler_state()}


class LocalOptimizer:
    """The plain view of a `DistributedOptimizer` on this process's stages, for checkpoints."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups."""
        return self._optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for this process's stages, numbered as in `param_groups`."""
        return Optimizer.state_dict(self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state of this process's stages."""
        Optimizer.load_state_dict(self._optimizer, dict(state))
        self._optimizer._keep_own_share()


def _track_steps(optimizer: Any) -> None:
    """Makes calls of `step` visible to a scheduler created before.

    The scheduler has replaced the instance's `step` by a call of the plain optimizer's.
    """
    reference = ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None
        target._opt_called = True
        return type(target).step(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


def _check_not_divided(what: str) -> None:
    model = current().model
    if model is not None and model.partitioned:
        raise UserError(
            f"call {what} before the first step, which partitions the model: create the optimizer "
            f"with all of its groups first"
        )


def _scaler(arguments: Mapping[str, Any], dynamic: bool, static: float | None) -> GradScaler:
    kind = current().world.devices[0].type
    if not dynamic:
        never = 2**31 - 1
        return GradScaler(
            kind, init_scale=float(static or 1.0), growth_interval=never, adapts=False
        )
    factor = float(arguments["scale_factor"])
    return GradScaler(
        kind,
        init_scale=float(arguments["init_scale"]),
        growth_factor=factor,
        backoff_factor=1 / factor,
        growth_interval=int(arguments["scale_window"]),
        min_scale=float(arguments["min_scale"]),
    )
