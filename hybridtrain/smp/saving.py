"""Checkpoints of a script: smp 1.x's functions, on this project's store.

    path/step_00000001/     one checkpoint, as `hybridtrain.checkpoint` has it
    path/tag                a full one: the model's state alone, for plain PyTorch
    path/user_content_tag   and what the script has saved with it

What the script saves beside its model may be tensors, plain values, and objects that have
`to_dict` and whose class has `from_dict`, such as the configurations of transformers. Anything else
is a pickle, which runs code when it is loaded: the configuration must say that files are trusted.

A checkpoint does not depend on the division: it is loaded into any number of stages and processes.
Rank 0 reads and writes `path/step_*`; the file system need not be shared.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain._base.files import atomic_file, make_directory, write_atomically
from hybridtrain.checkpoint import (
    CheckpointStore,
    FixedState,
    broadcast_tree,
    check_fits,
    find_checkpoint,
    read_tree,
    read_weights,
    restore_run,
    save_step,
    verify,
)
from hybridtrain.errors import CheckpointError, ConfigError, naming
from hybridtrain.model import HybridModel
from hybridtrain.smp.config import NAMING
from hybridtrain.smp.model import DistributedModel
from hybridtrain.smp.optimizer import DistributedOptimizer, LocalOptimizer
from hybridtrain.smp.ranks import joined, pp_rank, pp_size, rdp_rank
from hybridtrain.smp.runtime import Runtime, current

_CONTENT = "user_content"


_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, PurePath),
    *(Tensor, np.ndarray, np.generic, torch.dtype, torch.device),
)
_CLASS, _FIELDS, _PICKLE = "smp_class", "smp_fields", "smp_pickle"


def portable(value: Any, other: Callable[[Any, str], Any], path: str = "user_content") -> Any:
    """Returns `value` with plain values in the place of its objects.

    Args:
        value: lists, dictionaries and the like, of values of any type.
        other: returns what stands for an object without `to_dict`, which is at a path.
        path: where `value` is.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: portable(item, other, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple | Set) and not hasattr(value, "_fields"):
        items = [portable(item, other, f"{path}.{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else type(value)(items)  # type: ignore[call-arg]
    if hasattr(value, "to_dict") and hasattr(type(value), "from_dict"):
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        fields = portable(value.to_dict(), other, path)
        return {_CLASS: name, _FIELDS: fields}
    return other(value, path)


def restored(value: Any) -> Any:
    """Returns what `portable` was given.

    An object whose class the script has not imported is the dictionary of its fields: a file names
    no module that is imported.
    """
    if isinstance(value, list | tuple | Set) and not hasattr(value, "_fields"):
        items = [restored(item) for item in value]
        return items if isinstance(value, list) else type(value)(items)  # type: ignore[call-arg]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_PICKLE}:
        if not current().config.trusts_pickles:
            raise CheckpointError(f"the file has pickled objects: {_TRUST}")
        return pickle.loads(value[_PICKLE])
    if value.keys() != {_CLASS, _FIELDS}:
        return {key: restored(item) for key, item in value.items()}
    fields = restored(value[_FIELDS])
    module, _, name = value[_CLASS].partition(":")
    from_dict = getattr(getattr(sys.modules.get(module), name, None), "from_dict", None)
    return fields if from_dict is None else from_dict(fields)


_TRUST = (
    "pass its fields, or, if you trust who writes the files, since a pickle runs code when it is "
    'loaded, add "hybridtrain": {"trust_pickles": true} to the configuration'
)


def _pickled(value: Any, path: str) -> Any:
    if not current().config.trusts_pickles:
        raise CheckpointError(
            f"cannot save a {type(value).__module__}.{type(value).__qualname__} at {path}: it has "
            f"no to_dict and from_dict; {_TRUST}"
        )
    return {_PICKLE: pickle.dumps(value)}


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    *,
    v3: bool = False,
) -> None:
    """Saves `obj` with `torch.save`, in a file that appears whole or not at all.

    Args:
        obj: what to save.
        f: the file's path.
        partial: each process of the pipeline writes its own file, `f` with `_<mp_rank>` at its end,
            and `f` with `.parts` at its end has their number; False: the first one writes `f`.
        pickle_module: as in `torch.save`.
        pickle_protocol: see there.
        v3: with `partial`, each process writes its own file, `f` with
            `_<pp_rank>_<tp_rank>_<rdp_rank>` at its end, which the script loads with `torch.load`.

    Raises:
        CheckpointError: `.parts` is there, and is of something else.
    """
    options = {} if pickle_module is None else {"pickle_module": pickle_module}
    place = pp_rank()
    if not partial and place:
        return
    end = f"_{place}_0_{rdp_rank()}" if v3 else f"_{place}"
    path = Path(f"{f}{end}" if partial else f)
    make_directory(path.parent)
    has_parts = partial and not v3
    previous_parts = _number_of_parts(f) if has_parts else 0
    # objects without `to_dict` are pickled as by torch.save; loading them needs trust
    content = portable(obj, lambda value, _: value)
    with atomic_file(path) as file:
        torch.save(content, file, pickle_protocol=pickle_protocol, **options)
    if not has_parts:
        return
    # by all: the first of them has seen the number of a save by more processes
    write_atomically(Path(f"{f}.parts"), f"{pp_size()}\n")
    for number in range(pp_size(), previous_parts):
        Path(f"{f}_{number}").unlink(missing_ok=True)


def load(
    f: str,
    map_location: Any = "cpu",
    pickle_module: Any = None,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Returns what `save` has saved; the same `partial` as there.

    Parts of another number of processes are joined: partial states in them become whole.

    Args:
        f: the file's path.
        map_location: as in `torch.load`.
        pickle_module: see there.
        partial: see `save`.
        **pickle_load_args: see `torch.load`; `weights_only=False` for objects of other types than
            tensors and plain values, of a file that you trust.

    Raises:
        CheckpointError: there is no such file, or a part is missing.
    """
    options = dict(pickle_load_args, map_location=map_location)
    options.setdefault("weights_only", not current().config.trusts_pickles)
    if pickle_module is not None:
        if options["weights_only"]:
            raise CheckpointError(f"pickle_module= reads objects of any type: {_TRUST}")
        options["pickle_module"] = pickle_module
    paths = [Path(f)]
    if partial:
        paths = [Path(f"{f}_{number}") for number in range(_number_of_parts(f))]
        if len(paths) == pp_size():
            paths = [paths[pp_rank()]]
    missing = [path for path in paths or [Path(f"{f}.parts")] if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"there is no {missing[0]}{', saved with partial=True' if partial else ''}: give the "
            f"path and the partial= that smp.save had"
        )
    try:
        objects = [restored(torch.load(path, **options)) for path in paths]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{f} holds another type than tensors and plain values: {_TRUST}; {error}"
        ) from error
    return objects[0] if len(objects) == 1 else joined(objects)


@naming(NAMING)
def save_checkpoint(
    path: str,
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves a checkpoint; all processes call it together.

    Args:
        path: a directory, made if it is not there.
        tag: names the checkpoint.
        partial: False writes the file `path/tag` with the model's state for plain PyTorch, and no
            optimizer.
        model: the model; None: the script's.
        optimizer: what else is saved; None: no optimizer.
        user_content: tensors, plain values, objects with `to_dict`, and lists and dictionaries of
            them; others are pickled if the configuration trusts pickles.
        translate_if_full: changes nothing.
        num_kept_partial_checkpoints: the newest so many stay; None: all.

    Raises:
        CheckpointError: it cannot be written, or `user_content` holds another type.
        UserError: the model is not divided yet.
    """
    runtime = current()
    user_content = portable(user_content, _pickled)
    chosen = model or runtime.model
    if chosen is None:
        raise ConfigError("save_checkpoint needs model=, a smp.DistributedModel")
    tag = str(tag)
    hybrid = chosen.partitioned_hybrid()
    if not partial:
        _save_full(runtime, Path(path), tag, chosen, user_content)
        return
    store = CheckpointStore(Path(path), keep=num_kept_partial_checkpoints)
    number = runtime.world.broadcast(
        runtime.world.on_main(lambda: max(store.steps(), default=0) + 1)
    )
    assert number is not None
    step = _ScriptStep(hybrid, optimizer, number, tag)
    save_step(step, store, {_CONTENT: FixedState({"value": user_content})})


@naming(NAMING)
def resume_from_checkpoint(
    path: str,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
) -> Any:
    """Loads a checkpoint into the script's model and optimizer; all processes call it together.

    Before the first step it is loaded when that divides the model.

    Args:
        path: the directory.
        tag: of the checkpoint; None: the newest one that is intact.
        partial: as of `save_checkpoint`.
        strict: the model's names must all be there, and no others; only for a full checkpoint can
            it be False.
        load_optimizer: load the optimizer's state too, if there is an optimizer.
        load_sharded_optimizer_state: changes nothing.
        translate_function: changes the state of a full checkpoint before it is loaded.

    Returns:
        the `user_content` that was saved; None if there was none.

    Raises:
        CheckpointError: there is none, it is damaged, or of another model.
    """
    runtime = current()
    if runtime.model is None:
        raise ConfigError("resume_from_checkpoint comes after smp.DistributedModel")
    if not partial:
        return _load_full(runtime, Path(path), tag, strict, translate_function)
    model, world = runtime.model, runtime.world

    def choose(store: CheckpointStore) -> Path | None:
        return store.newest() if tag is None else _with_tag(store, str(tag))

    checkpoint = find_checkpoint(path, world, choose=choose)
    assert checkpoint is not None

    def read() -> Any:
        files = verify(checkpoint)["files"]
        weights, extra = read_weights(checkpoint, files)
        if not model.partitioned:  # or the first step would find out
            check_fits(checkpoint, weights | extra, model.net.state_dict())
        return read_tree(checkpoint, _CONTENT, files) if f"{_CONTENT}.json" in files else None

    content = world.on_main(read)

    def restore() -> None:
        assert model.hybrid is not None
        own = runtime.optimizers[0] if load_optimizer and runtime.optimizers else None
        restore_run(_ScriptStep(model.hybrid, own), checkpoint, {_CONTENT: FixedState({})})

    if model.partitioned:
        restore()
    else:
        runtime.resume = restore
    whole = broadcast_tree(world, content, lambda _, value: value)
    return restored(whole["value"]) if whole else None


class _ScriptStep:
    """The part of a script's step that a checkpoint needs; a `SavableStep`.

    The script decides when it saves, and whether its weights are worth it.

    Args:
        model: the model in stages.
        optimizer: the optimizer; None: none is saved or restored.
        number: of the checkpoint, in the order of a directory.
        tag: that the script gives it.
    """

    lr_schedule: LRScheduler | None = None  # the script's own concern

    def __init__(
        self,
        model: HybridModel,
        optimizer: DistributedOptimizer | None,
        number: int = 0,
        tag: str = "",
    ) -> None:
        if not isinstance(optimizer, DistributedOptimizer | None):
            raise ConfigError("optimizer= must be a smp.DistributedOptimizer: wrap it")
        self.model, self.number, self._tag = model, number, tag
        self._distributed = optimizer

    @property
    def optimizer(self) -> Optimizer | None:
        if self._distributed is None:
            return None
        return cast(Optimizer, LocalOptimizer(self._distributed))

    def check_savable(self) -> None:
        pass

    def evaluation_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def show_weights(self, training: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        scale = {} if self._distributed is None else self._distributed.loss_scaler_state()
        return {"smp_tag": self._tag, "step": self.number, **scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._distributed is not None:
            self._distributed.load_loss_scale(state_dict.get("loss_scaler"))


def _with_tag(store: CheckpointStore, tag: str) -> Path:
    tags = []
    for step in reversed(store.steps()):
        checkpoint = store.newest_up_to(step)
        assert checkpoint is not None
        try:
            saved_tag = json.loads((checkpoint / "state.json").read_bytes()).get("smp_tag")
        except (OSError, ValueError):
            continue
        if saved_tag == tag:
            return checkpoint
        tags.append(str(saved_tag))
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {store.root}: there are {', '.join(tags) or 'none'}"
    )


def _number_of_parts(f: str) -> int:
    """Returns the number of files of the last partial save; 0 if there was none."""
    path = Path(f"{f}.parts")
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no number of parts: it is not of smp.save; move it, or choose another path"
        ) from error


def _save_full(
    runtime: Runtime, path: Path, tag: str, model: DistributedModel, user_content: Any
) -> None:
    whole = model.state_dict() if runtime.world.data_parallel_rank == 0 else {}

    def write() -> None:
        save(whole, str(path / tag), partial=False)
        save(user_content, str(path / f"{_CONTENT}_{tag}"), partial=False)

    runtime.world.on_main(write)


def _load_full(
    runtime: Runtime,
    path: Path,
    tag: str | None,
    strict: bool,
    translate: Callable[[Any], Any] | None,
) -> Any:
    if tag is None:
        raise ConfigError("a full checkpoint is loaded by its tag: pass tag=")
    model, world = runtime.model, runtime.world
    assert model is not None

    def read() -> tuple[Mapping[str, Any], Any]:
        try:
            weights = torch.load(path / tag, map_location="cpu", weights_only=True)
            content = path / f"{_CONTENT}_{tag}"
            user_content = torch.load(content, weights_only=True) if content.is_file() else None
        except OSError as error:
            raise CheckpointError(
                f"{path / tag} cannot be read: {error.strerror or error}: check path and tag"
            ) from error
        return translate(weights) if translate else weights, user_content

    weights, content = world.on_main(read) or ({}, None)
    weights, content = broadcast_tree(world, (weights, content), lambda _, value: value)
    model.load_state_dict(weights, strict=strict)
    return restored(content)
