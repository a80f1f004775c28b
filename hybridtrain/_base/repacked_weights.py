"""4-bit layers of bitsandbytes on CPUs with AVX512-BF16, where an evaluation ends their training.

Their first forward in evaluation mode repacks the weight in place, for a kernel that computes in
bfloat16. Later forwards then use that kernel in training too, and give their input no gradient.
"""

from torch import nn

from hybridtrain.errors import ConfigError

_FLAG = "support_avx512bf16_for_cpu"


def keep_weights_for_training(net: nn.Module) -> None:
    """Makes the 4-bit layers of bitsandbytes in `net` keep their weights in an evaluation.

    Raises:
        ConfigError: an earlier evaluation has repacked the weight of a layer.
    """
    for name, module in net.named_modules():
        if _FLAG not in vars(module):
            continue
        form = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(form, "packing_format_for_cpu", False):
            raise ConfigError(
                f"an evaluation on this CPU has repacked the weight of {name} "
                f"({type(module).__name__}), which now passes on no gradients: load the model "
                "again, and wrap it before its first evaluation"
            )
        setattr(module, _FLAG, False)
