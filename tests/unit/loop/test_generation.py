"""Greedy generation by a pipeline writes what transformers' own `generate` writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hybridtrain import HybridModel, World
from hybridtrain.data import EvalLoader
from hybridtrain.datasets.hf_datasets import Padded
from hybridtrain.errors import DataError
from hybridtrain.loop import generate
from hybridtrain.options import LoaderOptions

LENGTHS = (5, 2, 7, 3, 4)
WORDS = 31


class Prompts(Dataset[Any]):
    """Token ids of different lengths."""

    def __init__(self, decoder: bool) -> None:
        draws = torch.Generator().manual_seed(3)
        self.ids = [torch.randint(2, WORDS, (n,), generator=draws) for n in LENGTHS]
        self.decoder = decoder

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        first = {"decoder_input_ids": torch.tensor([0])} if self.decoder else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **first}


def net_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False,
            initializer_range=0.5, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False,
        pad_token_id=0, decoder_start_token_id=0, initializer_factor=8.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def of_transformers(net: Any, ids: torch.Tensor, tokens: int) -> list[int]:
    found = net.generate(
        ids[None], attention_mask=torch.ones_like(ids[None]), do_sample=False,
        max_new_tokens=tokens, use_cache=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    begun = 1 if net.config.is_encoder_decoder else len(ids)
    return found[0, begun:].tolist()


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("gpt2", False),
        ("gpt2", True),
        ("t5", True),
        pytest.param("t5", False, marks=pytest.mark.thorough),
    ],
)
def test_a_pipeline_writes_the_tokens_of_transformers(kind: str, ends: bool) -> None:
    net, prompts = net_of(kind), Prompts(kind == "t5")
    wanted = [of_transformers(net, ids, 6) for ids in prompts.ids]
    end = wanted[0][3] if ends else None
    wanted = [ids[: ids.index(end)] if end in ids else ids for ids in wanted]
    example = {name: value[None].repeat(2, 1) for name, value in prompts[0].items()}
    if kind == "t5":
        example["decoder_input_ids"] = torch.zeros(2, 3, dtype=torch.int64)
    world = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, world, chunks=2, example_inputs=example)
    pairs = generate(model, loader_of(prompts, world), 6, end, 0)
    assert [ids for ids, _ in pairs] == wanted
    assert all(target is None for _, target in pairs)
    if ends:
        assert any(len(ids) < 6 for ids in wanted)


def loader_of(dataset: Any, world: World) -> EvalLoader:
    options = LoaderOptions(collate=Padded(0).of_inputs)
    return EvalLoader(dataset, 3, world, options=options, inputs_alone=True)


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    world, prompts = World.from_env(nb_part=1, devices="cpu"), Prompts(decoder=False)
    example = {name: value[None].repeat(2, 1) for name, value in prompts[0].items()}
    model = HybridModel(net_of("gpt2"), world, example_inputs=example)
    assert len(generate(model, loader_of(prompts, world), 32 - 7, None, 0)) == len(LENGTHS)
    with pytest.raises(DataError, match="text of 7 tokens and generate=26 are more than the 32"):
        generate(model, loader_of(prompts, world), 26, None, 0)


def test_only_the_texts_of_a_decoder_are_compared_with_targets() -> None:
    world, prompts = World.from_env(nb_part=1, devices="cpu"), Prompts(decoder=False)
    example = {name: value[None].repeat(2, 1) for name, value in prompts[0].items()}
    model = HybridModel(net_of("gpt2"), world, example_inputs=example)
    with pytest.raises(DataError, match="task=seq2seq"):
        generate(model, loader_of(prompts, world), 2, None, 0, compared=True)


def test_inputs_without_token_ids_are_refused() -> None:
    world = World.from_env(nb_part=1, devices="cpu")
    model = HybridModel(torch.nn.Linear(3, 2), world)
    data = EvalLoader(
        [(torch.ones(3), torch.tensor(0))] * 4, 2, world, options=LoaderOptions(collate=None)
    )
    with pytest.raises(DataError, match="input_ids"):
        generate(model, data, 2, None, 0)
