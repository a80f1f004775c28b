"""The loss of a pipelined model without its logits, which its caller may ask for all the same."""

import pytest
import torch
from support.cases import installed
from support.hf import Texts, llama, padded
from torch.nn import functional as F

from hybridtrain import pipelined
from hybridtrain.errors import UserError
from hybridtrain.head import LazyLogits

installed("transformers")

pytestmark = pytest.mark.usefixtures("seeded")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def batch():
    return padded([Texts()[i] for i in range(6)])


def fused():
    return pipelined(llama(), nb_part=2, chunks=3, head="fused")


def gradients(model, loss_of):
    model.zero_grad()
    loss = loss_of(model(**batch()))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


LOSSES = {
    "the model's": lambda output: output.loss,
    "another one": lambda output: F.cross_entropy(
        output.logits.flatten(0, 1).float(), batch()["labels"].flatten(), label_smoothing=0.1
    ),
    "both": lambda output: output.loss + output.logits.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_gets_the_gradients_of_the_plain_model_in_each_step(name):
    expected = gradients(llama(), LOSSES[name])
    model = fused()
    for _ in range(2):
        torch.testing.assert_close(gradients(model, LOSSES[name]), expected, **CLOSE)


def test_logits_are_made_when_they_are_asked_for_also_after_the_backward():
    expected = llama()(**batch()).logits
    model = fused()
    for _ in range(2):
        output = model(**batch())
        output.loss.backward()
        assert isinstance(output.logits, LazyLogits)
        assert output.logits.origin.value is None
        assert output.logits.requires_grad
        torch.testing.assert_close(output.logits + 0, expected, **CLOSE)
    model.eval()
    with torch.no_grad():
        output = model(**batch(), use_cache=False)
        assert torch.equal(output.logits.float().argmax(-1), expected.argmax(-1))
        assert output.logits.origin.value is None
        torch.testing.assert_close(output.logits + 0, expected, **CLOSE)


def test_logits_that_are_asked_for_after_the_weights_have_changed_are_an_error():
    model = fused()
    output = model(**batch())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UserError, match=r"before optimizer.step.*head=plain"):
        output.logits.sum()


def test_lazy_logits_hold_no_activations():
    model = fused()
    output = model(**batch())
    nodes = [output.logits.recipe.terms[0].hidden.grad_fn, output.logits.recipe.terms[0].weight]
    assert nodes[0] is None
    assert not nodes[1].requires_grad
    assert all(tensor.grad_fn is None for tensor, _ in output.logits.recipe.versions)
