"""Checkpoints of a script: smp 1.x's functions, on this project's store.

    path/step_00000001/     one checkpoint, in the format of `hybridtrain.checkpoint`
    path/tag                a full checkpoint: only the model's state, for plain PyTorch
    path/user_content_tag   and the script's additional content

The additional content may be tensors, plain values, and objects with `to_dict` and a class method
`from_dict`, such as the configurations of transformers. Anything else is pickled, which runs code
when it is loaded: the configuration must declare that files are trusted.

A checkpoint does not depend on the partition: it can be loaded into any number of stages and
processes. Rank 0 reads and writes `path/step_*`; the file system need not be shared.
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
from hybridtrain.smp.bodies import refuse_in_body
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
    """Returns `value` with its objects converted to plain values.

    Args:
        value: nested lists, dictionaries and other containers, of values of any type.
        other: converts an object without `to_dict`, given its path.
        path: the path of `value`.
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
    """Reverses `portable`.

    An object of a class that the script has not imported stays a dictionary of its fields, because
    a file must not name modules to import.
    """
    if isinstance(value, list | tuple | Set) and not hasattr(value, "_fields"):
        items = [restored(item) for item in value]
        return items if isinstance(value, list) else type(value)(items)  # type: ignore[call-arg]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_PICKLE}:
        if not current().config.trusts_pickles:
            raise CheckpointError(f"the file contains pickled objects: {_TRUST}")
        return pickle.loads(value[_PICKLE])
    if value.keys() != {_CLASS, _FIELDS}:
        return {key: restored(item) for key, item in value.items()}
    fields = restored(value[_FIELDS])
    module, _, name = value[_CLASS].partition(":")
    from_dict = getattr(getattr(sys.modules.get(module), name, None), "from_dict", None)
    return fields if from_dict is None else from_dict(fields)


_TRUST = (
    "pass its fields or, if you trust the authors of the files (a pickle runs code when it is "
    'loaded), add "hybridtrain": {"trust_pickles": true} to the configuration'
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
    """Saves `obj` with `torch.save`, in a file that is written atomically.

    Args:
        obj: the object to save.
        f: the file's path.
        partial: each process of the pipeline writes its own file, `f` with the suffix `_<mp_rank>`,
            and `f` with the suffix `.parts` has their number; False: the first process writes `f`.
        pickle_module: as in `torch.save`.
        pickle_protocol: as in `torch.save`.
        v3: with `partial`, each process writes its own file, `f` with the suffix
            `_<pp_rank>_<tp_rank>_<rdp_rank>`, which the script loads with `torch.load`.

    Raises:
        CheckpointError: a `.parts` file exists that was not written by `smp.save`.
        UserError: called inside a step.
    """
    refuse_in_body("smp.save()")
    options = {} if pickle_module is None else {"pickle_module": pickle_module}
    place = pp_rank()
    if not partial and place:
        return
    end = f"_{place}_0_{rdp_rank()}" if v3 else f"_{place}"
    path = Path(f"{f}{end}" if partial else f)
    make_directory(path.parent)
    has_parts = partial and not v3
    previous_parts = _number_of_parts(f) if has_parts else 0
    # objects without `to_dict` are pickled as in torch.save; loading them requires trust
    content = portable(obj, lambda value, _: value)
    with atomic_file(path) as file:
        torch.save(content, file, pickle_protocol=pickle_protocol, **options)
    if not has_parts:
        return
    # in all processes: the first one knows the number of parts of an earlier, larger save
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
    """Loads an object saved by `save`, with the same `partial`.

    Joins parts saved by a different number of processes: partial states become whole.

    Args:
        f: the file's path.
        map_location: as in `torch.load`.
        pickle_module: as in `torch.load`.
        partial: see `save`.
        **pickle_load_args: as in `torch.load`; `weights_only=False` loads objects other than
            tensors and plain values, from a file that you trust.

    Raises:
        CheckpointError: the file does not exist, or a part is missing.
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
            f"there is no {missing[0]}{', saved with partial=True' if partial else ''}: use the "
            f"path and partial= that were passed to smp.save"
        )
    try:
        objects = [restored(torch.load(path, **options)) for path in paths]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{f} contains objects other than tensors and plain values: {_TRUST}; {error}"
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
        path: a directory, created if it does not exist.
        tag: the name of the checkpoint.
        partial: False to write the file `path/tag` with the model's state for plain PyTorch, and no
            optimizer.
        model: the model; None: the script's.
        optimizer: the optimizer to save; None: no optimizer.
        user_content: tensors, plain values, objects with `to_dict`, and lists and dictionaries of
            them; other objects are pickled if the configuration trusts pickles.
        translate_if_full: has no effect.
        num_kept_partial_checkpoints: the number of newest checkpoints to keep; None: all.

    Raises:
        CheckpointError: it cannot be written, or `user_content` contains another type.
        UserError: called inside a step, or the model has not been partitioned yet.
    """
    refuse_in_body("smp.save_checkpoint()")
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

    Before the first step, loading is deferred until that step partitions the model.

    Args:
        path: the directory.
        tag: the name of the checkpoint; None: the newest intact one.
        partial: as in `save_checkpoint`.
        strict: require exactly the model's names; can be False only for a full checkpoint.
        load_optimizer: also load the optimizer's state, if there is an optimizer.
        load_sharded_optimizer_state: has no effect.
        translate_function: converts the state of a full checkpoint before loading.

    Returns:
        the saved `user_content`; None without any.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model.
        UserError: called inside a step.
    """
    refuse_in_body("smp.resume_from_checkpoint()")
    runtime = current()
    if runtime.model is None:
        raise ConfigError("call resume_from_checkpoint after creating the smp.DistributedModel")
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
        if not model.partitioned:  # otherwise only the first step would report it
            check_fits(checkpoint, weights | extra, model.net.state_dict())
        return read_tree(checkpoint, _CONTENT, files) if f"{_CONTENT}.json" in files else None

    content = world.on_main(read)

    def restore() -> None:
        assert model.hybrid is not None
        optimizer = runtime.optimizers[0] if load_optimizer and runtime.optimizers else None
        restore_run(_ScriptStep(model.hybrid, optimizer), checkpoint, {_CONTENT: FixedState({})})

    if model.partitioned:
        restore()
    else:
        runtime.resume = restore
    whole = broadcast_tree(world, content, lambda _, value: value)
    return restored(whole["value"]) if whole else None


class _ScriptStep:
    """The interface of a script's step for checkpoints; a `SavableStep`.

    The script decides when to save, and whether its weights are worth saving.

    Args:
        model: the partitioned model.
        optimizer: the optimizer; None: none is saved or restored.
        number: the number of the checkpoint, which orders a directory.
        tag: the script's name for it.
    """

    lr_schedule: LRScheduler | None = None  # handled by the script

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
        f"no checkpoint {tag!r} in {store.root}; it contains {', '.join(tags) or 'none'}"
    )


def _number_of_parts(f: str) -> int:
    """Returns the number of files of the previous partial save; 0 without any."""
    path = Path(f"{f}.parts")
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} was not written by smp.save: it does not contain a number of parts. Move it, "
            f"or choose another path"
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
                f"cannot read {path / tag}: {error.strerror or error}: check path and tag"
            ) from error
        return translate(weights) if translate else weights, user_content

    weights, content = world.on_main(read) or ({}, None)
    weights, content = broadcast_tree(world, (weights, content), lambda _, value: value)
    model.load_state_dict(weights, strict=strict)
    return restored(content)
