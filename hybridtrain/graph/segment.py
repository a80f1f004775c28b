"""A segment of a traced graph as a layer.

It takes the main value from the layer before it, and pops the others that it needs by their names,
which earlier segments have stashed (see `hybridtrain.skip`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.segment_graph import SegmentGraph
from hybridtrain.skip import pop, stash, take


class Segment(nn.Module):
    """Consecutive nodes of a traced graph, in training and in evaluation mode.

    Its submodules and parameters are the objects of the user's model.

    Args:
        training: its graph in training mode.
        evaluation: its graph in evaluation mode; the same object where there is no difference.
        root: the traced module, whose mode decides between the two.
        owners: the buffers that graphs read directly: the user's module that holds each, and its
            name there.
        signature: for the first segment of a model, the arguments that a batch's inputs are.
    """

    def __init__(
        self,
        training: SegmentGraph,
        evaluation: SegmentGraph,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        signature: CallSignature | None = None,
    ) -> None:
        super().__init__()
        self.training_graph = training.module
        if evaluation is not training:
            self.evaluation_graph = evaluation.module
        self.stashes = tuple(dict.fromkeys([*training.outputs, *evaluation.outputs]))
        self.pops = tuple(dict.fromkeys([*training.inputs, *evaluation.inputs]))
        self.inplace = training.in_place or evaluation.in_place
        self.signature = signature
        self._graph_of_mode = {True: training, False: evaluation}
        self._graphs = [training] if evaluation is training else [training, evaluation]
        self._root = (root,)  # in a tuple, to keep it from becoming a submodule
        self._owners = owners
        self.uses_compiled = True  # the compiled graphs, if there are any

    def forward(self, value: Any) -> Any:
        """Returns the main value of this segment from that of the one before."""
        graph = self._graph_of_mode[self._root[0].training]
        if self.signature is not None:
            arguments = self.signature.graph_inputs(value)
        else:
            arguments = [value] if graph.takes_main else []
            for name in graph.inputs:
                arguments.append(take(name) if name in graph.last_uses else pop(name))
        # not the module's own call, which would print its code when a layer in it raises
        run = graph.module.forward
        if graph.compiled is not None and self.uses_compiled:
            run = graph.compiled
        main, *others = run(*arguments)
        for name, other in zip(graph.outputs, others, strict=True):
            stash(name, other)
        for name in self.stashes:
            if name not in graph.outputs:
                stash(name, None)
        return main if graph.output_spec is None else tree_unflatten(main, graph.output_spec)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the graphs; the code around them only passes values on."""
        for graph in self._graphs:
            graph.compiled = torch.compile(graph.module, *args, **kwargs)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the buffers that this segment has copies of, as pairs (the user's, the copy).

        A buffer is copied if another stage has taken the user's to another device.
        """
        held = self._held()
        pairs = [(getattr(owner, name), getattr(module, own)) for module, own, owner, name in held]
        return [(buffer, copy) for buffer, copy in pairs if buffer is not copy]

    def surroundings(self) -> dict[int, Any]:
        """Returns what a copy of this segment alone does not copy, as a memo of `copy.deepcopy`.

        That is the user's model, whose mode decides for the copy too, and whose buffers are not
        those of the copy.
        """
        return {id(self._root): self._root, id(self._owners): {}}

    def _held(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """Returns the buffers of the user's modules that graphs use: holder, name, owner, name."""
        return [
            (graph.module, held, *self._owners[target])
            for graph in self._graphs
            for target, held in graph.attrs.items()
            if target in self._owners
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Segment:
        """Moves the segment, and with it the buffers that it shares with the user's modules."""
        super()._apply(fn, recurse)
        moved: dict[tuple[int, str], Tensor] = {}
        for holder, held, owner, name in self._held():
            buffer = moved.setdefault((id(owner), name), getattr(holder, held))
            setattr(holder, held, buffer)
            setattr(owner, name, buffer)
        tensors = (*self.parameters(), *self.buffers())
        device = tensors[0].device if tensors else fn(torch.empty(0)).device
        for graph in self._graphs:
            graph.put_constants_on(device)
        return self


class SingleLayer(nn.Module):
    """A model as one layer, which is called with a batch's inputs as its forward takes them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Any) -> Any:
        """Returns the model's output."""
        signature, values = CallSignature.of_inputs(self.module, value)
        args, kwargs = signature.split(values)
        return self.module(*args, **kwargs)
