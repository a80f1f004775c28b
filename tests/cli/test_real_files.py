"""Data as people have it: files that are not quite regular, and the commands on a run of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cli_runs import fail, succeed
from PIL import Image
from support.small_data import write_images, write_tokenizer
from support.small_hub import write_bert

import hybridtrain.datasets.images as images
from hybridtrain.cli import main
from hybridtrain.errors import DataError

BERT = "model.config={model_type: bert, hidden_size: 16, num_hidden_layers: 1, " \
    "num_attention_heads: 2, intermediate_size: 16}"  # fmt: skip
TEXTS = [
    *("data=datasets", "data.tokenizer=./tokenizer.json", "model=transformers"),
    *("world.devices=cpu", "trainer.steps=1", "run_name=t", "data.batch_size=8"),
]
IMAGES = [
    *("recipe=image_folder_vit", "data.root=pets", "model=timm", "model.name=resnet10t"),
    *("data.image_size=32", "data.batch_size=8", "data.workers=0", "pipeline.nb_part=1"),
    *("pipeline.chunks=1", "world.devices=cpu", "trainer.epochs=null", "run_name=pets"),
    *("lr_schedule.warmup_steps=0", "checkpoint.every_steps=1"),
]


@pytest.fixture(autouse=True)
def _no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_tokenizer(tmp_path / "tokenizer.json")


def rows(number: int = 20) -> list[dict[str, Any]]:
    return [
        {"text": "the plot " * (1 + i % 3), "label": ("neg", "pos")[i % 2]} for i in range(number)
    ]


def write_jsonl(path: str, lines: list[dict[str, Any]]) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_first_line_counts_the_samples_names_the_classes_and_the_place(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_jsonl("parts/a.jsonl", rows(12))
    write_jsonl("parts/b.jsonl", rows(8))
    said = succeed(capfd, *TEXTS, BERT, "data.path=parts/*.jsonl")
    assert (
        "data: 18 samples to train on, 2 held out; 2 classes: neg (9), pos (9); texts of 6 tokens "
        "(median), 8 (longest), 0% truncated by data.max_len=128; 2 files, jsonl from "
        "parts/a.jsonl, parts/b.jsonl" in said
    )
    config = Path("outputs/t/config.yaml").read_text()
    assert "  classes:\n  - neg\n  - pos\n" in config
    state = json.loads(next(Path("outputs/t/checkpoints").glob("step*/state.json")).read_text())
    assert state["dataset"]["classes"] == ["neg", "pos"]
    assert (state["dataset"]["train"], state["dataset"]["eval"]) == (18, 2)


def test_every_line_of_a_table_is_a_sample_as_it_is_written(tmp_path: Path) -> None:
    from hybridtrain.datasets import hf_datasets

    lines = [f"the plot {i}\t{i % 2}" for i in range(40)]
    lines[3], lines[20] = '"the plot\t1', 'of a "film"\t0'
    Path("a.tsv").write_text("\n".join(["text\tlabel", *lines]))
    found = hf_datasets("a.tsv", "tokenizer.json")
    assert len(found.train) + len(found.eval) == 40
    words = ["NA", "null", "None", "", "a film"] * 4
    table = "text,label\n" + "".join(f"{word},{i % 2}\n" for i, word in enumerate(words))
    with gzip.open("b.csv.gz", "wt") as file:
        file.write(table)
    write_jsonl("b.jsonl", [{"text": word, "label": i % 2} for i, word in enumerate(words)])
    one, other = hf_datasets("b.csv.gz", "tokenizer.json"), hf_datasets("b.jsonl", "tokenizer.json")
    pairs = [
        [(inputs["input_ids"].tolist(), int(label)) for inputs, label in splits.train]
        for splits in (one, other)
    ]
    assert pairs[0] == pairs[1]
    assert len(pairs[0]) == 18
    Path("c.csv").write_text('text,label\nb,0\n"joined,\nin quotes",1\n' + "a,1\n" * 5)
    assert "1 samples of c.csv have line breaks in quotes" in str(
        hf_datasets("c.csv", "tokenizer.json")
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\n", "has a header (text, label), but no samples"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.csv", "text,label\na,0\nb\nc,1\n", "a.csv, line 3: 1 fields, but the header has 2"),
        ("a.csv", 'text,label\na,0\n"b,1\nc,0\n', "begins at line 3 has a misplaced quote"),
        (
            "a.jsonl",
            '{"text": "a", "label": "x"}\n{"text": "b", "label": 3}\n',
            "target=label mixes texts and numbers: sample 1 of a.jsonl has a text",
        ),
        (
            "a.jsonl",
            '{"text": "a", "label": "x"}\n{"text": null, "label": "y"}\n',
            "text=text: sample 2 of a.jsonl has no value",
        ),
        ("a.jsonl", '["a", "x"]\n["b", "y"]\n', "a.jsonl, line 1: a sample must be an object such"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n' * 4, "the data has only one class, x, so"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_file_that_cannot_be_read_as_it_is_meant_is_one_line(
    name: str, content: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(content)
    assert message in fail(capfd, *TEXTS, BERT, f"data.path={name}")


def test_a_table_is_read_with_any_common_separator_and_without_the_index_of_pandas(
    tmp_path: Path,
) -> None:
    from hybridtrain.datasets import hf_datasets

    sample = '"the plot, ""good""; bad|film"'
    for name, separator in (("semicolon", ";"), ("tab", "\t"), ("pipe", "|"), ("comma", ",")):
        lines = [
            separator.join(("", "text", "label", "")),
            *(separator.join((str(i), sample, "01"[i % 2], "")) for i in range(8)),
        ]
        Path("a.csv").write_text("\ufeff" + "\r\n".join(lines), newline="")
        data = hf_datasets("a.csv", "tokenizer.json")
        assert data.train.samples[0] == {"text": 'the plot, "good"; bad|film', "label": "0"}
        line = str(data)
        assert (f"separator {name}" in line) == (name != "comma")
        assert "2 columns without a name not read" in line
    Path("a.csv").write_text("sep=;\ntext;label, of the film\nthe plot;0\na plot;1\n")
    assert hf_datasets("a.csv", "tokenizer.json", target="label, of the film").train
    Path("a.csv").write_text("text;label\nthe plot;0\na plot;1\n")
    with pytest.raises(DataError, match="no such column; it has text;label"):
        hf_datasets("a.csv", "tokenizer.json", separator=",")
    with pytest.raises(DataError, match="separator=ab must be one character, or comma"):
        hf_datasets("a.csv", "tokenizer.json", separator="ab")


def test_what_is_wrong_in_a_table_is_fixed_by_the_key_that_the_error_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    table = "text;label\n" + "".join(f"a plot;{'np'[i % 2]}\n" for i in range(18)) + "a;\nb; \n"
    Path("a.csv").write_text(table)
    words = [*TEXTS, BERT, "data.path=a.csv", "--dry-run"]
    said = fail(capfd, *words)
    assert "label: sample 19 of a.csv has no value" in said
    assert "set data.drop_missing=true" in said
    said = succeed(capfd, *words, "data.drop_missing=true")
    assert "2 samples without a value left out" in said
    assert "2 classes: n (8), p (8)" in said
    Path("a.csv").write_text("text:label\n" + "a, b:x\nc:y\n" * 4)
    assert "set data.separator= if the file has another" in fail(capfd, *words)
    succeed(capfd, *words, "data.separator=':'")
    Path("a.csv").write_text("text;label\n" + "a;3,5\n" * 4)
    said = fail(capfd, *words, "data.task=regression")
    assert "data.target=label: sample 1 of a.csv has '3,5'" in said
    assert "write numbers with a decimal point" in said


def test_a_small_class_is_held_out_by_its_share(capfd: pytest.CaptureFixture[str]) -> None:
    labels = ["a"] * 30 + ["b"] * 8 + ["c"] * 2
    write_jsonl("a.jsonl", [{"text": "plot", "label": label} for label in labels])
    words = [*TEXTS, BERT, "data.path=a.jsonl", "--dry-run"]
    said = succeed(capfd, *words)
    assert "no sample held out of class b, c (data.stratify=true holds out" in said
    assert "held out at random: one class has only 2 samples" in said
    said = succeed(capfd, *words, "data.stratify=true")
    assert "35 samples to train on, 5 held out; 3 classes: a (27), b (7), c (1)" in said
    assert "no sample held out" not in said
    write_images("pets", per_class=4)
    for name in ("a.heic", "b.AVIF", "c.jfif", "d.jfif", "notes.txt"):
        Path("pets/red", name).touch()
    words = [*IMAGES, "trainer.steps=1", "data.stratify=true", "data.drop_last=true"]
    said = succeed(capfd, *words, "--dry-run")
    assert "3 held out; 3 classes: blue (3), green (3), red (3)" in said
    assert "5 files of other types not read: 2 jfif, 1 heic, 1 avif, 1 txt" in said


def test_the_share_of_each_class_is_held_out_by_default_but_not_in_an_earlier_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    labels = ["a"] * 34 + ["b"] * 6
    write_jsonl("a.jsonl", [{"text": "plot", "label": label} for label in labels])
    words = [*TEXTS, BERT, "data.path=a.jsonl"]
    said = succeed(capfd, *words)
    assert "36 samples to train on, 4 held out; 2 classes: a (31), b (5)" in said
    run = Path("outputs/t/config.yaml")
    config = yaml.safe_load(run.read_text())
    del config["data"]["stratify"]
    run.write_text(yaml.safe_dump(config))
    said = succeed(capfd, *words, "trainer.steps=2")
    assert "2 classes: a (30), b (6)" in said
    assert "no sample held out of class b (data.stratify=true holds out" in said
    said = fail(capfd, *words, "trainer.steps=3", "data.stratify=true")
    assert "data.stratify=(not set), not true" in said
    assert "must be auto, true or false" in fail(capfd, *words, "run_name=b", "data.stratify=no")


@pytest.mark.thorough
def test_a_class_without_samples_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    write_jsonl("t.jsonl", [{"text": "a plot", "label": 1 + i % 2} for i in range(20)])
    said = succeed(capfd, *TEXTS, BERT, "data.path=t.jsonl")
    assert said.count("no training samples for class 0") == 1


def test_splits_of_other_orders_of_names_are_matched_by_name(tmp_path: Path) -> None:
    import datasets

    from hybridtrain.datasets import hf_datasets

    splits = {}
    for split, names in (("train", ["neg", "pos"]), ("test", ["pos", "neg"])):
        features = datasets.Features(
            text=datasets.Value("string"), label=datasets.ClassLabel(names=names)
        )
        splits[split] = datasets.Dataset.from_list(rows(8), features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    found = hf_datasets("saved", "tokenizer.json")
    labels = [[int(label) for _, label in half] for half in (found.train, found.eval)]
    assert labels == [[0, 1] * 4, [0, 1] * 4]


@pytest.mark.thorough
def test_a_run_keeps_the_names_of_its_classes_and_the_number_of_its_samples(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_images("pets", {"train": 4, "Val": 2})
    write_images("other", {"train": 4, "Val": 2})
    succeed(capfd, *IMAGES, "trainer.steps=2")
    Path("other/train/blue").rename("other/train/zzz")
    Path("other/Val/blue").rename("other/Val/zzz")
    said = fail(capfd, "evaluate", "run_name=pets", "data.root=other")
    assert "has the class zzz" in said
    assert "blue, green, red" in said
    Image.new("RGB", (40, 40)).save("pets/train/green/new.png")
    # the split of the evaluation has its own folder, so the training images are not read
    assert "training samples" not in succeed(capfd, "evaluate", "run_name=pets")
    longer = ["run_name=pets", "trainer.steps=3"]
    assert "12 training samples then, 13 now" in fail(capfd, *longer)
    assert main([*longer, "allow_changes=true"]) == 0


@pytest.mark.thorough
def test_a_run_is_evaluated_on_another_file_by_the_names_of_its_classes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_jsonl("t.jsonl", rows(20))
    write_jsonl("new.jsonl", [row for row in rows(14) if row["label"] == "pos"])
    write_jsonl("odd.jsonl", [{"text": "the plot", "label": "odd"}])
    succeed(capfd, *TEXTS, BERT, "data.path=t.jsonl")
    for command in ("evaluate", "predict"):
        said = succeed(capfd, command, "run_name=t", "data.eval_path=new.jsonl")
        assert "data: 7 samples to " in said
    lines = Path("outputs/t/predictions/step_00000001.jsonl").read_text().splitlines()
    assert [json.loads(line)["sample"] for line in lines] == [*range(7)]
    told = fail(capfd, "evaluate", "run_name=t", "data.eval_path=odd.jsonl")
    assert "has the class odd, which is not one of data.classes= neg, pos" in told
    longer = ["run_name=t", "trainer.steps=2", "data.eval_path=new.jsonl"]
    assert "has data.eval_path=null, not new.jsonl" in fail(capfd, *longer)


def test_an_image_is_read_as_a_person_sees_it(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 16, dtype=np.uint16).reshape(4, 4)
    Image.fromarray(grey).save("grey.png")
    found = np.asarray(images.read_image("grey.png"))[..., 0]
    assert np.array_equal(found, (grey / 257).round())
    photo = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save("turned.png", exif=exif)
    turned = np.asarray(images.read_image("turned.png"))
    assert np.array_equal(turned, np.rot90(np.asarray(photo), -1))
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save("clear.png")
    assert np.asarray(images.read_image("clear.png")).min() == 255
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save("cmyk.tif")
    assert images.read_image("cmyk.tif").getpixel((0, 0)) == (255, 0, 0)
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    assert images.read_image("moving.gif").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.thorough
def test_folders_of_splits_are_known_by_many_names_and_others_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_images("pets", {"Training": 3, "DEV": 2, "extra": 1})
    said = succeed(capfd, *IMAGES, "trainer.steps=1")
    assert (
        "data: 9 samples to train on, 6 to evaluate; 3 classes: blue (3), green (3), red (3)"
        in said
    )
    assert "not used: extra/" in said
    assert "15 png from pets/Training and pets/DEV" in said
    Path("pets/Training/red/0.png").write_bytes(Path("pets/Training/red/0.png").read_bytes()[:300])
    message = fail(capfd, *IMAGES, "trainer.steps=9", "run_name=damaged", "model=basicnet")
    assert message.startswith("error: pets/Training/red/0.png cannot be read as an image")
    assert "__getitem__" not in message


@pytest.mark.thorough
def test_texts_that_a_model_cannot_take_are_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_jsonl("t.jsonl", [{"text": "the plot " * 20, "label": i % 2} for i in range(20)])
    for kind, positions in (("bert", 16), ("roberta", 15), ("gpt2", 16)):
        config = f"{{model_type: {kind}, max_position_embeddings: 16}}"
        told = fail(capfd, *TEXTS, "data.path=t.jsonl", f"model.config={config}")
        assert f"{positions} positions: set data.max_len={positions}" in told
    bert = "model.config={model_type: bert, hidden_size: 16, num_hidden_layers: 1, " \
        "num_attention_heads: 2, intermediate_size: 16, max_position_embeddings: 16}"  # fmt: skip
    write_jsonl("short.jsonl", rows(20))
    short = [*TEXTS, bert, "data.path=short.jsonl", "run_name=short"]
    of_bert = "up to 42 tokens, but the model only has 16 positions: set data.max_len=16"
    write_jsonl("long.jsonl", [{**row, "text": "the plot " * 20} for row in rows(20)])
    assert of_bert in fail(capfd, *short, "data.eval_path=long.jsonl")
    assert "has 16 positions" in fail(capfd, *short, "data.pad=max_len")
    succeed(capfd, *short)
    assert of_bert in fail(capfd, "predict", "run_name=short", "data.predict_path=long.jsonl")
    own = [*TEXTS, BERT, "data.path=t.jsonl", "data.max_len=8", "model.pad_index=3"]
    assert "model.pad_index=3" in fail(capfd, *own)


@pytest.mark.thorough
def test_an_export_has_the_names_of_classes_and_the_special_tokens_of_its_tokenizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    write_bert(tmp_path / "bert")  # for its tokenizer, whose end of text is [SEP]
    write_jsonl("t.jsonl", rows(20))
    gpt2 = "model.config={model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 32}"
    words = [*TEXTS, "data.tokenizer=./bert", "data.path=t.jsonl", gpt2, "data.max_len=16"]
    succeed(capfd, *words)
    succeed(capfd, "export", "run_name=t", "format=transformers")
    (folder,) = Path("outputs/t/export").iterdir()
    pipe = transformers.pipeline("text-classification", str(folder))
    assert pipe("good film")[0]["label"] in ("neg", "pos")
    succeed(capfd, *words, "data.task=causal_lm", "run_name=lm", "data.max_len=8")
    for form in ("transformers", "safetensors"):
        succeed(capfd, "export", "run_name=lm", f"format={form}")
    folder, file = sorted(Path("outputs/lm/export").iterdir())
    net = transformers.AutoModelForCausalLM.from_pretrained(folder)
    end = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    assert net.config.eos_token_id == net.generation_config.eos_token_id == end
    assert net.config.bos_token_id is None
    net.load_state_dict(load_file(file))  # with both names of the tied weights
    assert torch.equal(net.lm_head.weight, net.transformer.wte.weight)


@pytest.mark.thorough
def test_a_key_of_the_recipe_for_another_model_is_left_out_with_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_images("pets", {"train": 4, "val": 2})
    own = [word for word in IMAGES if not word.startswith("model")]
    said = succeed(capfd, *own, "trainer.steps=1", "model=basicnet")
    assert "model.name=vit_b_16: hybridtrain.models.basicnet " in said


@pytest.mark.thorough
def test_a_model_of_transformers_for_another_task_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_images("pets", {"train": 4, "val": 2})
    own = [word for word in IMAGES if not word.startswith("model")]
    told = fail(
        capfd, *own, "trainer.steps=1", "model=transformers", "model.config={model_type: vit}"
    )
    assert "AutoModelForSequenceClassification of vit: Unrecognized configuration class" in told
    assert "task=classification " in told


@pytest.mark.thorough
def test_a_checkpoint_of_lightning_gives_its_weights_and_an_error_of_pytorch_has_no_escapes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    import torch

    from hybridtrain.models import basicnet

    state = basicnet(10, 8, 1).state_dict()
    torch.save({"state_dict": {f"model.{k}": v for k, v in state.items()}}, "lightning.ckpt")
    run = ["recipe=digits", "world.devices=cpu", "trainer.steps=1", "run_name=digits"]
    said = succeed(capfd, *run, "init_from=lightning.ckpt")
    assert f"lightning.ckpt: {len(state)} tensors loaded" in said
    assert "'model.'" in said
    torch.save({"state_dict": state, "more": Path("x")}, "pickled.ckpt")
    message = fail(capfd, *run[:-1], "run_name=other", "init_from=pickled.ckpt")
    assert "init_from=pickled.ckpt" in message
    assert "state_dict()" in message
    assert "\x1b" not in message
