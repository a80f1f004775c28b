"""Traces a module's forward with torch.export, if torch.fx cannot.

Only `engine="distributed"` needs this file.

torch.export runs the forward once on shapes without data, and records the operators that it calls
and their submodules. It can therefore trace any Python code that does not depend on data.
Conditions on the inputs (on their rank, for example) are checked at each call. The batch dimension
stays dynamic, and so do other sizes if the forward allows it.

In contrast, `torch.distributed.pipelining.pipeline` fixes the batch size and the mode, and cannot
cut inside a chosen module.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    suppress,
)
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hybridtrain._base.torch_private import FakeTensorMode, TorchDispatchMode, exported_guards
from hybridtrain.errors import BatchError, argument, setting
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.changes import Settled
from hybridtrain.graph.examples import Examples
from hybridtrain.graph.output_capture import INSTALLED, has_hooks
from hybridtrain.graph.recorder import Recorder
from hybridtrain.graph.shadows import Shadows
from hybridtrain.graph.traced_graph import (
    GRADIENTS_ARE_CUT,
    TAKES_GRADIENTS,
    AutogradFunctionDetector,
    Call,
    Generators,
    ShouldExpand,
    TracedGraph,
    Tracer,
    Untraceable,
    current_user_line,
    is_user_code,
    none_swallowed,
    note_refusal,
    refused_calls,
    replaced,
)

# The submodule of an exported module that checks its input sizes.
GUARDS = "_guards_fn"


def export_tracer(
    signature: CallSignature,
    values: list[Any],
    precision: Callable[[], AbstractContextManager[object]] | None = None,
    alike: bool = True,
) -> Tracer:
    """Returns a tracer that exports a module once per mode, independent of expanded submodules.

    `values` has an example of each argument; the module runs in the context `precision`. With
    `alike`, a batch of one sample represents any size; otherwise sizes of 0 and 1 are fixed.
    """
    exported: dict[bool, TracedGraph] = {}

    def trace(module: nn.Module, should_expand: ShouldExpand) -> TracedGraph:
        if module.training not in exported:
            with torch.inference_mode(False), (precision or nullcontext)():
                exported[module.training] = _export(module, signature, values, alike)
        traced = exported[module.training]
        return replace(traced, calls=_calls(traced.graph, module, should_expand))

    return trace


def _export(
    module: nn.Module, signature: CallSignature, values: list[Any], alike: bool
) -> TracedGraph:
    for name, part in module.named_modules():
        if has_hooks(part):
            raise Untraceable(f"torch.export would lose the hooks of module {name!r}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    values = tree_map(partial(_example, device, alike), values)
    shapes = tree_map(_dynamic_sizes, values)
    dynamic = dict(zip(signature.names, shapes, strict=True))
    guards = _ExportGuards(module)
    shadows = Shadows({"type": _TensorType})
    settled = Settled()
    recorder = Recorder(module, settled, shadows)
    caches = recorder.clearing_caches()
    with settled.undone_on_error(), guards.entered(), shadows.removed_at_end(), caches:
        grad_matters = _check_changes(module, signature, values, guards, recorder)
        guards.forget_data()
        arguments = signature.split(values)
        # recording is slow, and the quick check has run the same forward
        recording = recorder.recording() if grad_matters is None else nullcontext()
        mode = torch.set_grad_enabled(module.training)
        with torch.random.fork_rng([]), _quiet(), mode, recording:
            program = export(module, *arguments, dynamic_shapes=dynamic, strict=False)
            if grad_matters is None:  # the quick check could not run
                repeated = export(module, *arguments, dynamic_shapes=dynamic, strict=False)
                if str(repeated.graph) != str(program.graph):
                    raise Untraceable("a graph would keep a value that changes from call to call")
    exported = program.module()
    for part in exported.modules():  # an autocast in a forward becomes a nested graph
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            if node.target == torch.ops.aten._assert_tensor_metadata.default:
                part.graph.erase_node(node)  # it computes nothing; autocast and device may differ
            if "batch_norm" in str(node.target):
                raise Untraceable(
                    "torch.export does not preserve when each batch norm updates its statistics"
                )
        part.recompile()

    checks = None
    if hasattr(exported, GUARDS):
        conditions = getattr(exported, GUARDS)
        checks = SizeChecks(type(module).__name__, conditions, exported_guards(program))

    # the graph outlives parameters that move to other processes, so it looks up the model's by name
    names = [
        name
        for named in (module.named_parameters, module.named_buffers)
        for name, _ in named(remove_duplicate=False)
    ]
    for name in names:
        holder, _, leaf = name.rpartition(".")
        with suppress(AttributeError):  # unused
            part = exported.get_submodule(holder)
            part._parameters.pop(leaf, None)
            part._buffers.pop(leaf, None)
    names_of_model = frozenset(names)

    def find(name: str) -> Any:
        if name == GUARDS:
            return checks
        holder, _, leaf = name.rpartition(".")
        if name not in names_of_model:
            return attrgetter(name)(exported)
        part = module.get_submodule(holder)
        return part._parameters[leaf] if leaf in part._parameters else part._buffers[leaf]

    return TracedGraph(
        graph=exported.graph,
        calls={},
        find=find,
        expanded={name: part for name, part in module.named_modules() if name},
        output_spec=program.call_spec.out_spec,
        # without the quick check, any query of the grad mode counts as relevant
        grad_matters=guards.asked_grad_mode if grad_matters is None else grad_matters,
        reads=recorder.reads(),
    )


def _check_changes(
    module: nn.Module,
    signature: CallSignature,
    values: list[Any],
    guards: _ExportGuards,
    recorder: Recorder,
) -> bool | None:
    """Returns whether the forward depends on the grad mode; None if it cannot run on no data.

    Raises:
        Untraceable: the forward depends on something that changes from call to call.
    """
    run = FakeForward(module, signature, values).run
    try:
        with _quiet(), none_swallowed():
            with recorder.recording():
                first = run()
            with recorder.unchanged():
                second = run()
    except Untraceable:
        raise
    except Exception:  # raised by the forward; torch.export runs it too and will report the error
        return None
    if first_change(first, second) is not None:
        repeated = run(with_lines=True)
        number = first_change(first, repeated)
        line = (
            "" if number is None else (repeated.lines or [""])[min(number, len(repeated.lines) - 1)]
        )
        raise Untraceable("a graph would keep a value that changes from call to call", line)
    if not guards.asked_grad_mode:
        return False
    guards.grad_enabled = not guards.grad_enabled
    try:
        with none_swallowed():
            return first_change(first, run()) is not None
    except Exception:  # raised by the forward only in this grad mode
        return True
    finally:
        guards.grad_enabled = not guards.grad_enabled


class SizeChecks(nn.Module):
    """The conditions on batch sizes under which an exported graph is valid.

    Attributes:
        key: compares equal for equal conditions; training and evaluation may have different
            conditions.
    """

    def __init__(self, model: str, conditions: nn.Module, key: list[str]) -> None:
        super().__init__()
        self.key = key
        self._model = model
        self._conditions = conditions

    def forward(self, *values: Any) -> None:
        """Raises `BatchError` if a condition does not hold for the inputs of a micro-batch."""
        try:
            self._conditions(*values)
        except (AssertionError, ArithmeticError) as error:  # a condition may divide by zero
            shapes = ", ".join(str(list(v.shape)) for v in values if isinstance(v, Tensor))
            condition = f"other sizes ({error})"
            if isinstance(error, AssertionError):
                condition = str(error).removeprefix("Guard failed: ")
            raise BatchError(
                f"the forward of {self._model} depends on sizes: it was traced for {condition}, "
                f"but a micro-batch has inputs of shapes {shapes}. Choose the batch size and "
                f"{argument('chunks')} so that all micro-batches satisfy the same condition "
                f"({setting('drop_last', True)} drops a short last batch), and pass "
                "example_inputs=<inputs of such sizes>"
            ) from error
        except NameError as error:  # torch 2.15, for LoRA of peft on Qwen2 with a mask
            raise BatchError(
                f"torch.export recorded a condition on the inputs of {self._model} that it cannot "
                f"evaluate ({error}): use a simpler attention, such as "
                "attn_implementation='eager' in transformers, or other inputs"
            ) from error


class _ExportGuards:
    """Raises `Untraceable` if a module's forward does something that its graph would not repeat.

    Attributes:
        grad_enabled: the grad mode that the model's code sees: enabled in training mode, disabled
            in evaluation mode.
        asked_grad_mode: whether the code has queried the grad mode.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.grad_enabled = module.training
        self.asked_grad_mode = False
        self._refusals: list[Exception] = []

    def forget_data(self) -> None:
        """Clears queries that a run without data could not answer but torch.export may."""
        self._refusals[:] = [e for e in self._refusals if isinstance(e, Untraceable)]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Activates the checks while the block runs."""
        parts = set(self._module.modules())

        def set_attribute(original: Callable[..., None], part: Any, name: str, value: Any) -> None:
            if part in parts and name != INSTALLED and is_user_code(sys._getframe(2)):
                raise Untraceable(f"sets its attribute {name!r}, which a graph would not repeat")
            original(part, name, value)

        def is_grad_enabled(original: Callable[[], bool]) -> bool:
            if not is_user_code(sys._getframe(2)):
                return original()
            self.asked_grad_mode = True
            return self.grad_enabled

        with (
            none_swallowed() as self._refusals,
            replaced(nn.Module, "__setattr__", set_attribute),
            replaced(torch, "is_grad_enabled", is_grad_enabled),
            _ForbidCustomBackward(),
            refused_calls(self._module),
            Generators(self._module).no_draws(),
            none_swallowed(),
        ):
            yield


class _ForbidCustomBackward(TorchFunctionMode):
    """Raises `Untraceable` at tensor hooks and at every `autograd.Function`."""

    def __init__(self) -> None:
        super().__init__()
        self._autograd_functions = AutogradFunctionDetector()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`."""
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise Untraceable("registers a hook on a tensor, which a graph would lose")
        if func in TAKES_GRADIENTS or func in (Tensor.backward, Tensor.requires_grad_):
            raise Untraceable(GRADIENTS_ARE_CUT)
        self._autograd_functions.check_not_inside(sys._getframe(1))
        if func not in _ASK_FOR_DATA:
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            note_refusal(error)
            raise


_ASK_FOR_DATA = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}


class _TensorKind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = type(*args, **kwargs)
        fakes = ("torch._subclasses", "torch._functorch")
        if len(args) > 1 or not kind.__module__.startswith(fakes):
            return kind
        return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class _TensorType(type, metaclass=_TensorKind):
    """A stand-in for `type` that returns `Tensor` for a tensor without data."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the output of a failing export; the exception contains the reason."""
    former_level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(former_level)


def as_any_batch(leaf: Any) -> Any:
    """Returns a tensor with two samples, which represent any number, instead of a batch of one."""
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1:
        return torch.cat([leaf, leaf])  # torch.export specializes a batch size of one
    return leaf


def _example(device: torch.device, alike: bool, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    if alike:
        leaf = as_any_batch(leaf)
    return leaf.to(device, copy=True)  # an inference tensor cannot be exported


def _dynamic_sizes(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    # torch.export assumes a dynamic size to be at least 2
    sizes = {dim: Dim.AUTO if size > 1 else None for dim, size in enumerate(leaf.shape)}
    return sizes | ({0: Dim.DYNAMIC} if leaf.shape[0] > 1 else {})


def _calls(
    graph: fx.Graph, module: nn.Module, should_expand: ShouldExpand
) -> dict[fx.Node, list[Call]]:
    """Returns the nodes at which calls of submodules begin, as deep as `should_expand` allows."""
    should_expand = cache(should_expand)
    calls: dict[fx.Node, list[Call]] = {}
    counts: dict[str, int] = {}
    before: dict[str, Call] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") if node.op == "call_function" else None
        now: dict[str, Call] = {}
        for key, (path, _) in (stack or {}).items():
            path = path.partition("@")[0]
            if not path or path.startswith("_empty_nn_module_stack"):
                continue
            if key in before:
                now[key] = before[key]
            else:
                now[key] = path, counts.get(path, 0)
                counts[path] = counts.get(path, 0) + 1
                calls.setdefault(node, []).append(now[key])
            if not should_expand(path, module.get_submodule(path)):
                break
        if stack:
            before = now
    return calls


class FakeForward:
    """A module and its arguments with fake tensors (without data); the real ones stay unchanged.

    Otherwise even a run without data would change buffers in place, such as a batch norm's.
    """

    def __init__(self, module: nn.Module, signature: CallSignature, values: list[Any]) -> None:
        self._module = module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._args, self._kwargs = signature.split(self._faked(values))
        self._state: dict[str, Tensor] = {}
        fakes: dict[int, Any] = {}
        named = (module.named_parameters, module.named_buffers)
        tensors = (pair for list_of in named for pair in list_of(remove_duplicate=False))
        for name, tensor in tensors:
            if id(tensor) not in fakes:  # tied parameters stay tied
                fakes[id(tensor)] = self._faked(tensor)
            self._state[name] = fakes[id(tensor)]

    def run(self, with_lines: bool = False) -> FakeRun:
        """Runs the forward; only the forward's own code may change the module."""
        run = FakeRun({id(tensor): name for name, tensor in self._state.items()}, with_lines)
        # torch.export cannot follow a forward that reads tensor data either
        with torch.random.fork_rng([]), torch.no_grad(), self._mode, run:
            functional_call(self._module, self._state, self._args, self._kwargs)
        return run

    def _faked(self, values: Any) -> Any:
        return tree_map_only(Tensor, self._mode.from_tensor, values)


class FakeRun(TorchDispatchMode):
    """The operators that one forward calls, each with its arguments.

    Attributes:
        calls: a string for each call, with the operator, tensor shapes, names of parameters and
            buffers, and other arguments.
        lines: the user's line for each call, if requested.
    """

    def __init__(self, names: Mapping[int, str], with_lines: bool) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.lines: list[str] = []
        self._names = names
        self._with_lines = with_lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records the call."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            # the model's own `except` may catch the error that follows
            self.refusal = Untraceable(f"asks for the data of a tensor ({func})")
        self.calls.append(f"{func} {tree_map(self._noted, (args, kwargs))!r}")
        if self._with_lines:
            self.lines.append(current_user_line())
        return func(*args, **kwargs)

    def _noted(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        return tuple(argument.shape), argument.dtype, self._names.get(id(argument))


def first_change(first: FakeRun, second: FakeRun) -> int | None:
    """Returns the index of the first call in which two runs differ; None if they are equal."""
    for number, (first_call, second_call) in enumerate(zip_longest(first.calls, second.calls)):
        if first_call != second_call:
            return number
    return None


# These operators (and full slices) compute nothing, and their position in a graph may vary.
_COMPUTES_NOTHING = re.compile(
    r"prim\.|aten\.(detach|alias|lift_fresh|lift_fresh_copy)\."
    r"|aten\.slice\..*, 0, 9223372036854775807\)"
)


def graph_does_the_same(
    traced: TracedGraph,
    module: nn.Module,
    signature: CallSignature,
    values: Sequence[Any],
    example: Sequence[Any],
    examples: Examples,
) -> bool:
    """Returns whether an exported graph calls the operators that the forward calls for `values`.

    Both run on tensors without data. This covers sizes 0 and 1, for which torch.export has no
    conditions, and everything else that may affect the control flow. Some code checks whether it is
    being exported: if graph and forward also differ for `example`, the arguments of the export, the
    forward for `values` is compared with the forward for `example`, ignoring numbers.
    """
    try:
        forward_calls = _calls_of_forward(module, signature, values, examples)
        if forward_calls == _calls_of_graph(traced, module, values, examples):
            return True
        usual = _calls_of_forward(module, signature, example, examples)
        if usual == _calls_of_graph(traced, module, example, examples):
            return False
    except Exception:  # graph or forward raised an error; a new trace shows which
        return False
    return _without_numbers(forward_calls) == _without_numbers(usual)


_NUMBER = re.compile(r"\b\d+\b")
# These operators depend on sizes 1, and their shapes appear in the next operator anyway.
_MEMORY = re.compile(r"aten\.(view|_unsafe_view|clone|expand)\.")


def _without_numbers(calls: Sequence[str]) -> list[str]:
    return [_NUMBER.sub("", call) for call in calls if not _MEMORY.match(call)]


def _calls_of_forward(
    module: nn.Module, signature: CallSignature, values: Sequence[Any], examples: Examples
) -> list[str]:
    state, arguments = examples.stand_ins(module), examples.of_inputs(list(values))
    with examples.active(), _run_of(state) as run:
        functional_call(module, state, *signature.split(arguments))
    return _computing(run)


def _calls_of_graph(
    traced: TracedGraph, module: nn.Module, values: Sequence[Any], examples: Examples
) -> list[str]:
    state, arguments = examples.stand_ins(module), examples.of_inputs(list(values))
    env: dict[fx.Node, Any] = {
        node: examples.stand_in(traced.find(str(node.target)))
        for node in traced.graph.find_nodes(op="get_attr")
    }
    leaves = iter(tree_leaves(arguments))
    with examples.active(), _run_of(state) as run:
        for node in traced.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.get)
            if node.op == "placeholder":
                env[node] = next(leaves)
            elif node.op == "call_function":
                env[node] = node.target(*args, **kwargs)
    return _computing(run)


def _run_of(state: Mapping[str, Tensor]) -> FakeRun:
    return FakeRun({id(tensor): name for name, tensor in state.items()}, with_lines=False)


def _computing(run: FakeRun) -> list[str]:
    return [call for call in run.calls if not _COMPUTES_NOTHING.match(call)]
