"""The loss of a language model without its logits: the same bits in every layout."""

import logging

import pytest
import torch
from support.compare import hybrid
from support.hf import VOCABULARY, causal_lm, gpt2, llama
from torch import nn
from torch.nn import functional as F

from hybridtrain.errors import ConfigError
from hybridtrain.head import LazyLogits, chunked_loss
from hybridtrain.loss import Accuracy, cross_entropy, model_output

pytestmark = pytest.mark.usefixtures("seeded")

# Relative to the largest entry of a gradient.
CLOSE = 5e-6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**8)


def of_two_layers(name, **settings):
    return causal_lm(name, num_hidden_layers=2, use_cache=False, **settings)


def with_lora(name, **settings):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["v_proj", "lm_head"], lora_dropout=0.0)
    net = get_peft_model(of_two_layers(name, **settings), config)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return net


MODELS = {
    "llama": lambda: of_two_layers("Llama"),
    "tied": lambda: of_two_layers("Llama", tie_word_embeddings=True),
    "soft-capped": lambda: of_two_layers("Gemma2", head_dim=8),
    "divided": lambda: of_two_layers("Granite", logits_scaling=3.0),
    "multiplied": lambda: of_two_layers("Cohere"),
    "gpt2": gpt2,
    "lora": lambda: with_lora("Llama"),
    "soft-capped, lora": lambda: with_lora("Gemma2", head_dim=8),
    "divided, lora": lambda: with_lora("Granite", logits_scaling=3.0),
    "multiplied, lora": lambda: with_lora("Cohere"),
}

LAYOUTS = [
    *({"nb_part": 1}, {"nb_part": 2}, {"nb_part": 2, "schedule": "zb-h1"}),
    {"nb_part": 2, "recompute": "always", "schedule": "gpipe"},
]


def texts():
    tokens = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def without_targets():
    """A batch whose second micro-batch has none."""
    batch = texts()
    batch["labels"][2:] = -100
    return batch


def of_one_target():
    """A batch of short sequences with one target each."""
    batch = {name: value[:, -3:].clone() for name, value in texts().items()}
    batch["labels"][:, :2] = -100
    return batch


def trained(make, head, batch=texts, **options):
    """The loss and gradients of a step, and the outputs of the head."""
    torch.manual_seed(0)
    net = make()
    heads, outputs = [m for m in net.modules() if isinstance(m, nn.Linear)], []
    options = {"chunks": 2, "self_check": False, **options}
    model = hybrid(net, head=head, **options)
    for linear in heads:
        if linear.out_features == VOCABULARY:
            linear.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = model.train_step(batch(), None, model_output).loss
    gradients = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss, **gradients}, outputs


def difference(ours, plain):
    sizes = [
        ((ours[name] - value).abs().max() / value.abs().max()).item()
        for name, value in plain.items()
        if value.any()
    ]
    assert ours.keys() == plain.keys()
    return max(sizes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick_cases("tied", "soft-capped, lora")
def test_a_step_without_logits_is_bitwise_the_same_in_every_layout_and_close_to_plain(name):
    plain, _ = trained(MODELS[name], "plain", nb_part=1)
    first, outputs = trained(MODELS[name], "fused", **LAYOUTS[0])
    assert difference(first, plain) < CLOSE
    # of each micro-batch and linear layer; the first step also compares the loss in evaluations
    assert sum(output.requires_grad for output in outputs) == (4 if "lora" in name else 2)
    for output in outputs:
        assert isinstance(output, LazyLogits)
        assert output.origin.value is None
    for layout in LAYOUTS[1:]:
        ours, outputs = trained(MODELS[name], "fused", **layout)
        assert {k: torch.equal(v, first[k]) for k, v in ours.items()} == dict.fromkeys(first, True)
        assert all(output.origin.value is None for output in outputs)


@pytest.mark.parametrize("batch", [without_targets, of_one_target])
def test_a_batch_with_few_targets_is_the_same_in_every_layout_and_close_to_plain(batch):
    plain, _ = trained(MODELS["llama"], "plain", batch, nb_part=1)
    first, _ = trained(MODELS["llama"], "fused", batch, nb_part=1)
    assert difference(first, plain) < CLOSE
    ours, outputs = trained(MODELS["llama"], "fused", batch, nb_part=2, schedule="zb-h1")
    assert all(map(torch.equal, ours.values(), first.values()))
    assert all(output.origin.value is None for output in outputs)


def test_under_autocast_a_step_without_logits_is_the_same_in_every_layout():
    first, _ = trained(MODELS["llama"], "fused", nb_part=1, precision="bf16")
    exact, _ = trained(MODELS["llama"], "plain", nb_part=1)
    plain, _ = trained(MODELS["llama"], "plain", nb_part=1, precision="bf16")
    assert difference(first, exact) < 1.5 * difference(plain, exact)
    ours, outputs = trained(MODELS["llama"], "fused", nb_part=2, precision="bf16", schedule="zb-h1")
    assert all(map(torch.equal, ours.values(), first.values()))
    assert all(output.origin.value is None for output in outputs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_self_check_and_a_verification_accept_a_loss_without_logits(schedule):
    torch.manual_seed(0)
    model = hybrid(llama(use_cache=False), 2, chunks=2, schedule=schedule, head="fused")
    model.train_step(texts(), None, model_output)
    found = model.verify(texts(), None, model_output, times=1)
    assert found.exact, found
    assert not found.bitwise
    assert "computes the loss in chunks" in str(found)


def sequential():
    return nn.Sequential(
        *(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 40))
    )


LOSSES = {
    "by name": cross_entropy,
    "a module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "a function": lambda output, targets: F.cross_entropy(output, targets),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_after_a_sequential_needs_no_logits(name):
    x, y = torch.randn(8, 6), torch.randint(40, (8,))
    results = []
    for head, nb_part in (("plain", 1), ("fused", 1), ("fused", 3)):
        torch.manual_seed(0)
        net = sequential()
        model = hybrid(net, nb_part, head=head)
        model.train_step(x, y, LOSSES[name])  # its first step compares the loss with its count
        net.zero_grad()
        outputs = []
        net[-1].register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[-1]))
        loss = model.train_step(x, y, LOSSES[name]).loss
        results.append({"loss": loss, **{n: p.grad for n, p in net.named_parameters()}})
        assert all(
            isinstance(o, LazyLogits) == (head == "fused") and
            (head == "plain" or o.origin.value is None) for o in outputs
        )  # fmt: skip
    assert difference(results[1], results[0]) < CLOSE
    assert all(map(torch.equal, results[1].values(), results[2].values()))


def test_an_evaluation_without_logits_has_the_same_loss_outputs_and_metrics():
    torch.manual_seed(0)
    net = llama(use_cache=False)
    batch, metric = texts(), Accuracy()
    model = hybrid(net, 2, chunks=2, head="fused").eval()
    plain = net.eval()(**batch)
    output = model(batch)
    assert type(output.logits) is torch.Tensor
    assert torch.equal(output.logits, plain.logits)

    def measured(output, targets):
        assert isinstance(output.logits, LazyLogits)
        metric.update(output, targets)
        assert output.logits.origin.value is None
        return output.loss

    model.map_outputs(batch, batch["labels"], measured)
    expected = Accuracy()
    expected.update(plain.logits, batch["labels"])
    assert metric.compute() == expected.compute()


def test_a_micro_batch_without_targets_makes_no_logits():
    torch.manual_seed(0)
    model = hybrid(sequential(), 2, chunks=2, head="fused", self_check=False)
    x, y = torch.randn(4, 6), torch.tensor([-100, -100, 3, 4])
    outputs = []
    model.net[-1].register_forward_hook(lambda *args: outputs.append(args[-1]))
    model.train_step(x, y, cross_entropy)
    assert [output.origin.value for output in outputs] == [None, None]


def test_a_large_vocabulary_is_fused_by_itself_and_one_line_says_so(caplog):
    caplog.set_level(logging.INFO)
    x = torch.randn(2, 4)
    for classes, chosen in ((65_536, True), (65_535, False)):
        caplog.clear()
        model = hybrid(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, classes)), 2, chunks=1)
        assert bool(model.planned.head.names) == chosen
        text = "head=fused: '1' has 65,536 outputs"
        assert (text in caplog.messages) == chosen
        assert type(model(x)) is torch.Tensor


def test_a_split_by_costs_does_not_cut_between_a_head_and_its_loss():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40), nn.Identity(), nn.Identity())
    counts = {head: hybrid(net, 2, head=head).plan.counts for head in ("plain", "fused")}
    assert counts == {"plain": [2, 2], "fused": [1, 3]}
    assert hybrid(net, 3, head="fused").planned.head.names == ()  # no other cut is possible


def test_a_head_that_a_cut_separates_from_its_loss_is_plain_and_one_line_says_why(caplog):
    caplog.set_level(logging.INFO)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40), nn.LogSoftmax(-1))
    model = hybrid(net, 2, chunks=1, split=[2, 1], head="fused")
    assert model.planned.head.names == ()
    assert any("a cut separates it from its loss" in text for text in caplog.messages)
    model.train_step(torch.randn(4, 4), torch.randint(40, (4,)), F.nll_loss)


@pytest.mark.thorough
def test_a_head_that_is_a_layer_is_not_compiled_and_others_are():
    x, y = torch.randn(4, 6), torch.randint(40, (4,))
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = sequential()
        model = hybrid(net, 1, chunks=2, head="fused", compile=compiled)
        model.train_step(x, y, cross_entropy)
        results.append(net[-1].weight.grad)
    assert ((results[0] - results[1]).abs().max() / results[0].abs().max()).item() < CLOSE


def test_an_unknown_head_is_refused():
    with pytest.raises(ConfigError, match=r"head=chunked is unknown.*auto, fused, plain"):
        hybrid(sequential(), 2, head="chunked")
