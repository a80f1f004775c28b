"""The callbacks of this project, which a config has by name.

They end a run early (`EarlyStopping`), lower its learning rate (`Plateau`), keep weights
(`BestWeights`, `EMA`, `SWA`), clip gradients (`ClipValue`), freeze parameters for a part of a run
(`Freeze`), and add to the log (`GradientNorms`, `LearningRates`, `Mfu`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.checkpoint import write_weights
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.loop.callbacks.base import Callback, Comparison
from hybridtrain.options import names_checked
from hybridtrain.step import fits, learning_rates, matching

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer
    from hybridtrain.model import HybridModel

_log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Ends the run after `patience` consecutive evaluations without a better value.

    A run that has ended so is complete; resumed with a larger `patience`, it trains on.

    Args:
        value: `loss`, or the name of a metric.
        mode: `min` if the smallest value is best, `max` if the largest is; None: by the value, as
            in `TrainerOptions.best_mode`.
        patience: evaluations.
        min_delta: by how much a value must be better to count, 0 or more.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self,
        value: str = "loss",
        mode: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"patience={patience} must be a whole number of at least 1")
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta} must be 0 or more")
        self.patience = patience
        self._comparison = Comparison(value, mode)
        self._min_delta = min_delta
        self._best = math.inf
        self._without_progress = 0

    def on_init(self, trainer: Trainer) -> None:
        """Checks that there is such a value; begins to count."""
        self._comparison.check(trainer)
        self._best, self._without_progress = math.inf, 0

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Compares, and ends the run when the patience is over."""
        if self.is_over(values) and trainer.world.is_main:
            _log.info(
                "the run ends early, at step %d: %s has not become better in %d evaluations",
                trainer.step, self._comparison.value, self._without_progress,
            )  # fmt: skip

    def is_over(self, values: Mapping[str, float]) -> bool:
        """Counts an evaluation; returns whether the patience is over."""
        found = self._comparison.of(values)
        if found < self._best - self._min_delta or (
            math.isinf(self._best) and math.isfinite(found)
        ):
            self._best, self._without_progress = found, 0
        else:
            self._without_progress += 1
        return self.stops

    def begin_again(self) -> None:
        """Counts from 0 again."""
        self._without_progress = 0

    @property
    def stops(self) -> bool:  # type: ignore[override]
        """True once the patience is over."""
        return self._without_progress >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the evaluations since."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "without_progress": self._without_progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._without_progress = state["without_progress"]


class Plateau(Callback):
    """Lowers the learning rate when a value of the evaluation gets no better.

    It has the rule of `torch.optim.lr_scheduler.ReduceLROnPlateau`, and multiplies whatever the
    schedule of the run gives. When it did so is in the checkpoint, so a resumed run has the same
    rates, bit by bit.

    Args:
        value: `loss`, or the name of a metric.
        mode: `min` if the smallest value is best, `max` if the largest is; None: by the value, as
            in `TrainerOptions.best_mode`.
        factor: of the learning rate, each time; between 0 and 1.
        patience: evaluations without a better value that are waited for.
        min_delta: by how much a value must be better to count, 0 or more.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self,
        value: str = "loss",
        mode: str | None = None,
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ConfigError(f"factor={factor} must be between 0 and 1")
        self._factor = factor
        self._stopping = EarlyStopping(value, mode, patience + 1, min_delta)
        self._lowered: list[int] = []  # the steps

    def on_init(self, trainer: Trainer) -> None:
        """Checks that there is such a value; puts itself behind the schedule."""
        self._stopping.on_init(trainer)
        self._lowered = []
        own = trainer.lr_schedule
        inner = own._inner if isinstance(own, _Lowered) else own
        trainer.lr_schedule = _Lowered(trainer.optimizer, inner, self._lowered, self._factor)

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Compares, and lowers the rates when the patience is over."""
        if self._stopping.is_over(values):
            self._stopping.begin_again()
            self._lowered.append(trainer.step)
            assert isinstance(trainer.lr_schedule, _Lowered)
            trainer.lr_schedule.lower()

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps at which the rates were lowered, and the evaluations since."""
        return {"lowered": list(self._lowered), **self._stopping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._lowered[:] = state["lowered"]
        self._stopping.load_state_dict(state)


class _Lowered(LRScheduler):
    """A schedule whose rates are lowered after some steps.

    The schedule itself never sees a lowered rate: many, such as a cosine, count on from the rate
    that they find, and would go back up to their own last one.
    """

    def __init__(
        self, optimizer: Optimizer, inner: LRScheduler | None, steps: Sequence[int], factor: float
    ) -> None:
        self.optimizer = optimizer
        self._inner, self._steps, self._factor = inner, steps, factor
        self._done = 0
        self._given = self._rates()

    def step(self, epoch: int | None = None) -> None:
        self._done += 1
        times = self._steps.count(self._done)
        if self._inner is not None:
            for group, rate in zip(self.optimizer.param_groups, self._given, strict=False):
                group["lr"] = _copied(rate, group["lr"])
            self._inner.step()
            self._given = self._rates()
            times = sum(step <= self._done for step in self._steps)
        for _ in range(times):
            self.lower()

    def lower(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= self._factor

    def get_last_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _rates(self) -> list[float | Tensor]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _copied(rate: float | Tensor, into: float | Tensor) -> float | Tensor:
    """Returns `rate`; a tensor of a rate stays the same one, which a compiled step may hold."""
    return into.copy_(torch.as_tensor(rate)) if isinstance(into, Tensor) else rate


class ClipValue(Callback):
    """Clips each element of the gradients to -`value` ... `value`.

    `trainer.clip_norm` is the usual choice: it keeps the direction. It and the norm in the log,
    `train/grad_norm`, are of the clipped elements.

    Args:
        value: positive.

    Raises:
        ConfigError: `value` is not positive.
    """

    @names_checked
    def __init__(self, value: float) -> None:
        if not value > 0:
            raise ConfigError(f"value={value} must be positive")
        self._value = value

    def on_gradients(self, trainer: Trainer) -> None:
        """Clips the gradients of this process's stages."""
        for parameter in trainer.model.parameters():
            if (grad := parameter.grad) is not None:
                # what is infinite becomes NaN, and the step is left out
                grad.copy_(grad.clamp(-self._value, self._value) + 0 * grad)


class GradientNorms(Callback):
    """Logs the L2 norm of the gradients of each part of the model, before `trainer.clip_norm`.

    The tags are `grad_norm/<part>`; `train/grad_norm` is that of the whole model. After a
    `ClipValue` in `callbacks` the elements are clipped.

    Args:
        depth: how many components of a parameter's name make a part: with 2,
            `layers.0.linear.weight` is of the part `layers.0`.

    Raises:
        ConfigError: `depth` is less than 1.
    """

    def __init__(self, depth: int = 1) -> None:
        if type(depth) is not int or depth < 1:
            raise ConfigError(f"depth={depth} must be a whole number of at least 1")
        self._depth = depth
        self._norms: dict[str, Tensor] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Takes the norms, if this step is logged."""
        if not trainer.logging:
            return
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                part = ".".join(name.split(".")[: self._depth])
                parts.setdefault(part, []).append(parameter.grad.detach())
        self._norms = {part: torch.nn.utils.get_total_norm(g) for part, g in parts.items()}

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the norms; parts that several processes share are put together."""
        own = [(part, float(norm) ** 2) for part, norm in self._norms.items()]
        squares: dict[str, float] = {}
        for part, square in trainer.model.pipeline.gather(own):
            squares[part] = squares.get(part, 0.0) + square
        values.update({f"grad_norm/{part}": square**0.5 for part, square in squares.items()})


class LearningRates(Callback):
    """Logs the learning rate of each parameter group, as `lr/<its name or number>`.

    `train/lr` is that of the first group. Each is the rate that the step was taken with. Groups
    whose rates differ are logged without it too.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Reads the rates, before the schedule changes them."""
        if trainer.logging:
            self._rates = learning_rates(trainer.optimizer)

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the rates."""
        values.update(self._rates)


class Mfu(Callback):
    """Logs the model FLOPs utilization, as `train/mfu`: a share of the devices' peak rate.

    It is the FLOPs of the forwards and backwards of a second's samples, divided by what all devices
    can do in it (Chowdhery et al., *PaLM*, arXiv:2204.02311, appendix B). What is computed again in
    the backward does not count: these are the model's FLOPs, not the hardware's.

    With a `hardware` a run on the command line has it, with the FLOPs counted.

    Args:
        flops_per_sample: of a forward and backward of the whole model; a backward is taken to have
            twice the FLOPs of the forward.
        peak_flops_per_s: of one device, in the precision of the run.
    """

    main_only = True

    def __init__(self, flops_per_sample: float, peak_flops_per_s: float) -> None:
        if not (flops_per_sample > 0 and peak_flops_per_s > 0):
            raise ConfigError(
                f"flops_per_sample={flops_per_sample} and peak_flops_per_s={peak_flops_per_s} must "
                f"be positive"
            )
        self._flops_per_sample = flops_per_sample
        self._peak = peak_flops_per_s

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the utilization."""
        devices = trainer.world.replicas * trainer.world.nb_part
        rate = values["train/samples_per_second"] * self._flops_per_sample
        values["train/mfu"] = rate / (devices * self._peak)


class BestWeights(Callback):
    """Keeps the weights of the `k` best evaluations as `step_<number>.safetensors`.

    They are the weights that were evaluated: with an `EMA`, the average. To resume from the best
    checkpoint, see `TrainerOptions.best`.

    Args:
        directory: where the files go; rank 0 alone writes.
        value: `loss`, or the name of a metric.
        mode: `min` if the smallest value is best, `max` if the largest is; None: by the value, as
            in `TrainerOptions.best_mode`.
        k: the number of files.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self, directory: str | Path, value: str = "loss", mode: str | None = None, k: int = 3
    ) -> None:
        if type(k) is not int or k < 1:
            raise ConfigError(f"k={k} must be a whole number of at least 1")
        self.directory = Path(directory)
        self._comparison = Comparison(value, mode)
        self._k = k
        self._kept: list[tuple[float, int]] = []  # the best first

    def on_init(self, trainer: Trainer) -> None:
        """Checks that there is such a value."""
        self._comparison.check(trainer)
        self._kept = []

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Writes the weights if they are among the best, and removes the file that is not."""
        found, step = self._comparison.of(values), trainer.step
        if not math.isfinite(found):
            return
        before = [entry for entry in self._kept if entry[1] != step]
        # of two that are equal the earlier one is better
        self._kept = sorted([*before, (found, step)])[: self._k]
        if all(kept != step for _, kept in self._kept):
            return
        state = trainer.model.state_dict()
        trainer.world.on_main(lambda: write_weights(self._path(step), state))
        for _, dropped in set(before) - set(self._kept):
            if trainer.world.is_main:
                self._path(dropped).unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Returns the files, the best first."""
        return [self._path(step) for _, step in self._kept]

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps and values of the best."""
        return {"kept": [[value, step] for value, step in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._kept = [(value, step) for value, step in state["kept"]][: self._k]

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.safetensors"


class Freeze(Callback):
    """Freezes the parameters whose names match, from step `start` to step `until`.

        Freeze("features.*", until=500)      # trained from step 501 on

    Before `start` and after `until` they are trained, unless another `Freeze` freezes them then.
    Which they are is a function of the step alone, so a resumed run goes on exactly. The optimizer
    must hold all of them from the beginning: it leaves out those without a gradient. What a frozen
    batch norm does with its running statistics is up to its mode.

    Args:
        match: a pattern for the names of parameters, such as `features.*`, or several.
        start: the steps before which they are trained.
        until: the last step in which they are frozen; None: to the end.

    Raises:
        ConfigError: the numbers do not fit together; at the start of a run: no parameter matches.
    """

    def __init__(
        self, match: str | Sequence[str], start: int = 0, until: int | None = None
    ) -> None:
        if type(start) is not int or start < 0:
            raise ConfigError(f"start={start} must be a number of steps, 0 or more")
        if until is not None and (type(until) is not int or until <= start):
            raise ConfigError(f"until={until} must be a number of steps, more than start={start}")
        self._match = match
        self._start = start
        self._until = until
        self._frozen: bool | None = None

    def on_init(self, trainer: Trainer) -> None:
        """Checks that parameters match, and that the optimizer holds those trained later."""
        names = [name for name, _ in trainer.model.net.named_parameters()]
        held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        found = matching(self._match, names, "match")
        own = dict(trainer.model.named_parameters())
        ever_trained = self._start > 0 or self._until is not None
        missing = [name for name in found if name in own and id(own[name]) not in held]
        if missing and ever_trained:
            raise ConfigError(
                f"Freeze(match={self._match!r}) trains {missing[0]} in a part of the run, and "
                f"optimizer= does not hold it: make the optimizer over all parameters"
            )

    def on_start(self, trainer: Trainer) -> None:
        """Freezes or frees them for the next step."""
        self._frozen = None
        self._apply(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Freezes or frees them for the next step."""
        self._apply(trainer)

    def _apply(self, trainer: Trainer) -> None:
        frozen = self._freezes_at(trainer.step)
        if frozen is self._frozen:
            return
        self._frozen = frozen
        parameters = dict(trainer.model.net.named_parameters())
        active = [
            each._match
            for each in trainer.callbacks
            if isinstance(each, Freeze) and each._freezes_at(trainer.step)
        ]
        for name in matching(self._match, parameters, "match"):
            parameters[name].requires_grad_(not any(fits(name, match) for match in active))

    def _freezes_at(self, step: int) -> bool:
        return self._start <= step < (math.inf if self._until is None else self._until)


class EMA(Callback):
    """Keeps an exponential moving average of the parameters, and evaluates with it.

    After each step, average = decay * average + (1 - decay) * parameters, in fp32 for parameters in
    half precision, in which so small a part would be rounded away. Buffers, such as running
    statistics, are the model's. `trainer.evaluate`, `predict` and `test` use the average as well;
    a checkpoint has both, and the commands `evaluate`, `predict` and `export` take the average.

    Args:
        decay: between 0 and 1.
        evaluates: False to evaluate with the parameters themselves.
        warmup: after n steps the decay is at most (1 + n) / (10 + n), so that the average of a
            short run is not mostly its first weights.

    Raises:
        ConfigError: `decay` is out of its range.

    Source: B. Polyak and A. Juditsky, 1992; with the exponential weights of A. Tarvainen and
    H. Valpola, *Mean teachers are better role models*, 2017. The warm-up is that of TensorFlow's
    ExponentialMovingAverage and of timm.
    """

    @names_checked
    def __init__(self, decay: float = 0.999, evaluates: bool = True, warmup: bool = True) -> None:
        if not 0 < decay < 1:
            raise ConfigError(f"decay={decay} must be between 0 and 1")
        self._decay = decay
        self._evaluates = evaluates
        self._warmup = warmup
        self._updates = 0
        self._model: HybridModel | None = None
        self._average: dict[str, Tensor] = {}

    def on_init(self, trainer: Trainer) -> None:
        """Begins with the weights."""
        self._model = trainer.model
        self._average, self._updates = {}, 0
        self._pairs()

    def on_start(self, trainer: Trainer) -> None:
        """Begins with the weights of a new run, which may have been loaded by now."""
        if trainer.step == 0:
            self.on_init(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Moves the average."""
        average, parameters = self._pairs()
        decay = self._decay_of(trainer.step)
        self._updates += 1
        with torch.no_grad():
            # of several devices or dtypes, PyTorch goes through them one by one
            now = [p.to(a.dtype) for p, a in zip(parameters, average, strict=True)]
            torch._foreach_lerp_(average, now, 1 - decay)

    def _decay_of(self, step: int) -> float:
        """Returns the weight that the average so far has beside the parameters of a step."""
        n = self._updates
        return min(self._decay, (1 + n) / (10 + n)) if self._warmup else self._decay

    @contextmanager
    def evaluation_context(self, trainer: Trainer) -> Iterator[None]:
        """Puts the average in the place of the parameters while the block runs."""
        if not self._evaluates:
            yield
            return
        average, parameters = self._pairs()
        with torch.no_grad():
            kept = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, average)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, kept)

    def average(self) -> dict[str, Tensor]:
        """Returns the average by the names of the parameters; of this process's stages."""
        return dict(self._average)

    def state_dict(self) -> dict[str, Any]:
        """Returns the average of all stages; with stages in several processes it is gathered."""
        assert self._model is not None
        average = self.average()
        if self._model.world.pipeline_group is not None:  # the CPU's tensors travel
            own = [(name, value.cpu()) for name, value in average.items()]
            average = dict(self._model.pipeline.gather(own))
        return {"average": average, "updates": self._updates, "evaluates": self._evaluates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the average of this process's stages.

        Raises:
            CheckpointError: it lacks a parameter, or has one of another shape; nothing is loaded.
        """
        self._pairs()
        self._updates, saved = state["updates"], state["average"]
        for name, value in self._average.items():
            if name not in saved or saved[name].shape != value.shape:
                found = f"with shape {list(saved[name].shape)}" if name in saved else "not there"
                raise CheckpointError(
                    f"the checkpoint's average of EMA does not fit the model: {name}, of shape "
                    f"{list(value.shape)}, is {found}. Train the model it was made with, or leave "
                    f"EMA out"
                )
        for name, value in self._average.items():
            value.copy_(saved[name])

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the averages and their parameters; a new parameter begins its average."""
        assert self._model is not None
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            known = self._average.get(name)
            if known is None or known.shape != parameter.shape:
                half = parameter.dtype in (torch.float16, torch.bfloat16)
                self._average[name] = parameter.detach().to(
                    torch.float32 if half else parameter.dtype, copy=True
                )
        self._average = {name: self._average[name] for name in parameters}
        return list(self._average.values()), [p.detach() for p in parameters.values()]


class SWA(EMA):
    """Averages the parameters of the steps from `start` on, each with the same weight.

    It is an `EMA` in all else, and takes its place: evaluations, checkpoints and exports have the
    average. Up to `start` that is the parameters themselves.

    Args:
        start: the first step that counts, 1 or more.
        every: steps between two that count.
        evaluates: False to evaluate with the parameters themselves.

    Raises:
        ConfigError: `start` or `every` is less than 1.

    Source: P. Izmailov et al., *Averaging Weights Leads to Wider Optima and Better Generalization*,
    arXiv:1803.05407. `torch.optim.swa_utils.update_bn` renews the running statistics of batch norm.
    """

    @names_checked
    def __init__(self, start: int, every: int = 1, evaluates: bool = True) -> None:
        super().__init__(evaluates=evaluates)
        for name, value in (("start", start), ("every", every)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value} must be a whole number of at least 1")
        self._start = start
        self._every = every
        self._averaged = 0

    def on_init(self, trainer: Trainer) -> None:
        """Begins with the weights, none of which counts yet; refuses a second average."""
        if any(isinstance(other, EMA) and other is not self for other in trainer.callbacks):
            raise ConfigError("callbacks= has SWA and another average of the weights: take one")
        super().on_init(trainer)
        self._averaged = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the average of all stages, and of how many steps it is."""
        return {**super().state_dict(), "averaged": self._averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        super().load_state_dict(state)
        self._averaged = state["averaged"]

    def _decay_of(self, step: int) -> float:
        if step < self._start:
            self._averaged = 0
        elif (step - self._start) % self._every == 0:
            self._averaged += 1
            return (self._averaged - 1) / self._averaged
        return 1.0 if self._averaged else 0.0
