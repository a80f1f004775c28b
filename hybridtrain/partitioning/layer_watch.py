"""Where the layers of a model begin in a run of its forward and its backward.

    forward    before | 0 ... | 1 ... | 2 ... loss        hooks of the layers' modules
    backward          loss ... 2 | ... 1 | ... 0          hooks of nodes of the autograd graph

Code between two layers belongs to the layer before it, and code before the first layer to the
first. In the backward, a node of the graph belongs to the layer that made it, which is known from
its sequence number. PyTorch runs the nodes of a device in falling order of these numbers, so a
layer's backward begins with the node that has its highest number.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hybridtrain._base.module_call import watch_calls
from hybridtrain._base.skip import skip_scope
from hybridtrain._base.torch_private import next_node_number, number_of_node
from hybridtrain._base.values import structure_copy
from hybridtrain.errors import ConfigError
from hybridtrain.graph import Layer, arguments_of
from hybridtrain.head import head_of, hidden_states, install, lazily
from hybridtrain.partitioning.costs import CalledLayers, copy_of, tensors_of
from hybridtrain.partitioning.piped_layers import PipedLayers


class Observer(Protocol):
    """What a run tells: which layer runs from now on."""

    def forward_begins(self, layer: int) -> None:
        """The forward of a layer begins; after the last layer, the loss begins."""

    def forward_ends(self, output: Any) -> None:
        """The forward is over, and the loss; the model has returned `output`."""

    def backward_begins(self, layer: int) -> None:
        """The backward of a layer begins."""


class LayerWatch:
    """A copy of a model, whose runs tell when layers begin.

    Args:
        layers: the layers: calls of submodules in a model's forward, or a chain that runs them one
            after another.
        replacement: returns the copy's tensor for a tensor of the model or of the loss.
        loss: a loss that follows as a further layer. Its module may have an attribute `head`: how
            the head and the loss are computed.

    Attributes:
        parts: the copies of the model and of the loss.
        modules: the module of each layer in the copy.
        names: the name of each layer.
        layer: the layer that runs, or ran last.

    Raises:
        ConfigError: a module cannot be copied.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        replacement: Callable[[Tensor], Tensor],
        loss: Layer | None = None,
    ) -> None:
        net = model_of(layers)
        names = {id(module): name for name, module in net.named_modules()}
        copies = [_copy(net, layers, replacement)]
        self.modules = [copies[0].get_submodule(names[id(layer.module)]) for layer in layers]
        self.names = [layer.name for layer in layers]
        if loss is not None:
            install(copies[0], head_of(net, getattr(loss.module, "head", "plain")).names)
            copies.append(copy_of(loss, replacement))
            self.names.append(loss.name)
        self.parts = nn.ModuleList(copies)
        self.layer = 0
        # as in a step, in which DDP's buckets hold the gradients
        for parameter in self.parts.parameters():
            if parameter.is_leaf and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_free_gradient)

    def run(
        self,
        inputs: Any,
        precision: Callable[[], AbstractContextManager[object]],
        observer: Observer,
    ) -> None:
        """Runs a forward and a backward; leaves no gradients.

        Without a loss, the backward begins at the model's outputs.

        Args:
            inputs: the inputs of a micro-batch.
            precision: returns the context of the forward.
            observer: hears of each layer that begins.
        """
        net, *loss = self.parts
        # numbers of nodes and the layers that began there
        starts = _Starts()

        def begin(layer: int) -> None:
            self.layer = layer
            starts.add(layer)
            observer.forward_begins(layer)

        begin(0)
        with precision(), skip_scope({}), lazily():
            with self._told(begin):
                returned = output = _call(net, inputs)
            if loss:
                begin(len(self.modules))
                output = loss[0](returned)
        observer.forward_ends(hidden_states(returned))
        roots = [tensor for tensor in _outputs(output) if tensor.requires_grad]
        if not roots:
            return
        end = next_node_number()
        for layer, node in starts.first_backwards(roots, end).items():
            node.register_prehook(partial(self._backward_begins, observer, layer))
        del output, returned
        # not autograd.grad, in which a reentrant checkpoint could not run
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for tensor in tensors_of(inputs):
            tensor.grad = None

    def _backward_begins(self, observer: Observer, layer: int, gradients: object) -> None:
        self.layer = layer
        observer.backward_begins(layer)

    @contextmanager
    def _told(self, begin: Callable[[int], None]) -> Iterator[None]:
        """Calls `begin` for each layer that begins in the block.

        The layers are expected in their order. A call inside a layer is a part of it, and layers
        that a forward leaves out are passed over.
        """
        running: list[nn.Module] = []
        following = 0

        def on_begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal following
            # no stage can begin inside vmap or grad
            if running or torch._C._functorch.maybe_current_level() is not None:
                return
            for layer in range(following, len(self.modules)):
                if self.modules[layer] is module:
                    following = layer + 1
                    running.append(module)
                    if layer:
                        begin(layer)
                    return

        def on_end(module: nn.Module, args: Any, output: Any) -> None:
            if running and running[0] is module:
                running.clear()

        with ExitStack() as ends:
            for module in dict.fromkeys(self.modules):
                ends.callback(watch_calls(module, on_begin, on_end))
            yield


class _Starts:
    """The numbers of autograd nodes at which layers begin."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._layers: list[int] = []

    def add(self, layer: int) -> None:
        """Nodes that are made from now on belong to `layer`."""
        self._numbers.append(next_node_number())
        self._layers.append(layer)

    def first_backwards(self, roots: Sequence[Tensor], end: int) -> dict[int, Node]:
        """Returns the node with which the backward of each layer begins, if it has one.

        Args:
            roots: the tensors at which the backward begins.
            end: the number of the next node, which is not part of the forward.
        """
        first: dict[int, tuple[int, Node]] = {}
        waiting = [root.grad_fn for root in roots]
        seen = set(waiting)
        for node in waiting:
            if node is None:
                continue
            number = number_of_node(node)
            if number < end:  # the node that accumulates a leaf's gradient has none
                layer = self._layers[max(0, bisect(self._numbers, number) - 1)]
                if layer not in first or first[layer][0] < number:
                    first[layer] = number, node
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return {layer: node for layer, (_, node) in first.items()}


def model_of(layers: Sequence[Layer]) -> nn.Module:
    """Returns the model of these layers."""
    return layers.net if isinstance(layers, CalledLayers) else PipedLayers(layers)


def weights_of(layers: Sequence[Layer]) -> list[Tensor]:
    """Returns the parameters and buffers of the model of these layers."""
    net = model_of(layers)
    return [*net.parameters(), *net.buffers()]


def _copy(
    net: nn.Module, layers: Sequence[Layer], replacement: Callable[[Tensor], Tensor]
) -> nn.Module:
    try:
        return copy_of(Layer("", net), replacement)
    except ConfigError:
        for layer in layers:  # for an error that names the layer
            copy_of(layer, replacement)
        raise


def _call(net: nn.Module, inputs: Any) -> Any:
    if isinstance(net, PipedLayers):
        return net(inputs)
    args, kwargs = arguments_of(net, inputs)
    return net(*args, **kwargs)


def _outputs(output: Any) -> list[Tensor]:
    """Returns the tensors of an output, which may be an object with attributes."""
    tensors = tensors_of(output)
    if not tensors:

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        structure_copy(output, note)
    return tensors


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
