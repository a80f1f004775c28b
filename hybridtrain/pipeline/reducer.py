"""One stage's part in data parallelism: DistributedDataParallel, told when to reduce.

Each stage has its own DDP on its own process group, so that the stages' threads never wait for
one another inside a collective. DDP itself wants one forward, then one backward. Here a step has
many of both, in the order of the schedule, and the gradients must travel once, from the last
micro-batch's backward on. So the layers are called without DDP, and DDP's reducer is armed right
before that backward, as PyTorch's own `torch.distributed.pipelining.stage` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter

from hybridtrain.errors import UserError


class StageReducer:
    """Averages the gradients of `module` over the replicas; rank 0's values start everywhere.

    `names` are its parameters under the user's names.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[str, Parameter],
        group: dist.ProcessGroup,
        find_unused_parameters: bool = False,
    ) -> None:
        own = {id(parameter) for parameter in names.values()}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            module,
            [
                name
                for name, parameter in module.named_parameters(remove_duplicate=False)
                if id(parameter) not in own  # lives in an earlier stage; here it has an alias
            ],
        )
        self._names = names
        self._ddp = DistributedDataParallel(
            module,
            process_group=group,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        self.find_unused = find_unused_parameters

    def sync_buffers(self) -> None:
        """Copies rank 0's buffers (running statistics) to all replicas; a collective."""
        if self._ddp.modules_buffers:
            self._ddp._sync_buffers()

    def arm(self, roots: Sequence[Any]) -> None:
        """Has the next backward, which starts at `roots`, reduce the gradients as they come."""
        # after the first reduction, DDP orders its buckets as the gradients came
        self._ddp.reducer._rebuild_buckets()
        self._ddp.reducer.prepare_for_backward(list(roots) if self.find_unused else [])

    def disarm(self) -> None:
        """Forgets an armed backward that failed, so that the next step can begin."""
        self._ddp.reducer._reset_state()

    def check_reduced(self) -> None:
        """Makes sure that the armed backward has reduced every gradient.

        Raises:
            UserError: a parameter got no gradient; names those that have none.
        """
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError as error:
            without = [
                name
                for name, parameter in self._names.items()
                if parameter.requires_grad and parameter.grad is None
            ]
            raise UserError(
                f"no gradient was computed for {', '.join(without) or 'some parameters'}, so the "
                f"replicas cannot average it: remove the unused parameters, freeze them, or set "
                f"world.find_unused_parameters=true"
            ) from error


class FrozenStageReducer:
    """The part of a stage that trains nothing: its buffers may still move."""

    find_unused = False

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group
        self._broadcast([*module.parameters(), *module.buffers()])

    def sync_buffers(self) -> None:
        """See `StageReducer.sync_buffers`."""
        self._broadcast(list(self._module.buffers()))

    def arm(self, roots: Sequence[Any]) -> None:
        """Nothing is reduced."""

    def disarm(self) -> None:
        """Nothing is reduced."""

    def check_reduced(self) -> None:
        """Nothing is reduced."""

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, group=self._group, group_src=0)


def replicate(
    module: nn.Module,
    names: Mapping[str, Parameter],
    group: dist.ProcessGroup | None,
    **options: Any,
) -> StageReducer | FrozenStageReducer | None:
    """What keeps `module` equal over the replicas, or None where there is only one."""
    if group is None:
        return None
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            part.process_group = group  # its stage's own, so that no other thread uses it
    if any(parameter.requires_grad for parameter in names.values()):
        return StageReducer(module, names, group, **options)
    return FrozenStageReducer(module, group)
