"""`DistributedModel`, which the first step partitions into stages, and the refused names.

A name of smp 1.x that is not supported (`NAMES`) raises an error that says what to do.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hybridtrain._base.microbatch import Microbatch
from hybridtrain.errors import ConfigError, UserError, check_choice, naming
from hybridtrain.graph import is_chain
from hybridtrain.model import HybridModel
from hybridtrain.pipeline import Head
from hybridtrain.smp.amp import GradScaler
from hybridtrain.smp.bodies import current_body, refuse_in_body
from hybridtrain.smp.config import NAMING
from hybridtrain.smp.division import partitioned_model
from hybridtrain.smp.ranks import PARTIAL, whole
from hybridtrain.smp.runtime import current
from hybridtrain.step import OptimizerStep


def inputs_of(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Converts the arguments of a call of `net` to the inputs of a batch.

    Raises:
        UserError: `net` cannot be called with them.
    """
    # the key-value cache of transformers is for generation, and stages cannot pass it on
    has_cache = getattr(getattr(net, "config", None), "use_cache", False) is True
    is_alone = len(args) == 1 and not kwargs and not has_cache
    if is_alone and (isinstance(args[0], Tensor) or is_chain(net)):
        return args[0]
    try:
        signature = inspect.signature(net.forward)
    except ValueError:  # from TorchScript
        return kwargs or args
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{type(net).__name__}.forward{signature}: {error}") from None
    by_name: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if kwargs:
                raise UserError(
                    f"{type(net).__name__}.forward{signature}: pass its arguments all by position"
                )
            return args
        by_name |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return {"use_cache": False, **by_name} if has_cache else by_name


_TENSOR = "tensor parallelism is not supported: remove it, or write the layer in plain PyTorch"

NAMES = {
    "tp_register": _TENSOR,
    "tp_register_with_module": _TENSOR,
    "fp16": "fp16=true in the configuration replaces FP16_Module and FP16_Optimizer",
    "sharded_data_parallel": "sharded data parallelism is not supported",
}
"""Names of `smp` that are refused, each with advice."""

_refuses = False


def refuse(name: str) -> NoReturn:
    """Raises the error of a refused name."""
    raise ConfigError(f"smp.{name}: {NAMES[name]}")


def refuse_optimizer_steps_in_bodies() -> None:
    """Makes `optimizer.step()` raise a UserError in a step, where it would run per micro-batch."""
    global _refuses
    if not _refuses:
        _refuses = True
        register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_in_body("optimizer.step()", "after")


_MOVES = "smp.DistributedModel has already put it on the devices of its stages"


class DistributedModel(nn.Module):
    """Trains `module` as a pipeline, together with the other replicas; smp 1.x's class.

    The first `@smp.step` function that calls the model partitions it into stages. Until then, every
    process holds the whole module.

    Args:
        module: any module that is not wrapped in DistributedDataParallel.
        trace_device: `gpu` or `cpu`; has no effect, because the model is not traced.
        trace_execution_times: partition by measured times and memory instead of estimates.
        trace_memory_usage: has the same effect.
        overlapping_allreduce: has no effect; gradients are always averaged during the backward.
        backward_passes_per_step: average gradients over the replicas once per this many steps.
        average_grads_across_microbatches: average gradients over the micro-batches; False: sum
            them.
        bucket_cap_mb: has no effect; DDP's default is used.
        find_unused_parameters: as in DDP.
        broadcast_buffers: as in DDP.
        gradient_as_bucket_view: has no effect.

    Attributes:
        net: the wrapped module.
        hybrid: the pipeline; None before the first step.

    Raises:
        ConfigError: an argument is not supported.
        UserError: the script already has a model.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        trace_memory_usage: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        runtime = current()
        check_choice("trace_device", trace_device, ("gpu", "cpu"))
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ConfigError(
                f"smp.DistributedModel averages over the replicas itself: pass the module without "
                f"the {type(module).__name__} wrapper"
            )
        if not isinstance(module, nn.Module):
            raise ConfigError(f"smp.DistributedModel takes a torch.nn.Module, not {module!r:.200}")
        if runtime.model is not None:
            raise UserError(
                "a script can have only one smp.DistributedModel: put both models into one module"
            )
        if type(backward_passes_per_step) is not int or backward_passes_per_step < 1:
            raise ConfigError(
                f"backward_passes_per_step={backward_passes_per_step!r} must be 1 or more"
            )
        self.net = module
        self.hybrid: HybridModel | None = None
        self.optimizer_step: OptimizerStep | None = None
        self.gradients_are_averaged = True
        self.average_grads_across_microbatches = average_grads_across_microbatches
        self.training = module.training
        self._measures = trace_execution_times or trace_memory_usage
        self._settings = {
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
        }
        self._passes = backward_passes_per_step
        self._passes_done = 0
        self._syncs = True
        self._post_partition_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        runtime.model = self
        refuse_optimizer_steps_in_bodies()

    # --- in a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's output for one micro-batch of the step that calls it.

        Raises:
            UserError: called outside a step, or twice in one.
        """
        body = current_body()
        if body is None:
            raise UserError(
                "call the model of smp.DistributedModel only in a function decorated with "
                "@smp.step: put the forward, the loss and model.backward(loss) into one"
            )
        return body.call_model(args, kwargs)

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Starts the backward of a micro-batch at `tensors`, as `torch.autograd.backward`.

        The pipeline runs it when the schedule reaches it: gradients are available after the step
        returns.

        Raises:
            UserError: called outside a step, twice in one, before the model's call, or with a
                wrong number of `grad_tensors`.
        """
        body = current_body()
        if body is None:
            raise UserError(
                "call model.backward only in a function decorated with @smp.step, after the model"
            )
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients: list[Tensor | None] = [None] * len(roots)
        if isinstance(grad_tensors, Tensor):
            gradients = [grad_tensors]
        elif grad_tensors is not None:
            gradients = list(grad_tensors)
        if len(gradients) != len(roots):
            raise UserError(
                f"model.backward got {len(roots)} tensors and {len(gradients)} grad_tensors=: pass "
                f"one for each tensor, None for a loss with one element"
            )
        for root, gradient in zip(roots, gradients, strict=True):
            if gradient is None and root.numel() != 1:
                raise UserError(
                    f"model.backward of a tensor of shape {tuple(root.shape)} needs its gradient: "
                    f"pass a loss with one element, or grad_tensors="
                )
        for optimizer in current().optimizers:
            if optimizer.loss_scaler is not None:
                roots = [optimizer.loss_scaler.scale(root) for root in roots]
                break
        if len(roots) == 1:
            body.backward(roots[0], gradients[0])
            return
        parts = [
            root.sum() if gradient is None else (root * gradient).sum()
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        body.backward(torch.stack([part.to(parts[0].device) for part in parts]).sum(), None)

    def run(
        self, inputs: Sequence[Any], head: Head, *, trains: bool, compared: Sequence[Tensor]
    ) -> list[Any]:
        """Runs the micro-batches of a step with `HybridModel.run_microbatches`."""
        sync = False
        if trains:
            assert self.optimizer_step is not None
            self.optimizer_step.begin_microbatches(inputs)
            self._passes_done += 1
            sync = self._syncs and self._passes_done % self._passes == 0
            self.gradients_are_averaged = sync or current().world.data_parallel_size == 1
        return self.partitioned_hybrid().run_microbatches(
            inputs, head, trains=trains, sync=sync, compared=list(compared)
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the block without averaging them over the replicas.

        Raises:
            UserError: called inside a step.
        """
        refuse_in_body("model.no_sync()")  # the blocks of several bodies could end out of order
        previous_syncs, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = previous_syncs

    # --- partitioning

    @property
    def partitioned(self) -> bool:
        """True once the model is partitioned into stages."""
        return self.hybrid is not None

    def partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Partitions the model for the arguments of one call; a collective call."""
        runtime = current()
        example = Microbatch(inputs_of(self.net, args, kwargs))
        # parameters of other stages are replaced, but the optimizers still reference them
        of_model = set(map(id, self.net.parameters()))
        self.hybrid = partitioned_model(
            self.net, runtime, example, measures=self._measures, settings=self._settings
        )
        self.hybrid.train(self.training)
        for optimizer in runtime.optimizers:
            optimizer.take_own_parameters(self.hybrid, of_model)
        self.optimizer_step = OptimizerStep(
            self.hybrid, scaler=GradScaler(enabled=False), holds_all=False
        )
        for optimizer in runtime.optimizers:
            self.optimizer_step.add(optimizer, optimizer.loss_scaler)
        if runtime.resume is not None:
            runtime.resume()
            runtime.resume = None
        for hook in list(self._post_partition_hooks.values()):
            hook(self, runtime.optimizers[0] if runtime.optimizers else None)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, called after the partition and before any forward."""
        handle = RemovableHandle(self._post_partition_hooks)
        self._post_partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers `hook(model, optimizer)`, called once after the first step."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def run_post_step_hooks(self) -> None:
        """Calls the hooks for the end of the first step, and removes them."""
        while self._post_step_hooks:
            _, hook = self._post_step_hooks.popitem(last=False)
            hook(self, next(iter(current().optimizers), None))

    def partitioned_hybrid(self) -> HybridModel:
        """Returns the pipeline.

        Raises:
            UserError: no step has partitioned the model yet.
        """
        if self.hybrid is None:
            raise UserError(
                "the first step partitions the model, and has not run yet: use "
                "model.register_post_partition_hook, or check model.partitioned"
            )
        return self.hybrid

    def get_module(self) -> nn.Module:
        """Returns the module."""
        return self.net

    @property
    def module(self) -> Any:
        """The wrapped module; also as `model.module.module`, because smp has DDP in between."""
        return _InDDP(self.net)

    # --- parameters

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Returns the parameters; after the first step only those of this process's stages."""
        for _, parameter in self.named_parameters():
            yield parameter
            _refuse_clipping_by_own_norm(self)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Returns the same parameters as `parameters`, with their names in the module."""
        if self.hybrid is None:
            return self.net.named_parameters(*args, **kwargs)
        return self.hybrid.named_parameters()

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Returns the buffers; after the first step only those of this process's stages."""
        return (buffer for _, buffer in self.named_buffers())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Returns the same buffers as `buffers`, with their names in the module."""
        if self.hybrid is None:
            return self.net.named_buffers(*args, **kwargs)
        return self.hybrid.named_buffers()

    def local_parameters(self) -> Iterator[Parameter]:
        """Returns the parameters of this process's stages."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Returns the parameters of this process's stages, with their names."""
        return self.partitioned_hybrid().named_parameters()

    def local_buffers(self) -> Iterator[Tensor]:
        """Returns the buffers of this process's stages."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the buffers of this process's stages, with their names."""
        return self.partitioned_hybrid().named_buffers()

    def local_modules(self) -> Iterator[nn.Module]:
        """Returns the modules of this process's stages."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Returns the modules of this process's stages, with their names."""
        hybrid = self.partitioned_hybrid()
        modules_here = {id(m) for stage in hybrid.stages for m in stage.module.modules()}
        return ((name, m) for name, m in self.net.named_modules() if id(m) in modules_here)

    # --- tensor parallelism, with degree 1

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Returns an iterator over the tensor-parallel modules: there are none."""
        return iter(())

    def is_distributed_parameter(self, param: Parameter) -> bool:
        """Returns False: no parameter is sharded over tensor-parallel ranks."""
        return False

    def is_distributed_buffer(self, buf: Tensor) -> bool:
        """Returns False: no buffer is sharded over tensor-parallel ranks."""
        return False

    def is_scaled_batch_parameter(self, param: Parameter) -> bool:
        """Returns False: each parameter sees the batch of a single replica."""
        return False

    def is_scaled_batch_buffer(self, buf: Tensor) -> bool:
        """Returns False: each buffer sees the batch of a single replica."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Returns the parameters averaged over `DP_GROUP`: all parameters of this process."""
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Returns an iterator over the parameters averaged only over `RDP_GROUP`: none."""
        return iter(())

    # --- state

    @naming(NAMING)
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of the whole model; all processes of a pipeline must call it.

        Raises:
            UserError: called inside a step.
        """
        refuse_in_body("model.state_dict()")
        return self.net.state_dict() if self.hybrid is None else self.hybrid.state_dict()

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the state of this process's stages, marked as partial."""
        return {**self.partitioned_hybrid().pipeline.local_state_dict(), PARTIAL: True}

    @naming(NAMING)
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a state of the whole model, or the partial states of all pipeline processes.

        Args:
            state_dict: the state.
            strict: as in `torch.nn.Module.load_state_dict`.
            assign: must be False.
            same_partition_load: has no effect; partial states may come from another partition.

        Raises:
            ConfigError: `assign` is True.
            UserError: called inside a step.
        """
        refuse_in_body("model.load_state_dict()")
        if assign:
            raise ConfigError("load_state_dict(assign=True) is not supported: remove assign")
        target = self.net if self.hybrid is None else self.hybrid
        return target.load_state_dict(whole(state_dict), strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients.

        Raises:
            UserError: called inside a step.
        """
        refuse_in_body("model.zero_grad()", "before")
        self.net.zero_grad(set_to_none)

    @naming(NAMING)
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the L2 norm of the gradients of all stages to `max_norm`; returns the norm before.

        Not in smp 1.x. All processes of a pipeline must call it.

        Raises:
            UserError: called inside a step, or before the first one.
        """
        refuse_in_body("model.clip_grad_norm_()", "after")
        return self.partitioned_hybrid().clip_grad_norm_(max_norm)

    @naming(NAMING)
    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the gradients of all stages; all processes must call it.

        Raises:
            UserError: called inside a step, or before the first one.
        """
        refuse_in_body("model.grad_norm()", "after")
        return self.partitioned_hybrid().grad_norm()

    # --- as in any module

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets training mode.

        Raises:
            UserError: changed inside a step.
        """
        if mode != self.training:
            refuse_in_body(f"model.{'train' if mode else 'eval'}()", "before")
        self.training = mode
        (self.net if self.hybrid is None else self.hybrid).train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Changes the dtype before the first step; moves to another device have no effect.

        Raises:
            UserError: the dtype or the device would change after the first step.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if self.hybrid is None:
            if dtype is not None:
                self.net.to(dtype)
            return self
        local_devices = {stage.device for stage in self.hybrid.stages}
        stays = (
            device is None
            or device in local_devices
            or (device.type == "cuda" and device.index is None)
        )
        here = next(iter(local_devices)).type
        if dtype is not None or not stays or (device is not None and here != device.type):
            raise UserError(
                f"the model cannot be moved or converted after it is partitioned: {_MOVES}. "
                f"model.state_dict() returns the whole model, on the CPU with several processes"
            )
        return self

    def cuda(self, device: Any = None) -> DistributedModel:
        """Has no effect: the library puts each stage on its device."""
        return self

    def cpu(self) -> DistributedModel:
        """Has no effect before the first step.

        Raises:
            UserError: the stages are already on GPUs.
        """
        return self if self.hybrid is None else self.to("cpu")

    def half(self) -> DistributedModel:
        """Converts to fp16, before the first step."""
        return self.to(torch.float16)

    def bfloat16(self) -> DistributedModel:
        """Converts to bf16, before the first step."""
        return self.to(torch.bfloat16)

    def float(self) -> DistributedModel:
        """Converts to fp32, before the first step."""
        return self.to(torch.float32)

    def double(self) -> DistributedModel:
        """Converts to fp64, before the first step."""
        return self.to(torch.float64)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # DistributedDataParallel reads it on construction
        raise ConfigError(
            "do not wrap a smp.DistributedModel in DistributedDataParallel: it averages over the "
            "replicas itself"
        )

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a ConfigError: replicas need the same number of batches."""
        raise ConfigError(
            "DistributedModel.join is not supported: give every replica the same number of "
            "batches, with drop_last=True"
        )

    def register_comm_hook(self, state: Any, callable: Any) -> NoReturn:
        """Raises a ConfigError: each stage has a separate DDP."""
        raise ConfigError("DistributedModel.register_comm_hook is not supported")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a smp.DistributedModel cannot be pickled: save model.state_dict()")


class _InDDP:
    """Behaves as `module`, and has it as its attribute `module`."""

    def __init__(self, module: nn.Module) -> None:
        object.__setattr__(self, "module", module)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self.module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.module)


def _refuse_clipping_by_own_norm(model: DistributedModel) -> None:
    """Refuses `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` on part of a model."""
    frame = sys._getframe(2)  # the caller that reads a parameter from the generator
    if frame.f_globals.get("__name__") != "torch.nn.utils.clip_grad":
        return
    refuse_in_body("torch.nn.utils.clip_grad_norm_()", "after")
    if model.hybrid is not None and model.hybrid.world.pipeline_group is not None:
        raise UserError(
            "torch.nn.utils.clip_grad_norm_ sees only the parameters of this process's stages, and "
            "would clip by a different norm in each process: call model.clip_grad_norm_(max_norm)"
        )
