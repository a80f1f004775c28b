"""`output.loss` of models of transformers, for padded labels: a step is the unsplit one."""

import copy

import pytest
import torch
from support.cases import installed, thorough
from support.compare import assert_same_gradients, cpu_world
from support.zoo import TINY
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.loss import MeanLoss, count_of_output, model_output

transformers = installed("transformers")
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

SAMPLES, LENGTH = 6, 8
# Between their micro-batches the gradients differ by the last bits alone.
ALMOST = {"rtol": 1e-4, "atol": 1e-6}


def make(name, **options):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = kind.config_class(**TINY | options, num_hidden_layers=1)
    config.use_cache = False
    return kind(config).eval()  # without dropout


def inputs_for(net):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 20, (SAMPLES, LENGTH), generator=g)
    name = type(net).__name__
    inputs = {"input_ids": tokens}
    if "SequenceClassification" in name:
        return inputs | {"labels": torch.tensor([0, -100, 1, -100, -100, 2])}
    if "QuestionAnswering" in name:
        ends = torch.randint(LENGTH, (2, SAMPLES), generator=g)
        return inputs | {"start_positions": ends[0], "end_positions": ends[1]}
    labels = tokens % 3 if "TokenClassification" in name else tokens.clone()
    lengths = torch.tensor([[0], [1], [3], [8], [2], [5]])
    return inputs | {"labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, -100)}


MODELS = {
    "GPT2LMHeadModel": {},
    "BertForMaskedLM": {},
    "BertForTokenClassification": {"num_labels": 3},
    "BertForSequenceClassification": {"num_labels": 3},
    "BertForQuestionAnswering": {},
    "T5ForConditionalGeneration": {"d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0},
}


QUICK = ["GPT2LMHeadModel", "BertForSequenceClassification"]


@pytest.mark.parametrize(
    "name", [*QUICK, *thorough([name for name in MODELS if name not in QUICK])]
)
@pytest.mark.thorough
def test_a_step_is_the_mean_over_the_labels_that_count(name):
    net = make(name, **MODELS[name])
    inputs = inputs_for(net)
    reference = copy.deepcopy(net)
    expected = reference(**inputs).loss
    expected.backward()
    model = HybridModel(net, cpu_world(2), chunks=4, example_inputs=inputs)
    out = model.train_step(inputs, None, model_output)
    torch.testing.assert_close(out.loss, expected.detach(), **ALMOST)
    for parameter in reference.parameters():  # of layers without a part in the loss
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(model, reference, name, **ALMOST)


@pytest.mark.thorough
def test_padded_labels_with_a_lambda_name_the_way_out():
    net = make("GPT2LMHeadModel")
    inputs = inputs_for(net)
    model = HybridModel(net, cpu_world(1), chunks=2, example_inputs=inputs)
    with pytest.raises(BatchError, match=r"losses\.model_output for output\.loss of transformers"):
        model.train_step(inputs, None, lambda output, _: output.loss)


@pytest.mark.parametrize("name", ["BertForPreTraining", "MixtralForCausalLM"])
def test_a_loss_of_several_means_is_refused(name):
    net = make(name, output_router_logits=True, num_local_experts=2, num_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"loss=model_output: .*MeanLoss"):
        count_of_output(net)


def test_a_model_whose_rule_is_unknown_is_refused():
    class Own(transformers.BertForMaskedLM):
        def forward(self, input_ids, labels):
            return super().forward(input_ids, labels=labels * 0)

    with pytest.raises(ConfigError, match="what Own averages its loss over"):
        count_of_output(Own(make("BertForMaskedLM").config))
    with pytest.raises(ConfigError, match="what Linear averages its loss over"):
        count_of_output(nn.Linear(2, 2))


class Wrapper(nn.Module):
    """A model of one's own around one of transformers."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids, labels):
        return self.lm(input_ids=input_ids, labels=labels)


def assert_exact(net, loss_fn):
    inputs = inputs_for(make("GPT2LMHeadModel"))
    reference = copy.deepcopy(net)
    expected = reference(**inputs).loss
    expected.backward()
    model = HybridModel(net, cpu_world(2), chunks=3, example_inputs=inputs)
    out = model.train_step(inputs, None, loss_fn)
    torch.testing.assert_close(out.loss, expected.detach(), **ALMOST)
    assert_same_gradients(model, reference, **ALMOST)


@pytest.mark.thorough
def test_a_wrapper_is_counted_as_the_model_inside():
    assert_exact(Wrapper(make("GPT2LMHeadModel")).eval(), model_output)


@pytest.mark.thorough
def test_lora_by_peft_is_exact():
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    assert_exact(peft.get_peft_model(make("GPT2LMHeadModel"), config).eval(), model_output)


def every_label(inputs, _):
    return (inputs["labels"] != -100).sum()


@pytest.mark.parametrize("loss_fn", [*thorough([model_output]), lambda output, _: output.loss])
@pytest.mark.thorough
def test_a_count_that_the_models_loss_contradicts_is_an_error_that_names_both_numbers(loss_fn):
    net = make("GPT2LMHeadModel")
    inputs = inputs_for(net)
    model = HybridModel(net, cpu_world(2), chunks=3, example_inputs=inputs)
    said = r"is [\d.]+ for 2 samples, and [\d.]+ as the mean .*counts \d+ and \d+: .*\[:, 1:\]"
    with pytest.raises(ConfigError, match=said):
        model.train_step(inputs, None, MeanLoss(loss_fn, every_label))


@pytest.mark.thorough
def test_the_proof_of_the_models_loss_changes_neither_modes_nor_draws():
    def train(proves):
        net = make("GPT2LMHeadModel", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1).train()
        inputs = inputs_for(net)
        model = HybridModel(net, cpu_world(2), chunks=3, example_inputs=inputs)
        if not proves:
            model._proof = lambda *_: None
        torch.manual_seed(1)
        out = model.train_step(inputs, None, model_output)
        assert all(module.training for module in net.modules())
        return [out.loss, torch.rand(1), *(p.grad for p in model.parameters())]

    for mine, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.thorough
def test_labels_that_the_attention_mask_leaves_out_do_not_count():
    net = make("BioGptForTokenClassification", num_labels=3)
    inputs = inputs_for(make("BertForTokenClassification", num_labels=3))
    inputs["attention_mask"] = (torch.arange(LENGTH) < 3).expand(SAMPLES, -1).long()
    inputs["attention_mask"][4:, 1:] = 0
    expected = copy.deepcopy(net)(**inputs).loss
    model = HybridModel(net, cpu_world(2), chunks=3, example_inputs=inputs)
    out = model.train_step(inputs, None, model_output)
    torch.testing.assert_close(out.loss, expected.detach(), **ALMOST)


def test_a_second_loss_is_refused_in_a_nested_config_and_in_the_batch():
    net = make("GPT2LMHeadModel")
    inputs = inputs_for(net)
    with pytest.raises(BatchError, match="remove output_router_logits"):
        count_of_output(net)(inputs | {"output_router_logits": True}, None)
    net.config.z_loss_coefficient = 0.1
    with pytest.raises(ConfigError, match="set z_loss_coefficient=0"):
        count_of_output(net)
    net.config.z_loss_coefficient = 0
    net.config.text_config = transformers.MixtralConfig(output_router_logits=True)
    with pytest.raises(ConfigError, match="set output_router_logits=0"):
        count_of_output(net)


def test_answers_outside_their_sequence_are_refused():
    net = make("BertForQuestionAnswering")
    inputs = inputs_for(net)
    inputs["end_positions"][1] = LENGTH
    with pytest.raises(BatchError, match="outside its sequence"):
        count_of_output(net)(inputs, None)
