"""The actions of a schedule over processes, in a loop with nothing around them.

Shows what any engine would need at least. The loop runs the stages of `emulated_devices`, sends
their values and gradients, one tensor per message, and starts receives where `engine=distributed`
does. Nothing is checked, seeded, recorded or reduced, losses are not weighted, and processes do not
compare their batches.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hybridtrain.pipeline.message_wire import RECEIVES_AHEAD, order_of
from hybridtrain.schedule import Action, Schedule
from scripts.bench.common import mean_loss
from scripts.bench.emulated_devices import WIDTH, Emulated, edge_to_weight

_Place = tuple[int, int]  # a stage and a micro-batch


class BareLoop:
    """A process's part of the steps of a schedule.

    Args:
        schedule: its device i is process i of `group`.
        stages: this process's, by their index.
        x: the inputs, one row per micro-batch.
        group: the processes.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Emulated],
        x: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._x = x
        self._group = group
        self._last = schedule.stages - 1
        self._order = order_of(schedule, group.rank())
        self._receives = [action for is_own, action in self._order if not is_own]
        self._divided = {action[1:] for _, action in self._order if action.kind == "I"}
        self._begun = 0  # the number of receives that the step has started
        self._coming: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Action, Tensor] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []
        self._inputs: dict[_Place, Tensor] = {}
        self._roots: dict[_Place, Tensor] = {}
        self._edges: dict[_Place, GradientEdge] = {}
        self._to_weights: dict[_Place, tuple[GradientEdge, Tensor]] = {}

    def step(self) -> None:
        """Runs the actions of one step."""
        self._begun = due = 0
        for is_own, action in self._order:
            if not is_own:
                due += 1
                self._begin_receives(due)
            elif action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                edge, gradient = self._to_weights.pop(action[1:])
                torch.autograd.backward(edge, gradient)
            else:
                self._backward(action)
        for _, work in self._sent:
            work.wait()
        self._sent.clear()

    def _forward(self, action: Action) -> None:
        _, index, microbatch = action
        place = index, microbatch
        if index == 0:
            value = self._x[microbatch : microbatch + 1]
        else:
            value = self._receive(action).requires_grad_()
        output = self._stages[index](value)
        self._inputs[place] = value
        if place in self._divided:
            self._edges[place] = edge_to_weight(output)
        if index == self._last:
            self._roots[place] = mean_loss(output, None) / self._schedule.chunks
        else:
            self._roots[place] = output
            self._send(Action("F", index + 1, microbatch), output.detach())

    def _backward(self, action: Action) -> None:
        kind, index, microbatch = action
        place = index, microbatch
        root, value = self._roots.pop(place), self._inputs.pop(place)
        to = Action("B", index, microbatch)
        gradient = None if index == self._last else self._receive(to)
        if kind == "B":
            torch.autograd.backward(root, gradient)
            result = value.grad if index else None
        else:
            edge = self._edges.pop(place)
            result, of_edge = torch.autograd.grad(root, (value, edge), gradient, retain_graph=True)
            self._to_weights[place] = edge, of_edge
        if index:
            assert result is not None
            self._send(to._replace(stage=index - 1), result)

    def _send(self, to: Action, value: Tensor) -> None:
        if to.stage in self._stages:
            self._here[to] = value
        else:
            peer = self._schedule.lane_of[to.stage]
            self._sent.append((value, self._group.send([value], peer, 0)))

    def _begin_receives(self, count: int) -> None:
        while self._begun < count:
            action = self._receives[self._begun]
            self._begun += 1
            sender = action.stage - 1 if action.kind == "F" else action.stage + 1
            value = torch.empty(1, WIDTH)
            work = self._group.recv([value], self._schedule.lane_of[sender], 0)
            self._coming[action] = value, work

    def _receive(self, action: Action) -> Tensor:
        if action in self._here:
            return self._here.pop(action)
        while len(self._coming) < RECEIVES_AHEAD and self._begun < len(self._receives):
            self._begin_receives(self._begun + 1)
        value, work = self._coming.pop(action)
        work.wait()
        return value
