"""Models: one function each, from plain arguments to an `nn.Sequential`.

A function is the `_target_` of a file in `configs/model/`, and its parameters are that file's
keys. The pipeline cuts a model between the elements of its `nn.Sequential`s, so every element
takes one argument and returns one value; both may be a tuple of tensors, batch first. Bad
arguments raise `ConfigError` and name the key.
"""

from hybridtrain.models.basicnet import basicnet
from hybridtrain.models.gpt import gpt
from hybridtrain.models.transformer import transformer

__all__ = ["basicnet", "gpt", "transformer"]
