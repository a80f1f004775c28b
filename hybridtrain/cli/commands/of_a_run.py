"""The commands: `train`, `plan`, `verify`, `evaluate`, `predict` and `export`."""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain._base.files import atomic_file
from hybridtrain._base.microbatch import batch_size
from hybridtrain._base.text_table import Block, counted, text_table
from hybridtrain.checkpoint import (
    init_from,
    parse_init_from,
    restore_checkpoint,
)
from hybridtrain.cli.commands.export import AVERAGED
from hybridtrain.cli.commands.export import export as export  # a command, too
from hybridtrain.cli.commands.plan import (
    other_processes_are_missing,
    plan_alone,
    plan_for_hardware,
)
from hybridtrain.cli.config.compose import (
    given_keys,
    masked,
    read_overrides,
    to_tree,
    to_yaml,
    with_later,
)
from hybridtrain.cli.config.resolve import Settings, in_words
from hybridtrain.cli.config.schema import (
    AUTO,
    Config,
    PipelineConfig,
    WorldConfig,
    with_config_keys,
)
from hybridtrain.cli.run.build import RunContext, build_files, setup_run, writing
from hybridtrain.cli.run.components import (
    build_callbacks,
    build_lr_schedule,
    build_model_optimizer,
    build_monitors,
)
from hybridtrain.cli.run.data_record import (
    check_same_classes,
    record_of,
    refuse_other_data,
    say_other_data,
)
from hybridtrain.cli.run.directory import (
    RESULT,
    RunDirectory,
    checkpoint_to_read,
    checkpoint_to_resume,
    environment,
)
from hybridtrain.cli.run.errors import finite, print_result
from hybridtrain.cli.run.pricing import (
    beside_measured,
    predict_run,
    prediction_in_words,
    utilization,
)
from hybridtrain.data import EvalLoader, is_stream, length_of
from hybridtrain.errors import ConfigError, NotExactError
from hybridtrain.launch import detect
from hybridtrain.loop import Trainer, generate
from hybridtrain.loop import evaluate as evaluate_model
from hybridtrain.loop import predict as predict_model
from hybridtrain.loss import LOSSES
from hybridtrain.observe import describe_values, write_report
from hybridtrain.partitioning import Plan, table
from hybridtrain.verification import verify as verify_model
from hybridtrain.world import World

_log = logging.getLogger(__name__)


# Training steps that `verify` compares.
_VERIFIED_BATCHES = 3

Result: TypeAlias = dict[str, Any]
"""The values that a command has found, for the table of a sweep."""


def train(settings: Settings) -> Result:
    """Trains, or resumes training."""
    config = settings.config
    build_monitors(settings.config, RunDirectory(settings.config))  # refuses what does not fit
    context = setup_run(settings, writes=True)
    config, world, model = context.config, context.world, context.model
    loader, options = context.train_loader(), context.options
    total_steps = options.trainer.total_steps(loader.batches_per_epoch)
    optimizer = build_model_optimizer(config.optim, model, config.allow_targets)
    lr_schedule = build_lr_schedule(
        config.lr_schedule, optimizer, total_steps, config.allow_targets
    )
    trainer = _Trainer(
        model,
        optimizer,
        options.loss_fn,
        loader,
        options.trainer,
        evaluation=context.eval_loader(),
        metrics=options.metrics,
        lr_schedule=lr_schedule,
        store=None if config.checkpoint.every_steps == 0 else context.store,
        monitor=build_files(context.directory) if world.is_main else None,
        callbacks=[
            *utilization(context),
            *build_callbacks(config, context.directory),
            *build_monitors(_on_terminal(settings, config), context.directory),
        ],
    )
    trainer.dataset = record_of(context.data)
    with writing(context.directory, world):
        return _train(context, trainer)


def _on_terminal(settings: Settings, config: Config) -> Config:
    """Returns the config, without the progress on the terminal if the command is quiet."""
    if not settings.quiet:
        return config
    monitor = copy.copy(config.monitor)
    monitor.progress = False
    return replace(config, monitor=monitor)


class _Trainer(Trainer):
    dataset: Mapping[str, Any]
    """The record of the data, which goes into each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of the run, and the record of its data."""
        return {**super().state_dict(), "dataset": dict(self.dataset)}

    @property
    def advice(self) -> list[str]:
        """The advice in the keys of the command line."""
        return [*map(with_config_keys, super().advice)]


def _train(context: RunContext, trainer: Trainer) -> Result:
    """Trains from the newest checkpoint, or from none; only one process does so in a directory."""
    settings, config, world = context.settings, context.config, context.world
    directory, plan, total_steps = context.directory, context.model.plan, trainer.total_steps
    checkpoint = checkpoint_to_resume(context)
    placement = _placement(plan, world)
    _log.info("run directory %s\n%s", directory.path, placement)
    if checkpoint is None and (initial := parse_init_from(config.init_from)) is not None:
        init_from(context.model, **initial)
    if checkpoint is not None:
        allow = config.allow_changes
        world.on_main(lambda: refuse_other_data(checkpoint, context.data, allow))
        trainer.resume(checkpoint)
        _log.info("resumed from %s, at step %d of %d", checkpoint, trainer.step, total_steps)
    if trainer.finished:
        # of rank 0, which alone has to see the run directory
        world.on_main(lambda: _refuse_other_settings(context, trainer))
        _log.info(
            "the run %s; to train on, %s; to start again, set another run_name",
            _end_of(trainer), _way_on(trainer),
        )  # fmt: skip
        result = {}
        if trainer.evaluation is not None:
            result = trainer.evaluate()
            _log.info("%s", _values(result))
        world.close()
        return {"step": trainer.step, **result}
    if world.is_main:
        _write_config(context)
        if plan.split != str(directory.plan):
            plan.write(directory.plan)
    shown = to_yaml(config, settings.texts, mask=True)
    prediction = predict_run(context) if world.is_main else None
    texts = {"config": shown, "layout": placement, "overrides": _overrides(settings)}
    summary = trainer.fit({title: text for title, text in texts.items() if text})
    if prediction is not None:
        compared = beside_measured(prediction, summary, context.model.options.placement)
        directory.write_summary({**summary, **compared, "environment": environment(world)})
        _log.info("%s", prediction_in_words(**compared))
        for line in summary["advice"]:
            _log.info("%s", line)
        _log.info("run directory: %s", directory.path.resolve())
        if config.monitor.report:
            _write_page(directory)
        if config.monitor.tensorboard:
            # the folder above: of a single run's own one TensorBoard calls the run "."
            _log.info("dashboard: tensorboard --logdir %s", directory.path.parent)
        # last, since it is what most users look for
        values = _values(summary["eval"]) or "no evaluation"
        _log.info("done: %d steps, %s", trainer.step, values, extra=RESULT)
    world.close()
    return {"step": trainer.step, **(summary["eval"] or {})}


def _write_page(directory: RunDirectory) -> None:
    """Writes the page of a complete run, which is not lost if that fails."""
    try:
        _log.info("page of the run: %s", write_report([directory.path]).resolve())
    except Exception as error:
        command = shlex.join(["hybridtrain", "report", str(directory.path)])
        _log.warning(
            "the page of the run was not written: %s: %s; the run itself is complete. To write it: "
            "%s", type(error).__name__, error, command,
        )  # fmt: skip
        _log.debug("no page", exc_info=True)


def _overrides(settings: Settings) -> str:
    """Returns what the command line sets, as YAML: what a dashboard compares runs by."""
    tree = OmegaConf.create(masked(to_tree(settings.config)))
    values = {key: OmegaConf.select(tree, key) for key in given_keys(settings.overrides)}
    chosen = {
        key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        for key, value in values.items()
        if value is not None
    }
    return yaml.safe_dump(chosen, sort_keys=False) if chosen else ""


def plan(settings: Settings) -> Result:
    """Cuts the model as a run would, shows the plan and writes it.

    A pipeline over several processes can be planned by one. For a `hardware` it is priced.
    """
    if settings.config.hardware is not None:
        return plan_for_hardware(settings)
    if other_processes_are_missing(settings.config):
        setup, plan, devices = plan_alone(settings)
        processes = [("not started", [device]) for device in devices]
        _log.info("%s", _layout(plan, processes, "planned by one process"))
        _write_plan(plan, setup.directory, setup.world)
        return {}
    context = setup_run(settings, writes=True, reuse_plan=False)
    _log.info("%s", _placement(context.model.plan, context.world))
    _write_plan(context.model.plan, context.directory, context.world)
    context.world.close()
    return {}


def _write_plan(plan: Plan, directory: RunDirectory, world: World) -> None:
    with writing(directory, world):
        if world.is_main:
            path = directory.plan_to_write()
            plan.write(path)
            _log.info("wrote %s; to train with it: pipeline.split=%s", path, path)


def evaluate(settings: Settings) -> Result:
    """Evaluates the newest checkpoint of a run, or the one that `resume` names.

    The values are a line of JSON on stdout, and one more in `evaluations.jsonl`.
    """
    context, loader, checkpoint, step = _trained(settings, RunContext.eval_loader)
    directory = context.directory
    options = context.options
    agreement: dict[str, float] = {}
    if context.config.generate is not None:  # first: what it refuses is known at once
        agreement = _agreement(_generated(context, loader, compared=True))
    values = evaluate_model(context.model, loader, options.loss_fn, options.metrics) | agreement
    _log.info("%s, step %d: %s  (%d samples)", checkpoint, step, _values(values), values["samples"])
    if context.world.is_main:
        result = {"checkpoint": str(checkpoint), "step": step, **values}
        print_result(result)
        changes = {change.key: change.other for change in settings.changes}
        if directory.path.is_dir():
            directory.add_evaluation({"time": round(time.time(), 3), **result, "changes": changes})
    context.world.close()
    return {"step": step, **values}


def verify(settings: Settings) -> Result:
    """Compares steps and evaluations of a run, from its first weights on, with the unsplit model.

    The config is the run's; the batches are the first ones of the training data.

    Raises:
        NotExactError: they differ by more than the order of additions explains.
    """
    context = setup_run(settings, reuse_plan=False)
    config, world = context.config, context.world
    _log.info("%s", _placement(context.model.plan, world))
    torch.manual_seed(config.seed)  # as the model was made
    reference = context.build()
    with closing(context.train_loader().stream()) as stream:
        batches = [next(stream) for _ in range(_VERIFIED_BATCHES)]
    found = verify_model(
        context.model,
        [(batch.inputs, batch.targets) for batch in batches],
        context.options.loss_fn,
        reference,
    )
    if not found.exact:
        raise NotExactError(str(found))
    _log.info("%s", found)
    world.close()
    return {"exact": found.exact, "largest_difference": found.worst.largest}


def predict(settings: Settings) -> Result:
    """Writes a line for each sample of `data.predict_path` or of the evaluation split, in order."""
    output = settings.config.output
    if output is not None:
        check_output(output)
    context, loader, checkpoint, _ = _trained(settings, RunContext.predict_loader, predicts=True)
    default = context.directory.path / "predictions" / f"{checkpoint.name}.jsonl"
    path = Path(output or default)
    outputs, texts = None, None
    if context.config.generate is None:
        outputs = predict_model(context.model, loader)
    else:
        texts = [{"text": text} for text, _ in _generated(context, loader)]

    def write() -> None:
        if texts is not None:
            write_samples(path, ({"sample": i, **text} for i, text in enumerate(texts)))
        elif path.suffix == ".npy":
            write_array(path, outputs)
        else:
            write_samples(path, map(finite, _predictions(context, loader, outputs)))
        _log.info("wrote %s, of %s", path, checkpoint)
        print_result({"checkpoint": str(checkpoint), "file": str(path)})

    context.world.on_main(write)
    context.world.close()
    return {}


def _generated(
    context: RunContext, loader: EvalLoader, compared: bool = False
) -> list[tuple[str, str | None]]:
    """Returns the texts that the model writes, and those of the targets."""
    tokens, tokenizer = context.config.generate, context.data.tokenizer
    if tokenizer is None:
        raise ConfigError("generate= needs data with a tokenizer, such as data=datasets")
    if tokens is None or tokens < 1:
        raise ConfigError(f"generate={tokens} must be at least 1")
    pad = context.data.metadata.get("pad_index", 0)
    pairs = generate(context.model, loader, tokens, tokenizer.eos_token_id, pad, compared)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return [(decode(ids), None if wanted is None else decode(wanted)) for ids, wanted in pairs]


def _agreement(pairs: list[tuple[str, str | None]]) -> dict[str, float]:
    """Returns the share of texts that are the target's, and their BLEU (Papineni et al., 2002).

    It compares runs of up to four words, or of as many as the longest target has.
    """
    from torchmetrics.functional.text import bleu_score

    known = [(text, wanted) for text, wanted in pairs if wanted is not None]
    if not known:
        raise ConfigError("evaluate generate= needs a text as the target, as task=seq2seq has it")
    longest = max(1, *(len(wanted.split()) for _, wanted in known))
    bleu = bleu_score(
        [text for text, _ in known], [[wanted] for _, wanted in known], n_gram=min(4, longest)
    )
    return {"exact_match": sum(a == b for a, b in known) / len(known), "bleu": float(bleu)}


def _trained(
    settings: Settings,
    loader_of: Callable[[RunContext], EvalLoader | None],
    predicts: bool = False,
) -> tuple[RunContext, EvalLoader, Path, int]:
    """Returns the objects of a run, the loader of its data, and the checkpoint that is loaded."""
    fit_to_devices(settings)
    context = setup_run(settings, predicts=predicts)
    config = context.config
    loader = loader_of(context)
    if loader is None:
        raise ConfigError(f"data._target_={config.data['_target_']} has no evaluation split")
    checkpoint = checkpoint_to_read(config.resume, context.store, context.world)
    context.world.on_main(lambda: check_same_classes(checkpoint, context.data))
    if length_of(context.data.train) != 0:  # else it was not loaded
        context.world.on_main(lambda: say_other_data(checkpoint, context.data))
    saved = restore_checkpoint(checkpoint, context.model, evaluated=config.ema)
    if saved.get("averaged"):
        _log.info(AVERAGED)
    return context, loader, checkpoint, saved["step"]


def _stopped_by(trainer: Trainer) -> str:
    """Returns the names of the callbacks that have ended a run before its last step, or ""."""
    return " and ".join(each.state_name for each in trainer.callbacks if each.stops)


def _end_of(trainer: Trainer) -> str:
    if callbacks := _stopped_by(trainer):
        return f"ended early, by {callbacks} at step {trainer.step} of {trainer.total_steps}"
    return f"is complete at step {trainer.step}"


def _way_on(trainer: Trainer) -> str:
    if callbacks := _stopped_by(trainer):
        return f"set callbacks=null, or a callbacks= without {callbacks}"
    return "raise trainer.steps= or trainer.epochs="


def _refuse_other_settings(context: RunContext, trainer: Trainer) -> None:
    """Ends a command that would report what a complete run has learnt with other settings."""
    settings = context.settings
    changes = [change for change in [*settings.changes, *settings.kept] if change.has_effect]
    if changes:
        raise ConfigError(
            f"the run {context.directory.path} {_end_of(trainer)}, with {in_words(changes)}: set "
            f"another run_name= to train with that; to train on, {_way_on(trainer)}"
        )


def _write_config(context: RunContext) -> None:
    """Writes the config, which is the base of all commands on this run from now on."""
    settings, config = context.settings, replace(context.config, allow_changes=False)
    if settings.of_run is not None and context.store.steps():
        config.resume = settings.of_run.resume  # where the run has begun
        config.init_from = settings.of_run.init_from
    if "classes" in config.data and (classes := context.data.metadata.get("classes")):
        config.data = {**config.data, "classes": list(classes)}  # what the numbers stand for
    overrides = settings.overrides
    if settings.of_run is not None:
        overrides = with_later(read_overrides(context.directory.path), overrides)
    context.directory.write_config(config, overrides, settings.texts)


def _values(evaluation: Mapping[str, float] | None) -> str:
    values = dict(evaluation or {})
    values.pop("samples", None)
    return "  ".join(describe_values(values))


def _placement(plan: Plan, world: World) -> Block:
    """Returns tables of the stages and of the devices of all processes; a collective call."""
    hosts = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    return _layout(plan, hosts, f"started by {world.launcher}, {world.backend}")


def _layout(plan: Plan, hosts: Sequence[tuple[str, list[str]]], how: str) -> Block:
    """Returns tables of the stages, and of the hosts and devices of the processes."""
    parameters = sum(cost.parameters for cost in plan.costs)
    head = (
        f"{counted(len(hosts), 'process', 'es')} x {counted(len(plan.stages), 'stage')}, "
        f"{plan.schedule}, {counted(plan.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"{how}"
    )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(hosts)
    ]
    return Block("\n".join([head, table(plan), *text_table(processes, 1)]))


def fit_to_devices(settings: Settings) -> None:
    """Changes how a run's model is spread to what the devices and processes that are there can do.

    What the command line says stays. A line of the log says what the run had and what it gets.

    Args:
        settings: of a command that evaluates; their config may be changed.
    """
    if settings.of_run is None or settings.config.pipeline.nb_part == AUTO:
        return
    config, given = settings.config, set(given_keys(settings.overrides))
    launch = detect(os.environ)
    world, pipeline = replace(config.world), replace(config.pipeline)
    gpus = torch.cuda.device_count()
    if "world.devices" not in given and world.devices not in (None, "auto", "cpu"):
        world.devices = None  # the GPUs that there are, or the CPU
    on_gpus = gpus > 0 and world.devices != "cpu"
    if world.backend == "nccl" and not on_gpus and "world.backend" not in given:
        world.backend = None
    if "world.engine" not in given and launch.size % pipeline.nb_part:
        world.engine = "local"
    missing = on_gpus and launch.local_size * pipeline.nb_part > gpus
    if world.engine == "local" and missing and "pipeline.nb_part" not in given:
        pipeline.nb_part = max(1, gpus // launch.local_size)
        # what goes with another number of stages
        pipeline.split, pipeline.schedule, pipeline.stages_per_device = "uniform", "1f1b", 1
    pipeline.sync_batch_norm = False  # of training
    if (spread := _spread(world, pipeline)) != _spread(config.world, config.pipeline):
        of_run = _spread(settings.of_run.world, settings.of_run.pipeline)
        settings.notes.append(f"the run has {of_run}; here it is {spread}")
    settings.config = replace(config, world=world, pipeline=pipeline)


def _spread(world: WorldConfig, pipeline: PipelineConfig) -> str:
    devices = world.devices or ("cuda" if torch.cuda.device_count() else "cpu")
    stages = f"{pipeline.nb_part} stage{'s' * (pipeline.nb_part > 1)}"
    return f"{stages} (world.engine={world.engine}, world.devices={devices})"


def check_output(path: str) -> None:
    """Refuses a file of another format.

    Raises:
        ConfigError: names the suffixes that are known.
    """
    if Path(path).suffix not in (".jsonl", ".npy", ".parquet"):
        raise ConfigError(f"output={path}: the suffix must be .jsonl, .npy or .parquet")
    if Path(path).suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(f"output={path} needs pyarrow: pip install pyarrow")


def _predictions(context: RunContext, loader: EvalLoader, outputs: Any) -> Iterator[dict[str, Any]]:
    """Yields a line for each sample: its number, what the data says of it, and its result.

    The result is the class and the probability of each, by name; without names of classes it is
    the model's output.
    """
    dataset = loader.dataset
    numbered = not is_stream(dataset) or context.world.replicas == 1
    describe = getattr(dataset, "describe", None)
    names: Sequence[str] = context.data.metadata.get("classes") or ()
    logits = _logits(outputs, len(names), context.options.loss_fn) if names else None
    values = _by_sample(outputs if logits is None else torch.softmax(logits.double(), 1))
    for number, value in enumerate(values):
        line: dict[str, Any] = {"sample": number} if numbered else {}
        if describe is not None:
            line |= describe(number)
        if logits is not None:
            name = names[max(range(len(value)), key=value.__getitem__)]
            line |= {"class": name, "probabilities": dict(zip(names, value, strict=True))}
        else:
            line |= value if isinstance(value, dict) else {"output": value}
        yield line


def _logits(outputs: Any, classes: int, loss_fn: Any) -> Tensor | None:
    """Returns outputs of shape (samples, classes) of which the softmax is the probability.

    Log-probabilities are such outputs too. None: the model was trained with another loss, or has
    outputs of another shape.
    """
    kinds = (nn.CrossEntropyLoss, nn.NLLLoss)
    if not isinstance(loss_fn, kinds) and loss_fn not in (LOSSES["cross_entropy"], LOSSES["nll"]):
        return None
    logits = outputs
    if not isinstance(outputs, Tensor):
        fields = outputs if isinstance(outputs, dict) else getattr(outputs, "__dict__", {})
        logits = fields.get("logits")
    fits = isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] == classes
    return logits if fits else None


def write_array(path: Path, outputs: Any) -> None:
    """Writes a model's outputs as one array (`.npy`), which appears whole.

    Args:
        path: of the file.
        outputs: a tensor with the samples in dim 0.

    Raises:
        ConfigError: the outputs are not one tensor, or the file cannot be written.
    """
    if not isinstance(outputs, Tensor):
        raise ConfigError(
            f"output={path} holds one tensor, and the model gives a {type(outputs).__name__}: use "
            f"the suffix .jsonl"
        )
    # numpy has no bfloat16
    array = outputs.float() if outputs.dtype is torch.bfloat16 else outputs
    with _written(path) as file:
        np.save(file, array.numpy())


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]]) -> None:
    """Writes a mapping for each sample, as lines of JSON or to a table (`.parquet`).

    Raises:
        ConfigError: the format cannot hold them, or the file cannot be written.
    """
    if path.suffix == ".npy":
        raise ConfigError(f"output={path} cannot hold texts: use the suffix .jsonl or .parquet")
    with _written(path) as file:
        if path.suffix == ".parquet":
            import pyarrow
            from pyarrow.parquet import write_table

            write_table(pyarrow.Table.from_pylist(list(samples)), file)
        else:
            file.writelines((json.dumps(x, allow_nan=False) + "\n").encode() for x in samples)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Opens the file that `predict` writes, which appears whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"output={path} cannot be written: {error.strerror}") from error


def _by_sample(outputs: Any) -> Iterator[Any]:
    """Yields the outputs for each sample as plain values."""
    for sample in range(0 if outputs is None else batch_size(outputs)):
        values = tree_map_only(Tensor, itemgetter(sample), outputs)
        values = tree_map_only(Tensor, Tensor.tolist, values)
        if is_dataclass(values):
            values = {name: value for name, value in vars(values).items() if value is not None}
        yield values
