"""The values of a forward for example inputs: tensors without data, and Python values.

Only `engine="distributed"` needs this file.

With them, a trace can answer queries of the forward's Python code: a length, a type, a condition on
sizes. Values that depend on tensor data stay unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from hybridtrain._base.torch_private import FakeTensorMode, compiled_module, hooks_of


class _Unknown:
    """Stands for the value of an operation that depends on data."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Any = _Unknown()


class Examples:
    """Runs operations of a module on tensors with shapes but without data.

    All tensors appear to be on one device, wherever the module's tensors are, and its parameters
    may be on the meta device. Running a submodule does not change the module.

    Args:
        root: the module.
        device: the apparent device of the tensors.
        inside: returns a context for each operation.
    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._root = root
        self._device = device
        self._inside = inside
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self._grad_enabled = root.training

    def of_inputs(self, values: Any) -> Any:
        """Returns a pytree of inputs with fake tensors (without data)."""
        with self._inside():
            return tree_map_only(Tensor, self._without_data, values)

    def run(self, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a graph's operation on such values; `UNKNOWN` if there is none.

        Args:
            op: the `op` of the node.
            target: the `target` of the node.
            args: the values of the node's positional arguments.
            kwargs: the values of the node's keyword arguments.
        """
        if _has_unknown((args, kwargs)):
            return UNKNOWN
        try:
            with self.active():
                if op == "call_function":
                    return target(*args, **kwargs)
                if op == "call_method":
                    return getattr(args[0], target)(*args[1:], **kwargs)
                attribute = self._attribute(target)
                if op == "get_attr":
                    is_tensor = isinstance(attribute, Tensor)
                    return self.stand_in(attribute) if is_tensor else attribute
                return self._called(attribute, args, kwargs)
        # the user's operation may raise any error, for example when it needs data
        except Exception:
            return UNKNOWN

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which operations run on such values."""
        with (
            self._inside(),
            _silent(),
            torch.random.fork_rng([]),
            torch.set_grad_enabled(self._grad_enabled),
            self._mode,
        ):
            yield

    def stand_ins(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the stand-ins for the parameters and buffers of a module, by name."""
        tensors = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        return {name: self.stand_in(tensor) for name, tensor in tensors}

    def _attribute(self, target: str) -> Any:
        attribute: Any = self._root
        for name in target.split("."):
            attribute = getattr(attribute, name)
        return attribute

    def _called(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule) or compiled_module(part) is not None:
                return UNKNOWN
            for table in hooks_of(part):
                if any(not _is_of_library(hook) for hook in table.values()):
                    return UNKNOWN  # it may store its arguments
        with _unchanged(module):
            return functional_call(module, self.stand_ins(module), tuple(args), dict(kwargs))

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Returns the stand-in for a parameter or buffer."""
        if id(tensor) not in self._stand_ins:
            stand_in = self._without_data(tensor)
            if isinstance(tensor, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
            self._stand_ins[id(tensor)] = tensor, stand_in
        return self._stand_ins[id(tensor)][1]

    def _without_data(self, tensor: Tensor) -> Tensor:
        with torch.no_grad(), self._mode:
            if tensor.layout != torch.strided:
                return self._mode.from_tensor(tensor)
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device
            )


def _has_unknown(values: Any) -> bool:
    if isinstance(values, tuple | list):
        return any(map(_has_unknown, values))
    if isinstance(values, dict):
        return any(map(_has_unknown, values.values()))
    return values is UNKNOWN


def _is_of_library(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.startswith(("torch.", "transformers.utils.output_capturing"))


@contextmanager
def _silent() -> Iterator[None]:
    former_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(former_level)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restores the attributes of a module, and the entries of its lists, dicts and sets."""
    held = []
    for part in module.modules():
        attributes = vars(part)
        containers = [(v, copy(v)) for v in attributes.values() if type(v) in (list, dict, set)]
        held.append((attributes, dict(attributes), containers))
    try:
        yield
    finally:
        for attributes, before, containers in held:
            attributes.clear()
            attributes.update(before)
            for container, entries in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(entries)


# Python's queries of a value, by name.
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "index": lambda value: value.__index__(),
    "float": float,
    "len": len,
    "text": str,
    "value": lambda value: value,
}

# Queries with the same answer for all inputs of a kind; see `variants.kind_of`.
_OF_KIND = {
    "dim", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_mps", "is_floating_point",
    "is_complex", "is_sparse", "is_quantized", "is_meta", "is_nested", "requires_grad", "is_leaf",
    "ndimension", "type", "element_size", "itemsize", "is_signed",
}  # fmt: skip


class SizeGuards:
    """The answers about sizes that a graph was traced with.

    Args:
        graph: the graph of a trace, whose nodes may change later.
        values: the example value of each node.
        answers: the answer for each pair of a node and a query.
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: Mapping[fx.Node, Any],
        answers: Mapping[tuple[fx.Node, str], Any],
    ) -> None:
        queried_nodes = {
            key: answer for key, answer in answers.items() if _depends_on_sizes(key[0], values)
        }
        needed_nodes: set[fx.Node] = set()
        todo = [node for node, _ in queried_nodes]
        while todo:
            node = todo.pop()
            if node not in needed_nodes:
                needed_nodes.add(node)
                todo += node.all_input_nodes
        copies: dict[fx.Node, fx.Node] = {}
        self._graph = fx.Graph()
        self._inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        for node in graph.nodes:
            if node.op == "placeholder" or node in needed_nodes:
                copies[node] = self._graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {}
        self._asked = [
            (copies[node], question, answer) for (node, question), answer in queried_nodes.items()
        ]

    @property
    def texts(self) -> list[str]:
        """The answers, for an error message."""
        return [
            f"{question} of {node.name} is {answer!r}" for node, question, answer in self._asked
        ]

    def hold(self, examples: Examples, values: Sequence[Any]) -> bool:
        """Returns whether the answers are the same for other inputs.

        Args:
            examples: the examples of the traced module.
            values: the other inputs, from `Examples.of_inputs`.
        """
        if not self._asked:
            return True
        env: dict[fx.Node, Any] = {}
        input_values = iter(values)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                env[node] = next(input_values)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = examples.run(node.op, node.target, args, kwargs)
        return all(
            _gives(QUESTIONS[question], env[node], answer) for node, question, answer in self._asked
        )


def _gives(ask: Callable[[Any], Any], value: Any, answer: Any) -> bool:
    """Returns whether a query of a value has this answer; False for an unknown value."""
    if value is UNKNOWN:  # has a bool and a str
        return False
    try:
        return bool(ask(value) == answer)
    except Exception:  # a value of another type, with another answer
        return False


def _depends_on_sizes(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Returns whether a node's value may differ for inputs of other sizes."""
    visited: set[fx.Node] = set()
    todo = [node]
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        if isinstance(values.get(node, UNKNOWN), Tensor):
            return True  # its length was queried
        name = getattr(node.target, "__name__", str(node.target))
        attribute = str(node.args[1]) if node.target is getattr else name
        if node.op in ("call_function", "call_method") and attribute in _OF_KIND:
            continue
        if any(isinstance(values.get(n), Tensor) for n in node.all_input_nodes):
            return True
        todo += node.all_input_nodes
    return False
