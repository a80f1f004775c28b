"""The parts of the training loop, which `hybridtrain.trainer` puts together."""
