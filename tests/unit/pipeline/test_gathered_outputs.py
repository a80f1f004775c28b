"""What models of transformers gather from their layers by hooks: router logits, hidden states."""

import copy

import pytest
import torch
from support.hf import VOCABULARY, causal_lm
from support.in_stages import hybrid
from torch import nn

IDS = torch.arange(1, 71).reshape(7, 10) * 13 % VOCABULARY


pytestmark = pytest.mark.usefixtures("seeded")


def batch():
    mask = torch.ones_like(IDS)
    mask[:, 8:] = 0
    return {"input_ids": IDS, "attention_mask": mask, "labels": IDS}


EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def mixtral(**settings) -> nn.Module:
    return causal_lm("Mixtral", num_hidden_layers=2, use_cache=False, **EXPERTS, **settings)


def llama() -> nn.Module:
    return causal_lm("Llama", num_hidden_layers=2, use_cache=False, output_hidden_states=True)


def router_loss(output, _=None):
    return output.loss + output.aux_loss


def with_hidden_states(output, _=None):
    return output.loss + sum(state.tanh().mean() for state in output.hidden_states)


@pytest.mark.parametrize(
    ("make", "loss"),
    [(mixtral, router_loss), (llama, with_hidden_states)],
    ids=["router", "states"],
)
@pytest.mark.thorough
def test_what_layers_return_is_gathered_as_in_the_plain_model(make, loss):
    net = make()
    whole = copy.deepcopy(net)
    model = hybrid(net, 2, example_inputs=batch())
    model.train_step(batch(), None, loss)
    for part in torch.arange(7).tensor_split(3):
        output = whole(**{name: value[part] for name, value in batch().items()})
        loss(output).backward(torch.tensor(len(part) / 7))
    for (name, ours), theirs in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
