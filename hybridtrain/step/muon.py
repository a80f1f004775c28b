"""Muon for the weight matrices of a model, and AdamW for its other parameters.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon; `torch.optim.Muon` takes matrices only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter
from torch.optim import AdamW, Muon

from hybridtrain._base.output_layer import output_embeddings
from hybridtrain.errors import ConfigError
from hybridtrain.model import HybridModel
from hybridtrain.step.param_groups import CombinedOptimizer, fits, parameter_groups

_log = logging.getLogger(__name__)


class MuonAdamW(CombinedOptimizer):
    """Updates matrices with `torch.optim.Muon`, and all other parameters with `AdamW`.

        optimizer = MuonAdamW(muon_groups(model), lr=1e-3)

    Args:
        params: groups, of which those with `use_muon=True` go to Muon, as `muon_groups` returns
            them; or parameters, where all with two dimensions go to Muon, embeddings too. A group's
            own settings count as in other optimizers; its `lr` is Muon's.
        lr: the learning rate of Muon, and of AdamW unless `adamw_lr` is given.
        weight_decay: the weight decay of both.
        momentum: the momentum of Muon. This and the next three: see `torch.optim.Muon`.
        nesterov: use Nesterov momentum.
        ns_steps: the number of Newton-Schulz iterations.
        adjust_lr_fn: how Muon scales `lr` by the shape of a matrix. `match_rms_adamw` makes its
            updates as large as AdamW's, so that both can share `lr`; with `original`, set
            `adamw_lr`.
        adamw_lr: the learning rate of AdamW where Muon's is `lr`.
        betas: the betas of AdamW. This and the next two: see `torch.optim.AdamW`.
        eps: added to the denominator of AdamW.
        fused: use the fused kernel of AdamW; Muon has none.

    Raises:
        ValueError: a value is out of range, or a group with `use_muon=True` has a parameter that
            is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        fused: bool | None = None,
    ) -> None:
        items: list[Any] = list(params)
        groups = [item for item in items if isinstance(item, Mapping)] or [{"params": items}]
        matrices: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for group in groups:
            by_muon, by_adamw = _divided(group)
            if by_muon:
                matrices.append({**group, "params": by_muon, "use_muon": True})
            if by_adamw:
                rate = group.get("lr", lr)
                if adamw_lr is not None:
                    rate = adamw_lr if rate == lr else rate * adamw_lr / lr
                others.append({**group, "params": by_adamw, "use_muon": False, "lr": rate})
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(
                Muon(
                    matrices,
                    lr=lr,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    nesterov=nesterov,
                    ns_steps=ns_steps,
                    adjust_lr_fn=adjust_lr_fn,
                )
            )
        if others:
            optimizers.append(
                AdamW(others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
            )
        super().__init__(optimizers)


def _divided(group: Mapping[str, Any]) -> tuple[list[Parameter], list[Parameter]]:
    """Returns the parameters of a group for Muon, and those for AdamW."""
    parameters = list(group["params"])
    if "use_muon" not in group:
        return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    if not group["use_muon"]:
        return [], parameters
    # the placeholder of a group that is empty in this process becomes an empty matrix
    return [p if p.numel() else Parameter(torch.empty(0, 0)) for p in parameters], []


def muon_groups(
    model: HybridModel,
    rules: Sequence[Mapping[str, Any]] = (),
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Returns the parameters of `model` in groups for `MuonAdamW`, and logs how many went where.

    The groups are those of `parameter_groups`, each divided into matrices and others.

    Args:
        model: the model. `parameter_groups` takes the same arguments.
        rules: settings by name patterns; `use_muon` decides for the parameters of a rule.
        lr: the learning rate that `layer_decay` starts from.
        layer_decay: the factor of the learning rate from each block to the previous one.

    Raises:
        ConfigError: the model has no matrix for Muon, or a rule is wrong, as in
            `parameter_groups`.
    """
    trained = {name: p for name, p in model.net.named_parameters() if p.requires_grad}
    chosen = set(matrices_of(model.net))
    for name in trained:
        rule = next((rule for rule in rules if fits(name, rule.get("match", ()))), {})
        if "use_muon" in rule:
            (chosen.add if rule["use_muon"] else chosen.discard)(name)
    matrices = [name for name in trained if name in chosen]
    if not matrices:
        raise ConfigError(
            f"Muon updates weight matrices between the embeddings and the last linear layer, and "
            f"{type(model.net).__name__} trains none: use AdamW (optim=adamw)"
        )
    if model.world.is_main:
        elements = sum(trained[name].numel() for name in matrices)
        _log.info(
            "Muon updates %d of %d weights (%s of %s parameters), AdamW the others",
            len(matrices),
            len(trained),
            f"{elements:,}",
            f"{sum(p.numel() for p in trained.values()):,}",
        )
    return parameter_groups(model, rules, lr=lr, layer_decay=layer_decay, matrices=matrices)


def matrices_of(net: nn.Module) -> list[str]:
    """Returns the names of the trained weights that Muon updates.

    They are the parameters with two dimensions, except for those of `nn.Embedding` and with `embed`
    in their names, and of the head: the model's `get_output_embeddings()`, or its last `nn.Linear`.
    """
    modules = list(net.modules())
    apart: list[nn.Module] = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    head = output_embeddings(net)
    apart += linears[-1:] if head is None else [head]
    left_out = {id(parameter) for module in apart for parameter in module.parameters()}
    return [
        name
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and id(parameter) not in left_out
        and "embed" not in name.lower()
    ]
