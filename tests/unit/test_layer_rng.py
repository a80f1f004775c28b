"""The random numbers of layers depend on seed, step, layer, micro-batch and replica alone."""

import itertools

import torch

from hybridtrain.pipeline.layer_rng import LayerRNG


def test_draws_of_neighbouring_steps_layers_and_micro_batches_are_unrelated():
    draws = LayerRNG(0, 0, units=[(layer, 0) for layer in range(10)])
    drawn = set()
    for step, layer, i in itertools.product(range(10), repeat=3):
        draws.step = step
        with draws.seeded(layer, i):
            drawn |= {torch.randint(2**60, ()).item(), torch.randint(2**60, ()).item()}
    assert len(drawn) == 2000
