"""Models that others wrote, verified in stages.

`scripts/zoo.py` verifies all of them, and `tests/unit/pipeline/test_zoo.py` a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hybridtrain import HybridModel, Verification, World, verify

# How many samples of the batch each of the two micro-batches has.
SAMPLES = (3, 2)
CLASSES = 10
TOKENS = 100
LENGTH = 16
TINY: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A model, randomly initialised, and a batch for it."""

    net: nn.Module
    inputs: Any
    targets: Tensor


def torchvision_case(name: str, size: int | None = None, **options: Any) -> Case:
    """Returns a classification model of torchvision and images of `size` x `size` pixels."""
    from torchvision.models import get_model

    torch.manual_seed(0)
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # that takes minutes, and any weights will do
    if name.startswith("vit_"):
        size = options["image_size"] = 2 * int(name.rpartition("_")[2])  # 2 x 2 patches
    if size is None:
        # the auxiliary classifier of Inception, and the windows of MaxVit, take no less
        size = {"inception_v3": 299, "maxvit_t": 224}.get(name, 64)
    net = get_model(name, weights=None, num_classes=CLASSES, **options)
    samples = sum(SAMPLES)
    return Case(net, torch.randn(samples, 3, size, size), torch.randint(CLASSES, (samples,)))


# The models of transformers, and what their configurations name differently from `TINY`, or need
# in addition. Everything else has its default: caches, attention kernels, dropout.
_GROUPED = {"num_key_value_heads": 2}
_IMAGES = {"image_size": 32, "patch_size": 8}
_STEPS = {"image_size": 32, "hidden_sizes": [16, 32], "depths": [2, 2]}
_SPEECH = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": LENGTH, "pad_token_id": 0}
_ROUTERS = {"num_local_experts": 4, "output_router_logits": True}
_LOCAL = {"attention_head_size": 8, "feed_forward_size": 64, "is_decoder": True}
_OPTIONS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"bos_token_id": 1, "eos_token_id": 2},
    "OPTForCausalLM": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "LlamaForCausalLM": _GROUPED,
    "MistralForCausalLM": _GROUPED,
    "MixtralForCausalLM": _GROUPED | _ROUTERS,
    "Qwen2ForCausalLM": _GROUPED,
    "Qwen3ForCausalLM": _GROUPED | {"head_dim": 8},
    "GemmaForCausalLM": _GROUPED | {"head_dim": 8},
    "Gemma2ForCausalLM": _GROUPED | {"head_dim": 8},
    "Gemma3ForCausalLM": _GROUPED | {"head_dim": 8},
    # with a cache, the first stage would reset the states of all layers, also in later stages
    "RecurrentGemmaForCausalLM": {"use_cache": False, "head_dim": 8, "lru_width": 32}
    | {"attention_window_size": 8},
    "Phi3ForCausalLM": _GROUPED | {"pad_token_id": 0},
    "GPTNeoXForCausalLM": {},
    "BloomForCausalLM": {"n_head": 4},
    "MambaForCausalLM": {"state_size": 8},
    "ReformerModelWithLMHead": _LOCAL | {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [8, 24]},
    "BertForSequenceClassification": {},
    "RobertaForSequenceClassification": {},
    "DistilBertForSequenceClassification": {"hidden_dim": 64},
    "DebertaV2ForSequenceClassification": {},
    "AlbertForSequenceClassification": {"embedding_size": 16},
    "T5ForConditionalGeneration": {"d_ff": 64, "d_kv": 8},
    "WhisperForConditionalGeneration": _SPEECH
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_layers": 2}
    | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    "MimiModel": {
        "num_key_value_heads": 4,
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "upsample_groups": 32,
    }
    | {"codebook_size": 16, "codebook_dim": 8, "vector_quantization_hidden_dimension": 8}
    | {"num_quantizers": 2, "head_dim": 8, "sampling_rate": 800, "frame_rate": 50.0},
    "ViTForImageClassification": _IMAGES,
    "Dinov2ForImageClassification": _IMAGES,
    "ResNetForImageClassification": _STEPS | {"embedding_size": 16, "layer_type": "basic"},
    "ConvNextForImageClassification": {
        "image_size": 32,
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
    },
}
_LORA = "LlamaForCausalLM with LoRA"
TRANSFORMERS = (*_OPTIONS, _LORA)


def transformers_case(name: str, layers: int = 4) -> Case:
    """Returns a model of transformers with `layers` layers, and keyword arguments for it."""
    import transformers

    if name == _LORA:
        return _with_lora(transformers_case("LlamaForCausalLM", layers))
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    options = {"num_labels": CLASSES} if "Classification" in name else {}
    config = kind.config_class(**TINY | options | _OPTIONS[name], num_hidden_layers=layers)
    net = kind(config)
    samples = sum(SAMPLES)
    if "Image" in name:
        size = config.image_size
        return Case(
            net,
            {"pixel_values": torch.randn(samples, 3, size, size)},
            torch.randint(CLASSES, (samples,)),
        )
    if name == "MimiModel":
        sound = torch.randn(samples, 1, 128)
        return Case(net, {"input_values": sound}, sound)
    inputs = _sentences()
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _sentences()["input_ids"]
    if name.startswith("Whisper"):
        inputs = {
            "input_features": torch.randn(samples, config.num_mel_bins, 2 * LENGTH),
            "decoder_input_ids": inputs["decoder_input_ids"],
        }
    shape = (samples,) if "Classification" in name else (samples, LENGTH)
    return Case(net, inputs, torch.randint(CLASSES, shape))


def _with_lora(case: Case) -> Case:
    """Returns the case with PEFT's LoRA around the model, its default dropout and frozen base."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return replace(case, net=peft.get_peft_model(case.net, config))


def _sentences() -> dict[str, Tensor]:
    """Returns the tokens of sentences of different lengths, padded at the end."""
    lengths = torch.tensor([[LENGTH], [11], [14], [9], [13]])
    mask = torch.arange(LENGTH) < lengths
    return {
        "input_ids": torch.randint(3, TOKENS, mask.shape),
        "attention_mask": mask.long(),
    }


def loss_fn(output: Any, targets: Tensor) -> Tensor:
    """Returns the cross entropy, or for sounds the squared error.

    That of auxiliary outputs counts 0.3, and so does a loss of routers.
    """
    if targets.is_floating_point():
        return F.mse_loss(output.audio_values, targets)
    main, *others = _logits(output)
    loss = F.cross_entropy(main.flatten(0, -2), targets.flatten())
    for other in others:
        loss = loss + 0.3 * F.cross_entropy(other, targets)
    routers = getattr(output, "aux_loss", None)
    return loss if routers is None else loss + 0.3 * routers


def _logits(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    return list(output) if isinstance(output, tuple) else [output.logits]


def in_stages(case: Case, stages: int, split: str = "size") -> HybridModel:
    """Returns the model in `stages` stages on the CPU."""
    return HybridModel(
        case.net,
        World.from_env(nb_part=stages, devices="cpu"),
        chunks=len(SAMPLES),
        split=split,
        example_inputs=case.inputs,
    )


def verified(model: HybridModel, case: Case, times: int = 2) -> Verification:
    """Verifies `times` steps and evaluations.

    Each has the samples in another order, so that what a call leaves behind would be seen.
    """
    whole = (case.inputs, case.targets)
    batches = [tree_map(lambda x, by=by: x.roll(by, 0), whole) for by in range(times)]
    return verify(model, batches, loss_fn)


def shares(model: HybridModel) -> Sequence[float]:
    """Returns the share of the parameters that each stage has."""
    sizes = [sum(cost.parameters for cost in stage.layers) for stage in model.plan.stages]
    return [size / sum(sizes) for size in sizes]
