"""Every recipe, for a few steps on small data."""

import json
import math
from pathlib import Path

import hybridtrain.recipes
import numpy as np
import pytest
from cli_runs import metrics, succeed
from support.cases import thorough
from support.small_data import (
    write_cifar10,
    write_images,
    write_imdb,
    write_mnist,
    write_texts,
)
from support.small_hub import write_bert, write_chats, write_gpt2, write_reviews, write_t5

ROOT = Path(__file__).resolve().parents[2]
HUB = ["data.path=data/reviews.jsonl", "data.max_len=16"]
TINY = {
    "digits": [],
    "mnist_basicnet": ["data.root=data"],
    "imdb_transformer": [
        *("data.root=data", "data.max_len=32", "model.d_model=16", "model.d_hid=16"),
        "model.nhead=2",
    ],
    "python_source_gpt": [
        *("data.seq_len=32", "data.max_bytes=20000", "data.eval_bytes=2000"),
        *("model.d_model=16", "model.n_head=2"),
    ],
    "gpt_text_files": [
        *("data.path=data", "data.seq_len=32", "data.eval_share=0.2", "data.max_tokens=20000"),
        *("model.d_model=16", "model.n_head=2"),
    ],
    "gpt_token_files": [
        *("data.root=data", "data.seq_len=32", "data.vocab_size=256", "pipeline.chunks=4"),
        *("model.n_layer=2", "model.d_model=16", "model.n_head=2"),
    ],
    "cifar10_resnet18": ["data.root=data", "data.workers=1"],
    # with a smaller model: a vision transformer of torchvision has 86 million parameters
    "image_folder_vit": [
        *("data.root=data", "data.workers=0", "data.image_size=32"),
        *("model.name=shufflenet_v2_x0_5", "pipeline.chunks=2"),
    ],
    "bert_classifier": [*HUB, "model.source=./data/bert"],
    "gpt2_text": [
        *(*HUB, "data.tokenizer=./data/bert", "model.config.n_layer=2", "model.config.n_head=2"),
        "model.config.n_embd=16",
    ],
    "t5_summaries": [*HUB, "model.source=./data/t5"],
    "sft_chat": [
        *("data.path=data/chats.jsonl", "data.max_len=32", "model.source=./data/gpt2"),
        "lr_schedule.warmup_steps=0",
    ],
}

CLASSES = {
    "imdb_transformer": 2,
    "bert_classifier": 2,
    "image_folder_vit": 3,
    "gpt2_text": 19,
    "t5_summaries": 19,
    "sft_chat": 21,
    **dict.fromkeys(("python_source_gpt", "gpt_text_files", "gpt_token_files"), 256),
}


def write_data(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes small data for a recipe into the folder `data`, in the format that it reads."""
    if recipe == "mnist_basicnet":
        write_mnist("data", n_train=48, n_test=20)
    elif recipe == "imdb_transformer":
        pytest.importorskip("torchtext")
        write_imdb("data", n=40)
    elif recipe == "cifar10_resnet18":
        write_cifar10("data", monkeypatch, n=16)
    elif recipe == "image_folder_vit":
        write_images("data", {"train": 16, "val": 3})
    elif recipe == "gpt_text_files":
        write_texts("data")
    elif recipe == "gpt_token_files":
        Path("data").mkdir()
        for split, count in (("train", 4000), ("val", 700)):
            ids = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint16)
            ids.tofile(f"data/{split}.bin")
    elif recipe in ("bert_classifier", "gpt2_text", "t5_summaries"):
        write_reviews(Path("data/reviews.jsonl"), 100)
        write_bert(Path("data/bert"))
        if recipe == "t5_summaries":
            write_t5(Path("data/t5"), Path("data/bert"))
    elif recipe == "sft_chat":
        pytest.importorskip("peft")
        write_gpt2(Path("data/gpt2"))
        write_chats(Path("data/chats.jsonl"), 60)


# test_hub trains t5_summaries too, until it writes the right texts
# test_fine_tuning trains sft_chat too
QUICK = [recipe for recipe in TINY if recipe not in ("sft_chat", "t5_summaries")]


@pytest.mark.parametrize("recipe", [*QUICK, *thorough(["t5_summaries", "sft_chat"])])
@pytest.mark.quick_cases("gpt_token_files", "mnist_basicnet")
def test_every_recipe_trains_a_few_steps_on_small_data(
    recipe: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(recipe, monkeypatch)
    few = ["trainer.epochs=null", "trainer.steps=3", "trainer.log_every=1", "data.batch_size=16"]
    cpu = ["world.devices=cpu", "monitor.tensorboard=false"]
    said = succeed(capfd, f"recipe={recipe}", *few, *cpu, *TINY[recipe])
    run = Path("outputs") / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["world"]["nb_part"] == len(summary["stages"]) == 2
    losses = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    assert len(losses) == 3
    # untrained, a model knows about as much as one that guesses
    assert losses[0] == pytest.approx(math.log(CLASSES.get(recipe, 10)), rel=0.5)
    assert summary["eval"]["samples"] > 0
    assert 0 <= summary["eval"].get("accuracy", 0) <= 1
    if recipe == "python_source_gpt":
        assert summary["eval"]["perplexity"] == pytest.approx(math.exp(summary["eval"]["loss"]))
        for line in metrics(run):
            if "train/loss" in line:
                per_sample = line["train/tokens_per_second"] / line["train/samples_per_second"]
                assert per_sample == pytest.approx(32)
    assert (run / "checkpoints" / "step_00000003").is_dir()
    assert "1 process x 2 stages" in said


@pytest.mark.thorough
def test_the_mfu_has_the_flops_of_forwards_and_backwards_without_recomputation(
    capfd: pytest.CaptureFixture[str],
) -> None:
    width, length, vocabulary, layers = 16, 32, 256, 3
    said = succeed(
        capfd,
        *("recipe=python_source_gpt", *TINY["python_source_gpt"], f"model.n_layer={layers}"),
        *("trainer.steps=2", "trainer.log_every=1", "trainer.eval_every=null"),
        *("world.devices=cpu", "data.batch_size=16", "pipeline.recompute=always"),
        *("hardware=h100", "hardware.device=cpu", "hardware.flops_per_s.fp32=1e9"),
    )
    assert "train/mfu is not logged" not in said
    # Narayanan et al., 2021 (arXiv:2104.04473), section 5.1, with 3 forwards in place of their 4
    products = 24 * layers * length * width**2 + 4 * layers * length**2 * width
    forward = products + 2 * length * width * vocabulary
    logged = [line for line in metrics(Path("outputs/python_source_gpt")) if "train/mfu" in line]
    assert len(logged) == 2
    for line in logged:
        rate = 3 * forward * line["train/samples_per_second"]
        assert line["train/mfu"] == pytest.approx(rate / (2 * 1e9))


@pytest.mark.thorough
def test_the_mfu_follows_the_tokens_where_batches_are_padded_to_their_longest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_bert(Path("data/bert"))
    texts = [" ".join(["good"] * words) for words in [2] * 4 + [12] * 4]
    lines = [json.dumps({"text": text, "label": n % 2}) for n, text in enumerate(texts)]
    Path("data/reviews.jsonl").write_text("\n".join(lines * 4))
    succeed(
        capfd,
        *("recipe=bert_classifier", *TINY["bert_classifier"], "trainer.epochs=null"),
        *("trainer.steps=6", "trainer.log_every=1", "trainer.eval_every=null"),
        *("world.devices=cpu", "data.batch_size=2", "pipeline.chunks=2", "data.max_len=32"),
        *("hardware=h100", "hardware.device=cpu", "hardware.flops_per_s.fp32=1e9"),
    )
    logged = [line for line in metrics(Path("outputs/bert_classifier")) if "train/mfu" in line]
    lengths = [
        line["train/tokens_per_second"] / line["train/samples_per_second"] for line in logged
    ]
    assert max(lengths) > 2 * min(lengths)
    first, *others = (line["train/mfu"] / line["train/tokens_per_second"] for line in logged)
    assert others == pytest.approx([first] * 5)


@pytest.mark.thorough
def test_a_cluster_of_other_devices_trains_and_says_why_there_is_no_mfu(
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = ["trainer.epochs=null", "trainer.steps=2", "trainer.log_every=1"]
    said = succeed(capfd, "recipe=digits", "world.devices=cpu", *steps, "hardware=h100")
    assert "train/mfu is not logged: hardware.device=cuda, but the run uses cpu" in said
    assert not any("train/mfu" in line for line in metrics(Path("outputs/digits")))


def test_every_recipe_is_tried() -> None:
    assert set(TINY) == {path.stem for path in Path(hybridtrain.recipes.__path__[0]).glob("*.yaml")}


RESULTS = json.loads((ROOT / "docs/assets/results.json").read_text())


@pytest.mark.parametrize("recipe", TINY)
def test_the_header_of_a_recipe_says_how_to_run_it_what_it_reaches_and_whose_numbers_it_has(
    recipe: str,
) -> None:
    text = (ROOT / f"recipes/{recipe}.yaml").read_text()
    header = " ".join(text.partition("defaults:")[0].replace("#", " ").split())
    assert header.count(f"recipe={recipe}") >= 3  # a process, the GPUs of a node, nodes
    assert "Numbers:" in header
    if recipe == "sft_chat":  # a small base, next to PEFT
        difference = json.loads((ROOT / "docs/assets/results_chat.json").read_text())
        assert (
            f"Result: the losses of plain PEFT to {difference['largest difference']['all']:.1e}"
            in (header.replace("e-6", "e-06"))
        )
        return
    if recipe not in RESULTS:
        assert "Result: not measured" in header
        return
    found = RESULTS[recipe]
    first, second = found["memory_mib"]
    accuracy, loss = (found["hybridtrain"][key] for key in ("accuracy", "loss"))
    assert f"accuracy {accuracy:.4f} and loss {loss:.4f}" in header
    assert f"{found['steps']} steps of {found['step_ms']} ms" in header
    assert f"{first} and {second} MiB" in header


def test_the_page_of_recipes_has_the_results_that_were_measured_and_their_commands() -> None:
    page = (ROOT / "docs/recipes.md").read_text().replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in page.splitlines()]
    for recipe, found in RESULTS.items():
        assert " ".join(["hybridtrain", f"recipe={recipe}", *found["words"]]) in lines
        row = next(line for line in lines if line.startswith(f"| `{recipe}` | {found['steps']} |"))
        for side in ("hybridtrain", "plain"):
            assert f"{found[side]['loss']:.4f}" in row
            assert f"{found[side]['accuracy']:.4f}" in row
    for recipe, found in json.loads((ROOT / "docs/assets/results_hf.json").read_text()).items():
        rows = [line for line in lines if line.startswith(f"| `{recipe}` | ") and "device" in line]
        rows += [line for line in lines if line.startswith(f"| `{recipe}` | ") and "stages" in line]
        for row, way in zip(rows, ("trainer", "pipelined", "recipe"), strict=True):
            assert f"| {found[way]['peak_mib']:,.0f} | {found[way]['eval']:.4f} |" in row
    assert all(f"| `{recipe}` |" in page for recipe in TINY)
