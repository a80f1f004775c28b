"""`output.loss` of models of transformers, for padded labels: a step is the unsplit one."""

import copy

import pytest
import torch
from support.compare import assert_same_gradients, cpu_world
from support.zoo import TINY
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.losses import model_output
from hybridtrain.output_loss import count_of_output

transformers = pytest.importorskip("transformers")
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


@pytest.mark.parametrize("name", MODELS)
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

    with pytest.raises(ConfigError, match="what Own averages over is unknown"):
        count_of_output(Own(make("BertForMaskedLM").config))
    with pytest.raises(ConfigError, match="what Linear averages over"):
        count_of_output(nn.Linear(2, 2))


def test_answers_outside_their_sequence_are_refused():
    net = make("BertForQuestionAnswering")
    inputs = inputs_for(net)
    inputs["end_positions"][1] = LENGTH
    with pytest.raises(BatchError, match="outside its sequence"):
        count_of_output(net)(inputs, None)
