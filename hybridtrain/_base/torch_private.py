"""Wrappers for the private APIs of PyTorch that this project uses.

Each docstring names the private API, and why no public API suffices. Check a new PyTorch release
here first. Two private names are used elsewhere: `torch.utils._pytree`, which has no public
counterpart, and `nn.Module._apply`, which `nn.Module.to` calls.
"""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch.distributed exports these undocumented, and only if it is available.
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

# Tensors with shapes but without data.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd import Variable, profiler
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

# The mode set by torch.set_default_device and `with torch.device(...)`.
from torch.utils._device import DeviceContext

# The public modes see only calls of torch functions, not the operators that these run.
from torch.utils._python_dispatch import TorchDispatchMode

# The exception that ends the recomputation of torch.utils.checkpoint early.
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

from hybridtrain._base.shared_libraries import loaded_libraries
from hybridtrain.errors import ConfigError, UserError, argument, setting

__all__ = [
    "FAKE_TENSOR_LIMITS",
    "GRAD_MODE_SETTER",
    "CallerModes",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "InterceptedDraws",
    "PackedTensor",
    "PrefixStore",
    "StopRecomputation",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "adds_up_gradients",
    "all_threads_profiled",
    "allowing_torch_func",
    "at_end_of_backward",
    "backward_of_batch_norm",
    "before_ddp_waits",
    "compile_module",
    "compiled_module",
    "ddp_check_reduced",
    "ddp_close",
    "ddp_find_buffers",
    "ddp_ignore_parameters",
    "ddp_prepare_for_backward",
    "ddp_rebuild_buckets",
    "ddp_reset",
    "ddp_sync_buffers",
    "deepcopy_of_modules",
    "draws_here",
    "end_loader",
    "find_random_operations",
    "free_saved",
    "get_default_store",
    "has_gradient_hooks",
    "has_hooks",
    "has_node_hooks",
    "has_saved_hooks",
    "hooks_of",
    "is_accumulated",
    "is_composite",
    "is_traced",
    "keep_device_guard",
    "leave_draws",
    "leave_uncompiled",
    "loader_workers",
    "move_hooks",
    "noting_saved",
    "number_of_node",
    "prepare_compiler",
    "profiled",
    "record_cuda_memory",
    "repeat_compiled_results",
    "run_backward",
    "scaler_found_inf",
    "tensors_saved_by",
    "without_gradient_hooks",
    "without_modes",
    "without_torch_function",
    "write_cuda_memory",
]

_Modules = TypeVar("_Modules")

FAKE_TENSOR_LIMITS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""The errors of operators that need values and cannot run on fake tensors."""


# --- profiling


def import_compiler() -> None:
    """Imports `torch._dynamo`, which the first optimizer of a process imports anyway."""
    import torch._dynamo  # noqa: F401


_NOT_PROFILED = nullcontext()


def is_profiled() -> bool:
    """Returns whether a profiler is running.

    Reads `torch.autograd.profiler._is_profiler_enabled`, as PyTorch's optimizers do, because
    entering a `record_function` takes microseconds even without a profiler.
    """
    return profiler._is_profiler_enabled


def profiled(name: object) -> AbstractContextManager[object]:
    """Returns a context that appears as `name` in the trace of a running profiler."""
    return profiler.record_function(str(name)) if is_profiled() else _NOT_PROFILED


def all_threads_profiled() -> Any:
    """Returns the `experimental_config` for a profiler of all threads, including the stages'.

    `torch._C._profiler._ExperimentalConfig`: without it, a profiler sees only the thread that
    starts it.
    """
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def record_cuda_memory() -> None:
    """Starts recording each GPU allocation with its stack.

    `torch.cuda.memory._record_memory_history`, which PyTorch documents under this name.
    """
    torch.cuda.memory._record_memory_history()


def write_cuda_memory(path: Path) -> None:
    """Writes the recorded allocations to a file for pytorch.org/memory_viz, and stops recording.

    `torch.cuda.memory._dump_snapshot`, which PyTorch documents under this name.
    """
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# --- modules and the compiler

# torch._C._set_grad_enabled: all of torch.no_grad, enable_grad and set_grad_enabled call it.
GRAD_MODE_SETTER = (torch._C, "_set_grad_enabled")


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Returns the original module if `module` is a result of torch.compile, else None.

    Uses `_orig_mod` of the result of torch.compile, because importing its class takes seconds.
    """
    return module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def compile_module(module: nn.Module, **options: Any) -> None:
    """Compiles `module` and its hooks at its next call, with the `options` of torch.compile.

    Uses `nn.Module._compiled_call_impl` and `_call_impl`, as `module.compile()` does. Up to PyTorch
    2.13, however, this does not compile modules of classes in torch.nn, such as a Linear or a
    TransformerEncoderLayer, because Dynamo does not start inside PyTorch's own code.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, **options)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what `module(...)` runs instead of its hooks and forward; None: nothing.

    Uses `nn.Module._compiled_call_impl`, for the reason in `replace_call`.
    """
    call: Callable[..., Any] | None = module._compiled_call_impl
    return call


def compiled_calls(modules: Iterable[nn.Module]) -> Iterable[Callable[..., Any] | None]:
    """Returns the `compiled_call` of each module, without a Python call for it."""
    return map(attrgetter("_compiled_call_impl"), modules)


def is_wrapped_by_compiler(depth: int) -> bool:
    """Returns whether `torch.compile(module)` runs the code `depth` frames above this function.

    Uses the name of `torch._dynamo.eval_frame`, whose `OptimizedModule` reads `module.forward` when
    it is made: PyTorch tells a module in no other way that it is compiled.
    """
    name: object = sys._getframe(depth).f_globals.get("__name__")
    return name == "torch._dynamo.eval_frame"


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes `module(...)` run `call`; None: its own hooks and forward.

    Uses `nn.Module._compiled_call_impl`, in the module's dictionary: hooks cannot surround a call,
    and compiled code would contain them. Copies and pickles of the module leave it out.
    """
    module.__dict__["_compiled_call_impl"] = call


_IS_2_11 = torch.__version__.split(".")[:2] == ["2", "11"]


def prepare_compiler(layers: int, static: bool) -> None:
    """Lets Dynamo compile this many layers of different kinds, in several threads.

    Dynamo holds a lock while it compiles, also for new shapes, but not when it compiles the
    backward in the first backward. So the backward is compiled with its forward, by
    `torch._functorch.config.force_non_lazy_backward_lowering`; PyTorch does so anyway for dynamic
    shapes.

    `torch._dynamo.config.recompile_limit`: Dynamo compiles at most 8 variants of a function and
    runs further ones uncompiled, and all modules are called by the same function.

    Args:
        layers: the number of layers.
        static: whether to compile them with `dynamic=False`. Each call of such a function sets
            `automatic_dynamic_shapes` and resets it, in PyTorch 2.11 for all threads, so that
            another thread could compile for any shape.
    """
    # these imports take a second, so they are only made when compiling
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    # Raised, never lowered: a script may have set more.
    for name, factor in (("recompile_limit", 1), ("accumulated_recompile_limit", 8)):
        setattr(dynamo, name, max(getattr(dynamo, name), 8 * factor * layers))
    if static and _IS_2_11:
        dynamo.automatic_dynamic_shapes, dynamo.assume_static_by_default = False, True
    functorch.force_non_lazy_backward_lowering = True
    _detect_tracing_by_thread()
    _guard_class_attributes()


def leave_uncompiled(function: Any) -> None:
    """Keeps Dynamo from compiling the frames of a function; functions that it calls are compiled.

    Uses `torch._C._dynamo.eval_frame.set_code_exec_strategy`, as `torch.compiler.disable` does,
    whose import takes a second.
    """
    from torch._C._dynamo import eval_frame

    action: Any = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


_AUTOTUNING = {
    "max_autotune": "TORCHINDUCTOR_MAX_AUTOTUNE",
    "max_autotune_gemm": "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "max_autotune_pointwise": "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "coordinate_descent_tuning": "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
}


def repeat_compiled_results() -> None:
    """Makes compiled code depend on its inputs alone, not on times or on earlier inputs.

    `torch.use_deterministic_algorithms` also keeps Inductor from measuring what decides the order
    of sums, but not its autotuning (`torch._inductor.config.max_autotune` and others). The limits
    of `prepare_compiler` go: beyond them Dynamo runs further shapes uncompiled, so that the code of
    a shape would depend on how many others a process has seen before.

    Raises:
        ConfigError: Inductor is set to choose kernels by their time.
    """
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    for name, variable in _AUTOTUNING.items():
        if getattr(inductor, name):
            raise ConfigError(
                f"torch._inductor.config.{name} chooses kernels by their time, so results cannot "
                f"be repeated bitwise: set it to False (in the environment, {variable}=0), or "
                f"remove {argument('replicas')} and {argument('deterministic')}"
            )
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1 << 30


def keep_device_guard() -> None:
    """Lets threads compile and end, also parts of layers that compile themselves.

    `torch._C._ensureCUDADeviceGuardSet`: where PyTorch is built for CUDA but there is no GPU, the
    first tracing replaces the device guard of the process. In 2.11 the replacement is freed with
    its thread, and the next tracing crashes, so this thread makes it before any stage thread.
    """
    if _IS_2_11 and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


@functools.cache
def _detect_tracing_by_thread() -> None:
    """Lets a thread call compiled code while another one compiles.

    `torch.fx._symbolic_trace.is_fx_symbolic_tracing`: compiled code refuses calls inside torch.fx's
    tracing, which the compiler uses too. Up to PyTorch 2.13 the flag is one for all threads.
    """
    home = torch.fx._symbolic_trace
    # A later PyTorch, whose flag is by thread.
    if not hasattr(home, "_is_fx_tracing_flag"):
        return
    this_thread = threading.local()
    trace, is_tracing = torch.fx.Tracer.trace, home.is_fx_symbolic_tracing

    @functools.wraps(trace)
    def noted_trace(*args: Any, **kwargs: Any) -> Any:
        outer = getattr(this_thread, "traces", False)
        this_thread.traces = True
        try:
            return trace(*args, **kwargs)
        finally:
            this_thread.traces = outer

    torch.fx.Tracer.trace = noted_trace  # type: ignore[method-assign]
    # Both: the flag of the process may belong to another thread, and tracing has conditions of its
    # own.
    home.is_fx_symbolic_tracing = lambda: getattr(this_thread, "traces", False) and is_tracing()


@functools.cache
def _guard_class_attributes() -> None:
    """Lets compiled code notice a changed attribute of a class, such as `Config.rate`.

    `UserDefinedClassVariable.var_getattr`: PyTorch 2.11 takes numbers, strings, lists and enums
    that it reads from a class for constants, so compiled code would use their old values; 2.12 does
    not.
    """
    if not _IS_2_11:
        return
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, UserDefinedClassVariable

    kind: Any = UserDefinedClassVariable
    # `functools.cache` keeps this from being wrapped twice.
    read = kind.var_getattr

    @functools.wraps(read)
    def guarded_read(variable: Any, tx: Any, name: str) -> Any:
        if variable.source is not None and not name.startswith("__"):
            value = inspect.getattr_static(variable.value, name, None)
            guard = AttrSource(variable.source, name).make_guard
            if ConstantVariable.is_literal(value):
                install_guard(guard(GuardBuilder.CONSTANT_MATCH))
            elif isinstance(value, enum.Enum):
                install_guard(guard(GuardBuilder.ID_MATCH))
        return read(variable, tx, name)

    kind.var_getattr = guarded_read


def hooks_of(module: nn.Module) -> tuple[MutableMapping[int, Any], ...]:
    """Returns the tables of hooks around the forward and backward of `module`.

    Uses `nn.Module._forward_hooks` and similar attributes: public functions register hooks, but do
    not list them.
    """
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has hooks around its forward or backward."""
    return any(hooks_of(module))


def adds_up_gradients() -> bool:
    """Returns whether the running operator accumulates a leaf's gradient.

    Uses `torch._C._current_autograd_node`: no public function returns the running autograd node.
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")


@functools.cache
def is_composite(operator: Any) -> bool:
    """Returns whether an operator has no kernel and runs others.

    Without autograd it arrives whole in a dispatch mode. Others such as `silu_backward` could be
    taken apart, but run their kernel. Uses `OpOverload._can_decompose` and
    `torch._C._dispatch_has_kernel_for_dispatch_key`, which have no public names.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace == "prim":
        return False
    if not operator._can_decompose():
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")


# The number of the autograd node that this thread makes next.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The number of an autograd node; of ready nodes, the highest number runs first. A node that
# accumulates a leaf's gradient has the highest possible number.
number_of_node: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")


def in_backward() -> bool:
    """Returns whether this thread runs a node of a backward.

    Uses `torch._C._current_autograd_node`, as `adds_up_gradients` does.
    """
    return torch._C._current_autograd_node() is not None


def backward_of_batch_norm() -> bool:
    """Returns whether the running backward is at the node of a batch norm.

    Uses `torch._C._current_autograd_node`, as `adds_up_gradients` does.
    """
    node = torch._C._current_autograd_node()
    return node is not None and "BatchNorm" in node.name()


@contextmanager
def allowing_torch_func() -> Iterator[None]:
    """Lets `torch.func.grad` and similar functions run inside saved-tensor hooks.

    These functions raise inside such hooks, which activation checkpointing and memory counting use.
    The context removes the hooks temporarily. It uses
    `torch._C._autograd._top_saved_tensors_default_hooks` and similar functions, because the
    caller's hooks have no public name, and replaces the function with which torch.func forbids such
    hooks.
    """
    global _allowing
    # The replaced function is the process's; the first thread puts it in place, and the last one
    # takes it away.
    with _allowing_lock:
        _allowing += 1
        torch.autograd.graph.disable_saved_tensors_hooks = _without_saved_tensors_hooks
    try:
        yield
    finally:
        with _allowing_lock:
            _allowing -= 1
            if not _allowing:
                torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks


_allowing = 0  # number of threads in the context; they share the replaced function
_allowing_lock = threading.Lock()
_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextmanager
def _without_saved_tensors_hooks(error_message: str) -> Iterator[None]:
    # `disable_saved_tensors_hooks` raises as long as there are any.
    hooks = _pop_saved_hooks()
    try:
        with _disable_saved_tensors_hooks(error_message):
            yield
    finally:
        _push_saved_hooks(hooks)


def _pop_saved_hooks() -> tuple[Any, ...]:
    """Removes all saved-tensor hooks of this thread and returns them, outermost first."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return tuple(reversed(hooks))


def _push_saved_hooks(hooks: Sequence[Any]) -> None:
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class CallerModes(NamedTuple):
    """The modes and hooks of a thread that observe or change its operations.

    Attributes:
        function: the `TorchFunctionMode`s, outermost first, including the default device's mode.
        dispatch: the `TorchDispatchMode`s, outermost first.
        saved: the pairs of saved-tensor hooks, outermost first.
    """

    function: tuple[Any, ...] = ()
    dispatch: tuple[Any, ...] = ()
    saved: tuple[Any, ...] = ()

    @classmethod
    def capture(cls) -> CallerModes:
        """Returns the modes and hooks of the calling thread.

        Uses `torch._C._get_function_stack_at` and similar functions: there are no public names.
        """
        functions = range(torch._C._len_torch_function_stack())
        dispatches = range(torch._C._len_torch_dispatch_stack())
        saved = _pop_saved_hooks()  # only the top of the stack can be read
        _push_saved_hooks(saved)
        return cls(
            tuple(map(torch._C._get_function_stack_at, functions)),
            tuple(map(torch._C._get_dispatch_stack_at, dispatches)),
            saved,
        )

    @contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Sets these modes and hooks in the block, in a thread without modes.

        A default device becomes `device`, the thread's device, if it is of the same type.
        """
        function = tuple(
            DeviceContext(device)
            if isinstance(mode, DeviceContext) and mode.device.type == device.type
            else mode
            for mode in self.function
        )
        modes = self._replace(function=function)
        # In the order of capture, so that the innermost mode stays the innermost.
        modes._push()
        try:
            yield
        finally:
            modes._pop()

    def _push(self) -> None:
        for mode in self.function:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self.dispatch:
            torch._C._push_on_torch_dispatch_stack(mode)
        _push_saved_hooks(self.saved)

    def _pop(self) -> None:
        for _ in self.saved:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for mode in reversed(self.dispatch):
            # PyTorch keeps infrastructure modes, such as FakeTensorMode, in slots beside the stack.
            torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))
        for _ in self.function:
            torch._C._pop_torch_function_stack()


@contextmanager
def without_modes() -> Iterator[None]:
    """Removes the modes and hooks of `CallerModes` from this thread in the block."""
    modes = CallerModes.capture()
    modes._pop()
    try:
        yield
    finally:
        modes._push()


def saved_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Returns the innermost saved-tensor hooks of this thread, or None.

    Uses `torch._C._autograd._top_saved_tensors_default_hooks`: PyTorch calls only the innermost
    hooks, so further hooks have to call them.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else tuple(hooks)


@contextmanager
def noting_saved(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `note` with each tensor that autograd saves inside a torch.utils.checkpoint."""
    hooks = saved_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    # On top of the checkpoint's hooks, which it calls: PyTorch calls the topmost pair alone.
    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        yield


# --- random operations

# A key of PyTorch's dispatcher that no tensor has; a thread turns it on and off. It comes before
# autograd and autocast, and operations without a kernel for it skip it in C++. PyTorch reserves it
# for its tests of such modes, so nothing else uses it. The alternative, `TorchDispatchMode`, calls
# Python for every operation.
_DRAWS_NAME = "TESTING_ONLY_GenericMode"
_DRAWS_KEY: Any = torch._C._parse_dispatch_key(_DRAWS_NAME)
_BELOW_DRAWS_KEY: Any = torch._C._dispatch_keyset_full_after(_DRAWS_KEY)
_set_draws_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included


# The innermost context of each thread, by thread id. It is not in PyTorch's thread-local state,
# because process groups copy that state into their works, and their threads would need the GIL to
# drop it, also during interpreter shutdown.
_active: dict[int, InterceptedDraws] = {}

_known_operations: set[str] = set()
# as of the last search: the number of loaded libraries, and the operations defined in Python
_seen_additions: tuple[int | None, set[str]] = None, set()
_libraries: dict[str, torch.library.Library] = {}
_registration_lock = threading.Lock()


def find_random_operations() -> None:
    """Makes `InterceptedDraws` intercept all random operations that exist now.

    Random operations have the tag `nondeterministic_seeded`. A composite operation
    (`CompositeImplicitAutograd`, such as `dropout`) is not intercepted, but the operations that it
    calls are. PyTorch tags its own operations. Others, such as flash-attn's, often have no tag:
    those with an argument `dropout_p` become calls of `InterceptedDraws.call`.

    `torch._C._dispatch_get_all_op_names`: an extension may have added operations. The list takes
    milliseconds, so it is read only if something has been added: Python code notes what it defines
    in `torch.library._defs`, and other code comes in a shared library.
    """
    global _seen_additions
    # Models may be built and stepped in several threads, and a kernel cannot be registered twice.
    with _registration_lock:
        if not _libraries:
            library = _libraries["_"] = torch.library.Library("_", "IMPL", _DRAWS_NAME)
            # Operations without a kernel for the key skip it.
            library.fallback(torch.library.fallthrough_kernel, _DRAWS_NAME)
        defined: set[str] = torch.library._defs
        loaded = loaded_libraries()
        if loaded is not None and (loaded, defined) == _seen_additions:
            return
        additions = loaded, set(defined)
        names = set(torch._C._dispatch_get_all_op_names())
        for name in sorted(names - _known_operations):
            _intercept(name)
        _known_operations.update(names)
        _seen_additions = additions  # last: after an error, the next step searches again


def _intercept(name: str) -> None:
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return
    space, _, operator_name = name.partition("::")
    base, _, overload = operator_name.partition(".")
    try:
        operation = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    except (AttributeError, RuntimeError):  # not for Python
        return
    if torch.Tag.nondeterministic_seeded in operation.tags:

        def kernel(*args: Any, **kwargs: Any) -> Any:
            # Or the operation that `draw` runs would be intercepted again.
            _set_draws_key(_DRAWS_KEY, False)
            try:
                return _context().draw(operation, args, kwargs)
            finally:
                _set_draws_key(_DRAWS_KEY, True)

        _library(space).impl(operation, kernel, _DRAWS_NAME)
    elif space != "aten" and any(a.name == "dropout_p" for a in operation._schema.arguments):

        def passing(keys: Any, *args: Any, **kwargs: Any) -> Any:
            # the key stays on, because the operation may call random ones
            run = functools.partial(operation.redispatch, keys & _BELOW_DRAWS_KEY)
            context = _active.get(threading.get_ident())
            if context is None:
                return run(*args, **kwargs)
            return context.call(run, operation, args, kwargs)

        _library(space).impl(operation, passing, _DRAWS_NAME, with_keyset=True)


def _library(space: str) -> torch.library.Library:
    if space not in _libraries:
        _libraries[space] = torch.library.Library(space, "IMPL", _DRAWS_NAME)
    return _libraries[space]


DRAWS_IN_OTHER_THREAD = "a layer draws random numbers in a thread that it started"


def _context() -> InterceptedDraws:
    if (thread_context := _active.get(threading.get_ident())) is not None:
        return thread_context
    # A thread that a layer started, such as TorchScript's, inherits the key but has no context.
    # Its creator is one of the active threads; with a single candidate there is no doubt. The list
    # is a copy, because other threads enter and leave meanwhile.
    active = [context for context in list(_active.values()) if context.for_other_threads]
    if torch._C._current_graph_task_id() != -1:  # or autograd's thread for a GPU
        active = [context for context in active if context.in_backward][:1]
    if len(active) == 1:
        return active[0]
    raise UserError(
        f"{DRAWS_IN_OTHER_THREAD}, while other stages run in the same process, so the draws cannot "
        "be assigned to a stage: draw them in the layer's "
        f"forward, or set {setting('engine', 'distributed')}"
    )


class InterceptedDraws(AbstractContextManager[Any]):
    """A context in which each random operation of this thread becomes a call of `draw`.

    Other operations are not affected and run at full speed.

    Attributes:
        in_backward: whether it surrounds a backward, which may use other threads.
        for_other_threads: whether it also applies to threads that are started inside it.
    """

    in_backward = False
    for_other_threads = True

    def draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of `operation`; calls that this method makes are not intercepted."""
        raise NotImplementedError

    def call(
        self, run: Callable[..., Any], operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns `run(*args, **kwargs)`, an untagged `operation` with an argument `dropout_p`.

        Random operations inside it are intercepted.
        """
        return run(*args, **kwargs)

    def __enter__(self) -> Any:
        if not _libraries:
            find_random_operations()
        thread = threading.get_ident()
        # By thread: only this thread changes its own entry.
        self._outer = _active.get(thread)
        _active[thread] = self
        if (
            self._outer is None
        ):  # the key may be on, inherited from the thread that started this one
            self._was_on = torch._C._dispatch_tls_is_dispatch_key_included(_DRAWS_KEY)
            _set_draws_key(_DRAWS_KEY, True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._outer is not None:
            _active[threading.get_ident()] = self._outer
            return
        # Key before entry: with the key on and no entry, a draw would be taken for another
        # thread's.
        _set_draws_key(_DRAWS_KEY, self._was_on)
        del _active[threading.get_ident()]


def draws_here() -> InterceptedDraws | None:
    """Returns the innermost `InterceptedDraws` of this thread, or None."""
    return _active.get(threading.get_ident())


def leave_draws(outer: InterceptedDraws | None) -> None:
    """Leaves contexts that did not exit because of an interrupt, up to `outer`; None for all."""
    if outer is None and _active.pop(threading.get_ident(), None) is not None:
        _set_draws_key(_DRAWS_KEY, False)
    elif outer is not None:
        _active[threading.get_ident()] = outer


def is_traced(args: tuple[Any, ...]) -> bool:
    """Returns whether torch.compile is tracing an operation on `args`, so that it draws nothing.

    `torch._guards.detect_fake_mode`: torch.compiler reports tracing only to traced code, not to its
    operations.
    """
    return torch._guards.detect_fake_mode(args) is not None


class _FastAttention:
    """Counts the blocks, in all threads, that refuse the faster path of attention modules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused = 0
        self._before = True

    @contextmanager
    def refused(self) -> Iterator[None]:
        with self._lock:
            if not self._refused:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._refused += 1
        try:
            yield
        finally:
            with self._lock:
                self._refused -= 1
                if not self._refused:
                    torch.backends.mha.set_fastpath_enabled(self._before)


_fast_attention = _FastAttention()


def without_fast_attention() -> AbstractContextManager[None]:
    """Returns a context in which attention in evaluation mode computes as in training mode.

    In the block, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` do not take a faster
    path, which they take only if no mode is active and no tensor is of a subclass: a cut or a
    comparison would change their bits. The setting is PyTorch's, so it holds for all threads.
    """
    return _fast_attention.refused()


# --- autograd

# The function that torch.autograd.backward calls after checks of shapes, which take as long as the
# backward of a small layer: (roots, gradients, retain_graph, create_graph, inputs,
# allow_unreachable=, accumulate_grad=); a root is a tensor or a GradientEdge.
run_backward = Variable._execution_engine.run_backward


def replace_backward_entry(
    before: Callable[[Sequence[Any]], None],
    after: Callable[[Any], None],
    explain: Callable[[RuntimeError], None],
) -> None:
    """Calls `before(inputs)` at the start of each `backward` and `autograd.grad` of any code.

    Calls `after(gradients)` at its end with the result, which is empty for `backward`. Calls
    `explain(error)` if it fails, which may raise another error.

    Wraps `torch.autograd._engine_run_backward`, in which both end: a TorchFunctionMode does not see
    calls of the engine. `run_backward` above is not affected.
    """
    autograd: Any = torch.autograd
    # Both callers look it up in the module at each call, so a replacement reaches them.
    run = autograd._engine_run_backward

    def run_backward_of_users(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        before(args[3] if len(args) > 3 else kwargs.get("inputs", ()))
        try:
            gradients = run(outputs, *args, **kwargs)
        except RuntimeError as error:
            explain(error)
            raise
        after(gradients)
        return gradients

    autograd._engine_run_backward = run_backward_of_users


def push_function_mode(mode: Any) -> None:
    """Pushes a TorchFunctionMode without its `__enter__`.

    `torch._C._push_on_torch_function_stack`: entering and leaving it takes microseconds, at each
    layer.
    """
    torch._C._push_on_torch_function_stack(mode)


def pop_function_mode(mode: Any) -> bool:
    """Pops `mode` if it is the innermost TorchFunctionMode; returns whether it was.

    `torch._C._get_function_stack_at`: `__exit__` pops whatever is on top.
    """
    size = torch._C._len_torch_function_stack()
    # The model's code may have left a mode of its own on top.
    if not size or torch._C._get_function_stack_at(size - 1) is not mode:
        return False
    torch._C._pop_torch_function_stack()
    return True


# A context in which PyTorch calls no `__torch_function__`, neither of subclasses nor of modes. The
# public `DisableTorchFunctionSubclass` does not disable modes.
without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Returns whether Python hooks observe or change the gradient of a leaf.

    Uses `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`: no public function lists hooks.
    """
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextmanager
def without_gradient_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Leaves out the hooks of `has_gradient_hooks` in the block.

    Their tables are emptied, because autograd holds the tables.
    """
    tables = [
        table
        for tensor in tensors
        for table in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
        if table
    ]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, of_table in zip(tables, hooks, strict=True):
            table.update(of_table)


def is_accumulated(leaf: Tensor) -> bool:
    """Returns whether the running backward adds to `leaf.grad`: not if it is an `autograd.grad`.

    Uses `torch._C._will_engine_execute_node`, which refuses leaves whose gradients are returned.
    """
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls `function` once the running backward has added all gradients.

    Uses `queue_callback` of the engine, as DistributedDataParallel does.
    """
    autograd: Any = Variable
    autograd._execution_engine.queue_callback(function)


def has_node_hooks(node: torch.autograd.graph.Node) -> bool:
    """Returns whether a node of the graph has hooks that see the gradients it sends.

    Uses `RemovableHandle.hooks_dict_ref`, the table that all hooks of a node share: no public
    function lists them.
    """
    # Registered only to get at the table, and removed before it is read.
    handle = node.register_hook(_no_change)
    hooks: Any = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)


def _no_change(*gradients: object) -> None:
    pass


def move_hooks(source: Tensor, target: Tensor) -> None:
    """Moves the gradient hooks of a tensor to another; their handles cannot remove them any more.

    Uses `Tensor._backward_hooks`, for the reason in `has_gradient_hooks`.
    """
    hooks = source._backward_hooks or {}
    for hook in hooks.values():
        target.register_hook(hook)
    hooks.clear()


_saved_names: dict[type, list[str]] = {}


class PackedTensor:
    """What a pack hook returns, for an unpack hook that may run several times."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        """Returns the tensor."""
        raise NotImplementedError

    def free(self) -> None:
        """Frees the tensor."""
        raise NotImplementedError


def free_saved(node: torch.autograd.graph.Node) -> None:
    """Frees the tensors that a node of the graph has saved; the node cannot run afterwards.

    Uses its attributes `_raw_saved_*`, because otherwise only a whole backward frees them.
    Registering a pack hook calls it at once, and its result replaces the saved tensor.
    """
    for saved in _saved_of(node):
        if saved.unpack_hook is not None:
            if isinstance(saved.data, PackedTensor):
                saved.data.free()
            continue
        with suppress(RuntimeError):  # nothing is saved
            saved.register_hooks(_nothing, _is_gone)


def has_saved_hooks(node: torch.autograd.graph.Node) -> bool:
    """Returns whether a node of the graph has saved tensors with hooks that may run only once."""
    return any(
        saved.unpack_hook is not None and not isinstance(saved.data, PackedTensor)
        for saved in _saved_of(node)
    )


def _saved_of(node: torch.autograd.graph.Node) -> Iterator[Any]:
    kind = type(node)
    if kind not in _saved_names:
        _saved_names[kind] = [name for name in dir(node) if name.startswith("_raw_saved_")]
    for name in _saved_names[kind]:
        saved = getattr(node, name)
        yield from saved if isinstance(saved, tuple | list) else (saved,)


def tensors_saved_by(node: torch.autograd.graph.Node) -> list[Tensor]:
    """Returns the tensors that a node of the graph has saved, but none with hooks.

    Uses its attributes `_saved_*`: saved-tensor hooks see tensors only while they are saved, and
    hide the caller's hooks. Unpacking a tensor of a checkpoint would recompute it.
    """
    tensors: list[Tensor] = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # nothing is saved, or it is freed
                raw = getattr(node, name)
                parts = raw if isinstance(raw, tuple | list) else (raw,)
                if any(part.unpack_hook is not None for part in parts):
                    continue
                saved = getattr(node, name.removeprefix("_raw"), None)
                values = saved if isinstance(saved, tuple | list) else (saved,)
                tensors += [value for value in values if isinstance(value, Tensor)]
    return tensors


def _nothing(_: Tensor) -> None:
    return None


def _is_gone(_: None) -> Tensor:
    raise RuntimeError("a node of the graph ran again after its saved tensors were freed")


# --- gradient scaling


def scaler_found_inf(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, Tensor]:
    """Returns, by device, whether `scaler.unscale_(optimizer)` found an overflow.

    The caller may change the tensors. `GradScaler._per_optimizer_states`: the public API only
    covers the gradients of one process.
    """
    overflows: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    return overflows


# --- DistributedDataParallel: PyTorch's own torch.distributed.pipelining does the same


def ddp_ignore_parameters(module: nn.Module, names: Sequence[str]) -> None:
    """Makes a later DDP of `module` ignore these parameters."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def ddp_prepare_for_backward(ddp: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Makes the next backward all-reduce the gradients, like DDP's forward does at its end.

    Args:
        ddp: the DDP module.
        roots: the tensors where the backward starts, from which DDP finds unused parameters.
    """
    ddp.reducer.prepare_for_backward(list(roots))


def ddp_rebuild_buckets(ddp: DistributedDataParallel) -> None:
    """Orders the buckets by arrival of the first backward's gradients; a collective call, once."""
    ddp.reducer._rebuild_buckets()


def ddp_reset(ddp: DistributedDataParallel) -> None:
    """Resets the reducer after a prepared backward has failed."""
    ddp.reducer._reset_state()


def ddp_close(ddp: DistributedDataParallel) -> None:
    """Removes DDP's hooks from the parameters, which otherwise stay until DDP is collected."""
    ddp._remove_autograd_hooks()


def ddp_check_reduced(ddp: DistributedDataParallel) -> None:
    """Raises RuntimeError if the prepared backward has not reduced every gradient."""
    ddp._check_reducer_finalized()


@contextmanager
def before_ddp_waits(parameters: Iterable[Tensor], note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` whenever a backward in the block has computed and DDP begins to wait.

    `Variable._execution_engine.queue_callback`: DDP waits in an engine callback that it queues
    after the hook of the last parameter. A callback queued in the hook of the first parameter runs
    before that one, after the computation of the backward. No public hook runs at this point.
    """
    # -1 is no backward: a hook that is called by hand queues nothing.
    queued = {-1}

    def queue(_: Tensor) -> None:
        task = torch._C._current_graph_task_id()  # a split backward has several
        if task not in queued:
            queued.add(task)
            Variable._execution_engine.queue_callback(note)

    handles = [p.register_post_accumulate_grad_hook(queue) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def ddp_find_buffers(ddp: DistributedDataParallel) -> None:
    """Makes DDP look up the module's buffers again."""
    ddp._assign_modules_buffers()


def ddp_sync_buffers(ddp: DistributedDataParallel) -> None:
    """Copies rank 0's buffers to the other ranks; a collective call."""
    if ddp.modules_buffers:
        ddp._sync_buffers()


# --- processes


def get_default_store() -> Store:
    """Returns the store of the default process group, which the user may have created.

    `torch.distributed.distributed_c10d._get_default_store`: no public function returns the store
    that `init_process_group` made.
    """
    store: Store = dist.distributed_c10d._get_default_store()
    return store


# --- worker processes of a DataLoader


def loader_workers(iterator: Any) -> list[Any]:
    """Returns the worker processes of a DataLoader's iterator.

    `_workers`: the public DataLoader reports the end of a worker only by a signal handler that
    raises in the main thread, or after its timeout, and without the exit code.
    """
    return list(getattr(iterator, "_workers", ()))


def end_loader(iterator: Any, kill: bool) -> None:
    """Ends the worker processes of a DataLoader's iterator, and another thread's wait for a batch.

    `_remove_worker_pids`: torch's handler of SIGCHLD, which another loader may have installed,
    otherwise raises for the killed workers wherever the main thread is. `_worker_result_queue`: a
    wait otherwise lasts until the loader's timeout. `_shutdown_workers`: otherwise only called when
    the iterator is collected, which is late if a traceback holds it, and may happen in a later
    forked process, which waits for the workers forever.

    Args:
        iterator: the iterator of a DataLoader.
        kill: whether to kill the workers instead of asking them to stop; a hanging worker would not
            stop.
    """
    if not hasattr(iterator, "_shutdown_workers"):
        return
    if kill:
        if iterator._worker_pids_set:
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in iterator._workers:
            worker.kill()
        # not an (index, batch) pair: makes the waiting thread raise
        iterator._worker_result_queue.put(None)
    # Joins the workers, so that no zombies stay.
    iterator._shutdown_workers()


def deepcopy_of_modules(
    modules: _Modules, memo: dict[int, Any], parts: Callable[[_Modules], Iterable[nn.Module]]
) -> _Modules:
    """Returns `copy.deepcopy(modules, memo)` with parameters that are leaves.

    `torch.jit.ScriptModule` copies its parameters with `clone`, which autograd records: a backward
    of the copy would add to the gradients of the original.

    Args:
        modules: a module, or a pytree of modules.
        memo: as for `copy.deepcopy`.
        parts: returns all modules in `modules`, in the same order for the original and the copy.
    """
    with torch.no_grad():
        copied = copy.deepcopy(modules, memo)
    for original, twin in zip(parts(modules), parts(copied), strict=False):
        if isinstance(original, torch.jit.ScriptModule):
            copies = dict(twin.named_parameters(recurse=False))
            for name, parameter in original.named_parameters(recurse=False):
                copies[name].requires_grad_(parameter.requires_grad)
    return copied
