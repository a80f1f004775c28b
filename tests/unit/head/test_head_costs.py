"""The predicted cost of a head whose loss is computed without logits."""

import torch
from support.hf import llama

from hybridtrain.partitioning import LossOfStep, count_layers, model_flops, observed_chain


def test_the_predicted_memory_of_a_large_vocabulary_has_no_logits():
    with torch.device("meta"):
        net = llama(use_cache=False)
        net.config.vocab_size = 2**17
        net = type(net)(net.config)
    tokens = torch.zeros(4, 256, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    layers = observed_chain(net, batch).layers
    gib, products = {}, {}
    for head in ("plain", "auto"):
        loss = LossOfStep(lambda output, _: output.loss, tokens, head)
        last = count_layers(layers, batch, "bf16", loss)[-1]
        gib[head] = (last.cost.activation_bytes + last.cost.temporary_bytes) / 2**30
        products[head] = last.forward.flops, last.backward.flops
    assert gib["plain"] > 1.4
    assert gib["auto"] < 0.25
    # forward: the logits and the gradient of the input; backward: the logits again, and the weight
    assert products["auto"] == (2 * products["plain"][0], products["plain"][1])
    assert model_flops(count_layers(layers, batch, "bf16"), layers) > 3 * products["plain"][0]
