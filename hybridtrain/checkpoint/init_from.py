"""Initial weights from a file, a checkpoint, a run, or a folder of the Hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hybridtrain._base.adapter import Adapter, BaseWeights, adapter_of
from hybridtrain.checkpoint.base import digest_of, open_source
from hybridtrain.checkpoint.read import CheckpointReader
from hybridtrain.checkpoint.tensor_files import without_aliases
from hybridtrain.checkpoint.weight_sources import files_of, find_weights, locate
from hybridtrain.checkpoint.weights import EXTRA_STATE, load_weights, split_state
from hybridtrain.errors import CheckpointError, phrase, setting
from hybridtrain.model import HybridModel
from hybridtrain.models.quantized import describe_quantization, quantized_weights, stored_names

# the prefixes that wrappers add to names
_PREFIXES = ("module.", "_orig_mod.", "model.")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitReport:
    """The names of tensors that were loaded into a model, and of those that were not."""

    source: str
    """The source file or directory."""
    loaded: tuple[str, ...]
    """Names of the model's tensors that were loaded."""
    missing: tuple[str, ...]
    """Names of the model's tensors that the source lacks; they keep their initial values."""
    unexpected: tuple[str, ...]
    """Names of the source's tensors that the model lacks; they were not loaded."""
    reshaped: tuple[str, ...]
    """Names of tensors whose shapes differ, with both shapes; they were not loaded."""
    prefix: str
    """The prefix that was removed from the names of the source or the model to match them."""

    def problems(self) -> list[str]:
        """Returns one phrase for each tensor that was not loaded."""
        return [
            *(f"it lacks {name}" for name in self.missing),
            *(f"the model has no {name}" for name in self.unexpected),
            *self.reshaped,
        ]

    def __str__(self) -> str:
        lines = [f"initial weights from {self.source}: {len(self.loaded)} tensors loaded"]
        if self.prefix:
            lines[0] += f", after removing the prefix {self.prefix!r}"
        for kind in ("missing", "unexpected", "reshaped"):
            if names := getattr(self, kind):
                shown = ", ".join(names[:5]) + (f", and {len(names) - 5} more" * (len(names) > 5))
                lines.append(f"  {kind}: {shown}")
        return "\n".join(lines)


def init_from(
    model: HybridModel,
    source: str | Path,
    *,
    strict: bool = True,
    best: bool = False,
    prefix: str = "",
) -> InitReport:
    """Loads initial weights into `model`, without any other state; a collective call.

    Call it before training begins.

    Args:
        model: its parameters and buffers are overwritten.
        source: one of: a safetensors file; a `torch.save` file (`.pt`, `.pth`, `.bin`, `.ckpt`;
            loaded with `weights_only=True`); the directory of a checkpoint or a run; a folder in
            the Hugging Face Hub's layout; a folder written by Accelerate, torchtune or the Trainer
            of transformers, or their run folder (its newest checkpoint is used); the name of a
            model on the Hub, which is downloaded to the Hub's cache as safetensors. Each process
            reads the tensors of its stages. If some processes do not see rank 0's files, rank 0
            sends the tensors one by one.
        strict: raise an error if a tensor is missing, unexpected or has a different shape. If
            False, load the other tensors and log the report.
        best: for a run, use its best checkpoint instead of the newest.
        prefix: load only names with this prefix, and remove it to match the model's names, such as
            `net.` in a Lightning checkpoint.

    Returns:
        a report of the loaded tensors, on every rank.

    Raises:
        CheckpointError: the source is missing, damaged or contains no weights; no name matches the
            model; or, with `strict`, the tensors do not match.
    """

    world = model.world
    # Rank 0 alone downloads and chooses, so that all load the same.
    folder = world.from_main(lambda: locate(find_weights(source), best))
    reader = CheckpointReader(world, files_of(folder))

    def read() -> _Matched:
        return _matched(model.net, folder, str(source), strict, prefix)

    chosen, extra, report, base = reader.read(read) or ({}, {}, None, None)
    report, base = world.broadcast((report, base))
    model_tensors, model_extra = split_state(model.net.state_dict())
    known_extra = {name: value for name, value in extra.items() if name in model_extra}
    # Completed by the tensors that the model has, because `load_state_dict` is strict.
    load_weights(model, reader, {**model_tensors, **chosen}, {**model_extra, **known_extra})
    assert report is not None
    # After the weights: a failed load leaves the model without a base that it does not have.
    model.base = base
    adapter = adapter_of(model.net)
    if adapter is not None and all(adapter.base_name(name) is not None for name in report.loaded):
        adapter.follow_base(model.net)  # the base does not contain the adapter's values
    if world.is_main:
        _log.info("%s", report)  # with strict=false, the user accepts tensors that are not loaded
    return report


def check_weights(
    net: nn.Module, located: Path, source: str, *, strict: bool = True, prefix: str = ""
) -> InitReport:
    """Returns the report of loading weights into `net`, which may be on the meta device.

    Args:
        net: the model.
        located: the result of `locate_weights`.
        source: the source's name in messages.
        strict: as in `init_from`.
        prefix: as in `init_from`.

    Raises:
        CheckpointError: the tensors do not match the model.
    """
    return _matched(net, located, source, strict, prefix)[2]


_Matched = tuple[dict[str, Tensor], dict[str, Any], InitReport, BaseWeights | None]


def _matched(net: nn.Module, located: Path, source: str, strict: bool, prefix: str) -> _Matched:
    """Returns the tensors by the names of `net`, other state, the report, and the base.

    Raises:
        CheckpointError: the tensors do not match the model.
    """
    source_weights = open_source(located, source).below(prefix)
    if not source_weights.tensors:
        raise CheckpointError(
            f"{setting('init_from', source)} has no tensor with the prefix {prefix!r}; its names "
            f"begin with {_beginnings(open_source(located, source).tensors)}"
        )
    chosen, report = match_weights(net, source_weights.tensors, source)
    problems = report.problems()
    if not report.loaded:
        raise CheckpointError(
            f"{setting('init_from', source)} has no tensor of the model: the source has "
            f"{', '.join(sorted(source_weights.tensors)[:3])}, ..., and the model has "
            f"{', '.join(list(net.state_dict())[:3])}, ..."
            + _about_prefix(source, source_weights.tensors, net)
        )
    if strict and problems:
        shown = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" * (len(problems) > 3)
        given = f"{source}, prefix: {prefix}" if prefix else source
        leave_out = phrase("pass strict=False", source=given)
        raise CheckpointError(
            f"{setting('init_from', source)} does not match the model: {shown}{more}. To load the "
            f"other {len(report.loaded)} tensors, {leave_out}"
        )
    base = base_of(net, source_weights.base, source_weights.base_tensors, source_weights.prefix)
    return chosen, source_weights.extra, report, base


def _about_prefix(source: str, names: Iterable[str], net: nn.Module) -> str:
    """Returns the advice to remove a prefix; empty if no name of the model is in the source."""
    of_model = net.state_dict()
    for name in names:
        for dot in (place for place, letter in enumerate(name) if letter == "."):
            prefix, rest = name[: dot + 1], name[dot + 1 :]
            if rest in of_model:
                advice = phrase("pass prefix=", source=source, prefix=prefix)
                return f". To remove the prefix {prefix} of the source's names, {advice}"
    return ""


def _beginnings(names: Iterable[str]) -> str:
    return ", ".join(sorted({f"{name.partition('.')[0]}." for name in names})[:5])


def base_of(
    net: nn.Module, source: str, weights: Mapping[str, Tensor], prefix: str
) -> BaseWeights | None:
    """Returns the base of `net` after loading `weights`; None without an adapter.

    Args:
        net: the model.
        source: the source as passed to `init_from`.
        weights: the tensors of the source, by their names without `prefix`.
        prefix: the prefix of the source's names.

    Raises:
        CheckpointError: the source lacks a frozen parameter.
    """
    adapter = adapter_of(net)
    if adapter is None:
        return None
    _, report = match_weights(net, weights, source)
    if layers := _frozen_layers(net, adapter, report):
        raise CheckpointError(
            f"init_from={source} has no weights for the frozen "
            f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(layers)}: train "
            f"{'it' if len(layers) == 1 else 'them'} with {adapter.train_whole(layers)}"
        )
    names = stored_names(quantized_weights(net), under_all_names(net, weights))
    how = describe_quantization(net)
    return BaseWeights(source, digest_of(weights), frozenset(names), prefix, how)


def _frozen_layers(net: nn.Module, adapter: Adapter, report: InitReport) -> list[str]:
    """Returns the largest frozen layers that the source lacks, named as in the base.

    If the source has a part of a layer, only the other parts are returned.
    """
    state = loadable_state(net, {})
    names = {name: adapter.base_name(name) for name in state if not adapter.is_replaced(name)}
    lacking: set[str] = set()
    for name in (*report.missing, *(text.partition(" ")[0] for text in report.reshaped)):
        tensor, base_name = state[name], names.get(name)
        if base_name and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            lacking.add(base_name)
    others = {name for name in names.values() if name} - lacking
    layers: dict[str, None] = {}
    # From each parameter upward, as long as the source has nothing below: the largest layer is the
    # shortest advice.
    for name in sorted(lacking):
        layer = name.rpartition(".")[0] or name  # a parameter of the model itself
        while (parent := layer.rpartition(".")[0]) and not any(
            other.startswith(f"{parent}.") for other in others
        ):
            layer = parent
        layers[layer] = None
    return [*layers]


def under_all_names(net: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the source's tensors under the names of `net`, tied tensors under all their names.

    Args:
        net: the model.
        weights: the tensors of the source.
    """
    chosen, _ = match_weights(net, weights, "")
    tensors = split_state(loadable_state(net, weights))[0]
    # Tied parameters are the same object here, see `loadable_state`.
    aliases = without_aliases(tensors)[1]
    by_first = {aliases.get(name, name): value for name, value in chosen.items()}
    return {
        name: by_first[first] for name in tensors if (first := aliases.get(name, name)) in by_first
    }


def loadable_state(net: nn.Module, weights: Container[str]) -> dict[str, Any]:
    """Returns the state that `weights` fill: quantized weights in their plain form.

    The values are parameter objects: a tied parameter is the same object under all its names.

    Args:
        net: the model.
        weights: the names of the source; where it has the stored tensors of a quantized weight,
            these remain.
    """
    state: dict[str, Any] = net.state_dict(keep_vars=True)
    layers = quantized_weights(net)
    for name, layer in layers.items():
        stored = stored_names(layers, [name])
        if stored[0] not in weights:
            for part in stored:
                del state[part]
            state[name] = nn.Parameter(layer.placeholder, requires_grad=False)
    return state


def match_weights(
    net: nn.Module, weights: Mapping[str, Tensor], source: str
) -> tuple[dict[str, Tensor], InitReport]:
    """Returns the weights under the names of `net`, and the report.

    Args:
        net: the model.
        weights: the tensors of the source.
        source: the name of the source, for the report.
    """
    state = loadable_state(net, weights)
    adapter = adapter_of(net)
    base = getattr(net, "base_model_prefix", "")  # transformers: the prefix of the headless model
    tensors = {name: value for name, value in split_state(state)[0].items() if _is_weight(name)}
    plain_own: dict[str, list[str]] = {}
    # the adapter's tensors, which start fresh if the source has none, and unused copies
    optional = set()
    for name in tensors:
        base_name = name if adapter is None else adapter.base_name(name)
        if base_name is None or (adapter is not None and adapter.is_replaced(name)):
            optional.add(name)
        if base_name is not None:
            plain_own.setdefault(_plain(base_name), []).append(name)
    chosen: dict[str, Tensor] = {}
    reshaped: dict[str, str] = {}
    unexpected, prefixes = [], set()
    for name, value in weights.items():
        if not _is_weight(name):
            continue
        targets = next((plain_own[n] for n in _names(name, base) if n in plain_own), [])
        # The exact name wins over one without prefixes.
        targets = [name] if name in tensors else targets
        if not targets:
            unexpected.append(name)
        for target in targets:
            if value.shape != tensors[target].shape:
                there, here = list(value.shape), list(tensors[target].shape)
                reshaped[target] = f"{target} is {there} in the source and {here} in the model"
            else:
                chosen[target] = value
            if target != name:
                known_prefixes = (*_PREFIXES, *([f"{base}."] if base else []))
                prefixes |= {
                    prefix
                    for prefix in known_prefixes
                    if (prefix in name) is not (prefix in target)
                }
    # a tied tensor is loaded if any of its names is
    _, others = without_aliases(tensors)
    matched = {others.get(name, name) for name in chosen}
    missing = [
        name
        for name in tensors
        if others.get(name, name) not in matched and name not in reshaped and name not in optional
    ]
    return chosen, InitReport(
        source,
        tuple(chosen),
        tuple(missing),
        tuple(unexpected),
        tuple(reshaped.values()),
        "".join(sorted(prefixes)),
    )


def _is_weight(name: str) -> bool:
    return not name.endswith(EXTRA_STATE)


def _names(name: str, base: str) -> Iterator[str]:
    """Yields the names that the model may use for a tensor of the source."""
    plain = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", _plain(name))  # original BERT names
    plain = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", plain)
    yield plain
    if base:
        yield f"{base}.{plain}"
        yield plain.removeprefix(f"{base}.")
    yield plain.removeprefix("model.")  # Lightning


def _plain(name: str) -> str:
    """Returns a name without the prefixes of DDP and torch.compile."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def parse_init_from(setting: Any) -> dict[str, Any] | None:
    """Returns the arguments of `init_from` from a config value, or None for null.

    Args:
        setting: a path, or a mapping with `path`, `strict`, `best` and `prefix`.

    Raises:
        CheckpointError: the value has another form.
    """
    if setting is None:
        return None
    arguments = setting if isinstance(setting, Mapping) else {"path": setting}
    path = arguments.get("path")
    flags = {key: value for key, value in arguments.items() if key not in ("path", "prefix")}
    named = {key: value for key, value in arguments.items() if key == "prefix"}
    if path is None and "path" in arguments:
        raise CheckpointError(
            "init_from.path is not set: set it, or the key that the recipe reads it from, such as "
            "model.source="
        )
    if (
        not isinstance(path, str)
        or not path
        or flags.keys() - {"strict", "best"}
        or not all(isinstance(value, bool) for value in flags.values())
        or not all(isinstance(value, str) for value in named.values())
    ):
        raise CheckpointError(
            f"init_from={setting} must be a path, or a mapping such as "
            f"{{path: weights.safetensors, strict: false, best: false, prefix: net.}}"
        )
    return {"source": path, **flags, **named}
