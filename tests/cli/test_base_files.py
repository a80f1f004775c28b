"""The files of a base model: what a run takes from them, and what its export writes back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import fail, succeed
from support.cases import installed
from support.small_hub import (
    write_bert,
    write_chats,
    write_gpt2,
    write_llama,
    write_reviews,
    write_t5,
)

from hybridtrain.cli import main

installed("datasets")
installed("peft")

FEW = [
    *("world.devices=cpu", "pipeline.nb_part=1", "pipeline.chunks=2", "data.batch_size=8"),
    *("trainer.epochs=null", "trainer.steps=1", "lr_schedule.warmup_steps=0", "run_name=run"),
    *("monitor.report=false", "data.max_len=24"),
]
CHAT = ["recipe=sft_chat", "data.path=chats.jsonl", "model.dtype=float32", *FEW]
REVIEWS = ["recipe=bert_classifier", "data.path=reviews.jsonl", *FEW]
SUMMARIES = ["recipe=t5_summaries", "data.path=reviews.jsonl", *FEW]
EXPORT = Path("outputs/run/export/step_00000001")


def write_bart(folder: Path, tokenizer: Path) -> None:
    """Writes a BART with random weights, which starts decoders with its end token."""
    from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

    words = AutoTokenizer.from_pretrained(tokenizer)
    end = words.eos_token_id
    config = BartConfig(
        vocab_size=len(words), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0, bos_token_id=2,
        eos_token_id=end, decoder_start_token_id=end, forced_eos_token_id=end, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    BartForConditionalGeneration(config).save_pretrained(folder)
    words.save_pretrained(folder)


def write_model(kind: str) -> list[str]:
    """Writes the model ./base and its data; returns the words of a run that trains it."""
    base = Path("base")
    if kind in ("llama", "gpt2"):
        (write_llama if kind == "llama" else write_gpt2)(base)
        write_chats(Path("chats.jsonl"), 12)
        return [*CHAT, "model.source=./base"]
    write_bert(Path("bert"))
    (write_t5 if kind == "t5" else write_bart)(base, Path("bert"))
    write_reviews(Path("reviews.jsonl"), 12)
    return [*SUMMARIES, "model.source=./base"]


def read(path: Path, *without: str) -> Any:
    content = json.loads(path.read_text())
    return {key: value for key, value in content.items() if key not in without}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.quick_cases("llama")
def test_an_export_has_the_files_of_its_base_unchanged(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = write_model(kind)
    path = Path("base/generation_config.json")
    written = read(path) | {"temperature": 0.7, "top_p": 0.9, "do_sample": True}
    path.write_text(json.dumps(written | {"max_new_tokens": 5}))
    succeed(capfd, *words)
    succeed(capfd, "export", "run_name=run", "format=transformers")
    for file in Path("base").iterdir():
        if file.suffix == ".safetensors":
            continue
        if file.suffix != ".json":
            assert (EXPORT / file.name).read_bytes() == file.read_bytes()
            continue
        # what transformers itself adds when it writes a file
        adds = ("transformers_version", "_from_model_config", "architectures", "dtype")
        before, after = read(file, *adds), read(EXPORT / file.name, *adds)
        assert {key: after.get(key) for key in before} == before, file


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.quick_cases("llama")
def test_an_exported_model_generates_with_its_cache(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import transformers

    words = write_model(kind)
    succeed(capfd, *words)
    succeed(capfd, "export", "run_name=run", "format=transformers")
    auto = "CausalLM" if kind in ("llama", "gpt2") else "Seq2SeqLM"
    net = getattr(transformers, f"AutoModelFor{auto}").from_pretrained(EXPORT)
    ids = "input_ids" if auto == "CausalLM" else "decoder_input_ids"
    lengths = []
    net.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs[ids].shape[1]), with_kwargs=True
    )
    net.generate(torch.ones(1, 6, dtype=torch.int64), max_new_tokens=3, min_new_tokens=3)
    assert lengths == [6 if auto == "CausalLM" else 1, 1, 1]


def test_a_decoder_starts_as_its_model_does(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    words = write_model("bart")
    succeed(capfd, *words, "optim.lr=1e-12", "optim.weight_decay=0", "data.eval_path=reviews.jsonl")
    loss = json.loads(Path("outputs/run/summary.json").read_text())["eval"]["loss"]
    net = AutoModelForSeq2SeqLM.from_pretrained("base").eval()
    tokenizer = AutoTokenizer.from_pretrained("base")
    rows = [json.loads(line) for line in Path("reviews.jsonl").read_text().splitlines()]
    inputs = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = tokenizer([row["summary"] for row in rows], return_tensors="pt")["input_ids"]
    with torch.no_grad():  # the model makes its decoder's inputs from the labels
        assert loss == pytest.approx(net(**inputs, labels=labels).loss.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5"])
@pytest.mark.quick_cases("bert")
def test_a_folder_without_a_tokenizer_is_refused_and_completed_by_one_key(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "bert":
        write_bert(Path("base"), layers=1)
        write_reviews(Path("reviews.jsonl"), 12)
        words = [*REVIEWS, "model.source=./base"]
    else:
        words = write_model(kind)
    Path("tokenizer").mkdir()
    for file in [*Path("base").glob("tokenizer*"), *Path("base").glob("*.jinja")]:
        shutil.move(file, "tokenizer")
    said = fail(capfd, *words)
    assert said.startswith("error: data.tokenizer=./base: the folder has no tokenizer (")
    assert "tokenizer.json" in said
    assert not Path("outputs/run/checkpoints").exists()
    succeed(capfd, *words, "data.tokenizer=./tokenizer")


def test_the_share_of_unknown_tokens_is_in_the_data_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_bert(Path("base"), layers=1)
    rows = [{"text": "good film Zug", "label": "a"}, {"text": "bad film Zug", "label": "b"}]
    Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    said = succeed(capfd, *REVIEWS, "model.source=./base")
    assert "33.3% of the tokens are unknown" in re.search("^data: .*$", said, re.M)[0]  # type: ignore[index]
    Path("reviews.jsonl").write_text(
        "".join(json.dumps(row | {"text": "Zug um Zug"}) + "\n" for row in rows * 8)
    )
    said = fail(capfd, *REVIEWS, "model.source=./base", "run_name=other")
    assert "data.tokenizer=./base knows none of the words of the texts" in said


def with_new_tokens() -> list[str]:
    """Adds two tokens to the tokenizer of a Llama."""
    from transformers import AutoTokenizer

    words = write_model("llama")
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.add_tokens(["<call>", "</call>"])
    tokenizer.save_pretrained("base")
    chats = Path("chats.jsonl")
    chats.write_text(chats.read_text().replace("film", "<call>").replace("story", "</call>"))
    return words


@pytest.mark.thorough
def test_the_way_out_for_new_tokens_trains_and_exports_their_rows(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = with_new_tokens()
    said = fail(capfd, *words)
    assert re.search(r"the data has \d+ tokens, but the model only \d+", said)
    code = re.search(r"in Python, (.*), and set (model.source=resized) ", said.replace("\n", " "))
    assert code is not None
    exec("import transformers; " + code[1])
    whole = "model.lora.modules_to_save=[embed_tokens,lm_head]"
    succeed(capfd, *words, code[2], "data.tokenizer=./base", whole)
    before = AutoModelForCausalLM.from_pretrained("resized")
    succeed(capfd, "export", "run_name=run", "format=transformers")
    merged = AutoModelForCausalLM.from_pretrained(EXPORT)
    rows = [net.state_dict()["model.embed_tokens.weight"][-2:] for net in (before, merged)]
    assert rows[0].shape == rows[1].shape
    assert not torch.equal(*rows)
    succeed(capfd, "export", "run_name=run", "format=peft")
    adapted = PeftModel.from_pretrained(before, f"{EXPORT}_adapter").eval()
    ids = torch.tensor([[4, 5, 6, merged.config.vocab_size - 1]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged.eval()(ids).logits)


def test_a_moved_base_is_followed_if_it_has_the_same_vocabulary(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_bert(Path("base"), layers=1)
    write_reviews(Path("reviews.jsonl"), 12)
    succeed(capfd, *REVIEWS, "model.source=./base")
    trained = json.loads(Path("outputs/run/summary.json").read_text())["eval"]
    Path("base").rename("moved")
    said = fail(capfd, "evaluate", "run_name=run")
    assert "data.tokenizer=./base: no such file or folder" in said
    assert "set data.tokenizer= to its place" in said
    for key in ("data.tokenizer", "model.source"):
        capfd.readouterr()
        assert main(["evaluate", "run_name=run", f"{key}=./moved"]) == 0
        assert json.loads(capfd.readouterr().out)["loss"] == trained["loss"]
    succeed(capfd, "export", "run_name=run", "format=transformers", "model.source=./moved")
    succeed(capfd, "run_name=run", "trainer.steps=2", "model.source=./moved")
    succeed(capfd, "run_name=run", "trainer.steps=3")  # knows the new place
    Path("moved").rename("base")
    with_new_tokens()  # another vocabulary
    Path("base").rename("other")
    said = fail(capfd, "evaluate", "run_name=run", "model.source=./other")
    assert "was trained with the tokenizer of ./moved" in said
    assert "./other" in said
