"""What an error tells the user to type is typed here, and gets further.

`TRIED` has the errors, each with what a user types to get it and to follow its advice, `ELSEWHERE`
those that tests of other files try. A new error with advice fails `test_every_advice_is_tried`
until it is in one of them.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.advice import advice_in
from support.launch import SMALL
from support.small_data import write_images
from support.small_hub import (
    write_bert,
    write_chats,
    write_gpt2,
    write_llama,
    write_reviews,
    write_t5,
)

from hybridtrain.cli import main

PACKAGES = ("cli", "datasets", "models")

SUBMIT = ("submit", "recipe=digits", "--dry-run")
TEXTS = (
    *("recipe=bert_classifier", "model.source=./bert", "data.path=reviews.jsonl"),
    *("data.max_len=16", "data.batch_size=8", "trainer.epochs=null", "trainer.steps=1"),
    *("world.devices=cpu", "lr_schedule.warmup_steps=0", "monitor.report=false"),
)

IMAGES = (
    *("recipe=digits", "data=image_folder", "data.root=pets", "data.image_size=8"),
    *("world.devices=cpu", "pipeline.nb_part=1", "data.batch_size=4", "trainer.epochs=null"),
    *("trainer.steps=1", "monitor.report=false"),
)
SEARCH = ("search", "recipe=digits", "optim.lr=0.1,0.2", "search.trials=0")
BATCHES = ("check", "recipe=digits", "pipeline.nb_part=2", "pipeline.chunks=4")
VIT = "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16"
LONG = "a" * 300

CHATS = (
    *("recipe=sft_chat", "model.source=./llama", "model.dtype=float32", "data.path=chats.jsonl"),
    *("data.max_len=24", *TEXTS[4:]),
)


def own_module() -> None:
    Path("mine.py").write_text(
        "from torch import nn\n\ndef net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))\n"
    )


def own_recipe() -> None:
    own_module()
    Path("own.yaml").write_text("allow_targets: [mine]\nrun_name: own\n")


def own_code_of_the_run() -> None:
    own_module()
    path = Path("outputs/digits/config.yaml")
    config = yaml.safe_load(path.read_text()) | {"allow_targets": ["mine"]}
    path.write_text(yaml.safe_dump(config))


def bert_without_tokenizer() -> None:
    write_reviews(Path("reviews.jsonl"), 12)
    write_bert(Path("bert"), layers=1)
    Path("words").mkdir()
    for file in Path("bert").glob("tokenizer*"):
        file.rename(Path("words") / file.name)


def bert() -> None:
    write_reviews(Path("reviews.jsonl"), 12)
    write_bert(Path("bert"), layers=1)


def bert_with_labels(*labels: object, words: int = 3) -> Callable[[], None]:
    def write() -> None:
        bert()
        text = " ".join(["good film story"] * words)
        rows = [{"text": text, "label": label} for label in labels] * 6
        Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def tables_with_two_separators() -> None:
    bert()
    Path("both").mkdir()
    for name, separator in (("a", ";"), ("b", "|")):
        rows = "".join(f"good film{separator}{label}\n" for label in "xy" * 6)
        Path(f"both/{name}.csv").write_text(f"text{separator}label\n{rows}")


def another_tokenizer() -> None:
    bert()
    write_llama(Path("llama"), layers=1)
    Path("llama/config.json").unlink()


def unknown_words() -> None:
    another_tokenizer()
    rows = [{"text": "[MASK] [MASK]", "label": label} for label in "ab"] * 6
    Path("reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokens() -> None:
    (np.arange(40, dtype=np.uint16) % 7).tofile("train.bin")


def llama_without_template() -> None:
    write_llama(Path("llama"), layers=1)
    write_chats(Path("chats.jsonl"), 12)
    Path("llama/chat_template.jinja").rename("my.jinja")


def chats(write: Callable[[Path], object]) -> Callable[[], None]:
    def files() -> None:
        write(Path("llama"))
        write_chats(Path("chats.jsonl"), 12)

    return files


def template_that_ends_otherwise() -> None:
    write_llama(Path("llama"), layers=1)
    write_chats(Path("chats.jsonl"), 12)
    template = Path("llama/chat_template.jinja")
    text = template.read_text()
    template.write_text(text.replace("</s>", "{% if loop.last %}fine{% endif %}</s>"))
    content = "{{ message.content }} </s>"
    assistant = f"{{% generation %}}{content}{{% endgeneration %}}"
    marked = f"{{% if message.role == 'assistant' %}}{assistant}{{% else %}}{content}{{% endif %}}"
    Path("my.jinja").write_text(text.replace(content, marked))


def t5_without_padding_token() -> None:
    bert()
    write_t5(Path("t5"), Path("bert"))
    set_in("t5/tokenizer_config.json", pad_token=None)
    for name in ("config", "generation_config"):
        set_in(f"t5/{name}.json", decoder_start_token_id=None)


def gpt2_without_padding_token() -> None:
    write_reviews(Path("reviews.jsonl"), 12)
    write_gpt2(Path("gpt2"))
    set_in("gpt2/tokenizer_config.json", pad_token=None, eos_token=None)
    set_in("gpt2/config.json", pad_token_id=None)


def set_in(path: str, **values: object) -> None:
    content = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    Path(path).write_text(json.dumps(content | values))


def study(metric: str = "loss", choices: str = "0.1,0.2", enqueued: str = "") -> Callable[[], None]:
    """Returns a function that writes the study of an earlier search."""

    def write() -> None:
        import optuna

        folder = Path("outputs/digits-search")
        folder.mkdir(parents=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = f"sqlite:///{folder.resolve() / 'study.db'}"
        made = optuna.create_study(storage=storage, study_name=folder.name)
        made.set_user_attr("metric", metric)
        values = optuna.distributions.CategoricalDistribution(choices.split(","))
        made.tell(made.ask({"optim.lr": values}), 1.0)
        if enqueued:
            made.enqueue_trial({"optim.lr": enqueued})

    return write


def link_for_the_study() -> None:
    Path("outputs/digits-search").mkdir(parents=True)
    Path("outputs/digits-search/study.db").symlink_to(Path("elsewhere.db").resolve())


def file_at(path: str) -> Callable[[], None]:
    def write() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("")

    return write


def removed(path: str) -> Callable[[], None]:
    return lambda: Path(path).unlink()


def checkpoints_elsewhere() -> None:
    for folder in ("elsewhere", "outputs/new"):
        Path(folder).mkdir()
    Path("outputs/new/checkpoints").symlink_to(Path("elsewhere").resolve())


def sbatch_that_accepts() -> None:
    Path("bin").mkdir()
    Path("bin/sbatch").write_text("#!/bin/sh\necho 1\n")
    Path("bin/sbatch").chmod(stat.S_IRWXU)
    Path("file").write_text("")


def images() -> None:
    write_images("pets", {"train": 4, "val": 2})


def run_on_images() -> None:
    images()
    assert main([*IMAGES, "run_name=pets"]) == 0
    shutil.copy("pets/train/red/0.png", "pets/train/red/new.png")


def config_of_the_run(text: str) -> Callable[[], object]:
    return lambda: Path("outputs/digits/config.yaml").write_text(text)


def link_for_the_run() -> None:
    Path("elsewhere").mkdir()
    Path("outputs/new").symlink_to(Path("elsewhere").resolve())


@dataclass(frozen=True)
class Case:
    """An error and the ways out that it names.

    Attributes:
        part: a part of the error as it is in the sources, which no other error has.
        words: what a user types to get the error, in a folder with the run outputs/digits.
        typed: for each way out, what the user types then, instead of words with the same keys.
        removed: the words to remove, if the advice is to remove them.
        setup: writes files.
        by_hand: does what the advice says to do to files; then the same words get further.
        code: the exit code of the error.
        env: environment variables.
    """

    part: str
    words: tuple[str, ...]
    typed: tuple[tuple[str, ...], ...] = ()
    removed: tuple[str, ...] = ()
    setup: Callable[[], object] = lambda: None
    by_hand: Callable[[], object] | None = None
    code: int = 2
    env: dict[str, str] = field(default_factory=dict)


OTHER = (("run_name=other",),)
TRIED = [
    Case("uploads a transformers folder", ("export", "run_name=digits", "push_to=me/it"),
         (("format=transformers",),)),
    Case("needs a transformers model", ("export", "run_name=digits", "format=transformers"),
         (("format=safetensors",), ("format=torch",))),
    Case("writes the adapter of model.lora", ("export", "run_name=digits", "format=peft"),
         (("format=safetensors",),)),
    Case("needs a fixed batch size", ("plan", "recipe=digits", "run_name=new",
         "hardware=h100", "data.batch_size=auto"), (("data.batch_size=32",),)),
    Case("--check works with a single run", ("submit", "recipe=digits", "--check", "--multirun"),
         removed=("--multirun",)),
    Case("submit.to={} works with a single run", ("submit", "recipe=digits", "--multirun",
         "submit.to=torchrun", "optim.lr=0.1,0.2"), removed=("--multirun",)),
    Case("to train with the new settings", (*SMALL, "optim.lr=0.5"), OTHER),
    Case("turns checkpoints off", (*SMALL, "run_name=new", "checkpoint.every_steps=0",
         "checkpoint.best=loss"), (("checkpoint.every_steps=null",), ("checkpoint.best=null",))),
    Case("the recipe wants to run code from", ("recipe=own.yaml", "trainer.steps=1"),
         (("allow_targets=[mine]",),), setup=own_recipe),
    Case("the run {} uses code from", ("evaluate", "run_name=digits"),
         (("allow_targets=[mine]",),), setup=own_code_of_the_run),
    Case("resumes from its own checkpoints", (*SMALL, "init_from=outputs/digits"), OTHER),
    Case("remove the change to use the run", (*SMALL, "seed=3"),
         (*OTHER, ("allow_changes=true",)), removed=("seed=3",)),
    Case("to use your own package", (*SMALL, "run_name=new", "model._target_=mine.net",
         "trainer.loss=cross_entropy"),
         (("allow_targets=[mine]",),), setup=own_module),
    Case("keeps the run the same on any number", (*SMALL, "run_name=new", "world.replicas=2",
         "data.batch_size=auto"), (("data.batch_size=32",),)),
    Case("chooses the number of stages, but", (*SMALL, "run_name=new", "pipeline.nb_part=auto",
         "pipeline.split=[3,4]"), (("pipeline.nb_part=2",), ("pipeline.split=balanced",))),
    Case("callbacks.{} compares evaluations", (*SMALL, "run_name=new", "trainer.eval_every=null",
         "callbacks=[plateau]"), (("trainer.eval_every=2",), ("trainer.eval_every_epochs=1",))),
    Case("{} compares evaluations, but with", (*SMALL, "run_name=new", "trainer.eval_every=9",
         "callbacks=[plateau]"), (("trainer.eval_every=2",),)),
    Case("needs GPUs: set submit.gpus_per_node=", (*SUBMIT, "world.devices=cuda"),
         (("submit.gpus_per_node=1",),)),
    Case("submit.to=kubernetes needs an image", (*SUBMIT, "submit.to=kubernetes"),
         (("submit.container={image: registry/name:tag}",),)),
    Case("submit.container.runtime=pyxis needs Slurm", (*SUBMIT, "submit.to=torchrun",
         "submit.container={image: my.sqsh, runtime: pyxis}"),
         (("submit.container.runtime=apptainer",),)),
    Case("has no argument for these GPUs", (*SUBMIT,
         "submit.container={image: my.sqsh, runtime: shifter, gpus: amd}"),
         (("submit.container.gpus=none",),)),
    Case("but Slurm signals the run", (*SUBMIT, "submit.time=1m"),
         (("submit.time=90m",), ("submit.signal_s=10",))),
    Case("the GPUs of a process: change", (*SUBMIT, "submit.gpus_per_node=3",
         "pipeline.nb_part=2"), (("submit.processes_per_node=1",), ("pipeline.nb_part=3",))),
    Case("there is no checkpoint in {}: train first", ("evaluate", "recipe=digits",
         "run_name=nothing"), (("run_name=digits",),)),
    Case("resume=null: set resume=auto", ("evaluate", "run_name=digits", "resume=null"),
         (("resume=auto",), ("resume=outputs/digits/checkpoints/step_00000006",))),
    Case("would mix new checkpoints", (*SMALL, "resume=null", "trainer.steps=8"),
         (("resume=auto",), *OTHER)),
    Case("is marked as the best; train with", ("evaluate", "run_name=digits", "resume=best"),
         (("resume=last",),)),
    Case("interval() works only in a search", (*SMALL, "run_name=null", "--multirun",
         "optim.lr=interval(1e-4,1e-3)"), (("optim.lr=1e-4,1e-3",), ("optim.lr=range(1,4)",))),
    Case("would compute only padding", ("check", "recipe=digits", "submit.nodes=2",
         "submit.gpus_per_node=4", "data.batch_size=1"), (("data.batch_size=8",),)),
    Case("not with a sweep (--multirun)", (*SMALL, "--multirun", "--dry-run", "optim.lr=0.1"),
         removed=("--multirun",)),
    Case("not recipe={}: set another", ("evaluate", "run_name=digits", "recipe=mnist_basicnet"),
         removed=("recipe=mnist_basicnet",)),
    Case("is not a config: restore it", (*SMALL,), OTHER, setup=config_of_the_run("[]")),
    Case("so it is not the config of a run", (*SMALL,), OTHER, setup=config_of_the_run("a: 1")),
    Case("has no value: write {}=null", (*SMALL, "run_name=null", "--multirun", "optim.lr="),
         (("optim.lr=null",), ("optim.lr=0.1,0.2",))),
    Case("but world.devices={} already fixes it", (*SMALL, "run_name=new",
         "pipeline.nb_part=auto", "world.devices=[cpu,cpu]"), (("pipeline.nb_part=2",),)),
    Case("but pipeline.{}={} already fixes it", (*SMALL, "run_name=new",
         "pipeline.nb_part=auto", "pipeline.device_speeds=[1,2]"), (("pipeline.nb_part=2",),)),
    Case("does not fit the data, which", (*SMALL, "run_name=new", "model.num_classes=3"),
         removed=("model.num_classes=3",)),
    Case("but there is only one: start all processes", ("plan", *SMALL, "run_name=new",
         "world.engine=distributed",
         "pipeline.nb_part=auto"), (("hardware=h100",),)),
    Case("set output_dir= to the folder that", (*SMALL, "run_name=new"), OTHER,
         setup=link_for_the_run),
    Case("has no chat template", CHATS, (("data.chat_template=my.jinja",),),
         setup=llama_without_template),
    Case("needs a mask token", (*TEXTS, "data.task=masked_lm", "model.task=masked_lm",
         "data.tokenizer=./llama"), (("data.tokenizer=./bert",), ("data.task=causal_lm",)),
         setup=another_tokenizer),
    Case("but classes must be text or whole numbers", TEXTS, (("data.task=regression",),),
         setup=bert_with_labels(0.5, 1.5)),
    Case("has lists: set task=", TEXTS, (("data.task=multilabel",),),
         setup=bert_with_labels(["a", "b"], ["b"])),
    Case("but classes must be numbered from 0", TEXTS, (("data.task=regression",),),
         setup=bert_with_labels(5, 7000)),
    Case("knows none of the words", (*TEXTS, "data.tokenizer=./llama"),
         (("data.tokenizer=./bert",),), setup=unknown_words),
    Case("which selects the model", (*TEXTS, "model.config={model_type: bert}"),
         removed=("model.config={model_type: bert}",), setup=bert),
    Case("but the model only has {} positions", (*TEXTS, "data.max_len=64"),
         (("data.max_len=32",),), setup=bert_with_labels("a", "b", words=20)),
    Case("are too few for one window of seq_len= and", (*SMALL, "run_name=new",
         "data=token_files", "data.root=.", "data.eval=train.bin", "model=gpt"),
         (("data.seq_len=8",),), setup=tokens),
    Case("no such file or folder ({}): set tokenizer= to its place",
         (*TEXTS, "data.tokenizer=./nothing"), (("data.tokenizer=./words",),),
         setup=bert_without_tokenizer),
    Case("the folder has no tokenizer", TEXTS, (("data.tokenizer=./words",),),
         setup=bert_without_tokenizer),
    Case("have different separators: read one of them", (*TEXTS, "data.path=both"),
         (("data.separator=';'",),), setup=tables_with_two_separators),
    Case("freezes the layers that it quantizes", (*CHATS, "model.quantize=nf4",
         "model.lora=null"), (("model.lora=true",), ("model.quantize=null",)),
         setup=chats(write_llama)),
    Case("has no linear layer to quantize", (*SMALL, "run_name=new", "model=torchvision",
         "model.name=resnet18", "model.resize=32", "model.quantize=nf4",
         "model.lora={targets:[fc]}"), removed=("model.quantize=nf4",)),
    Case("both set the warm-up",
         (*SMALL, "run_name=new", "lr_schedule.warmup_steps=2", "lr_schedule.warmup_share=0.5"),
         (("lr_schedule.warmup_steps=0",), ("lr_schedule.warmup_share=0",))),
    Case("its limit is unknown: set hardware=", ("check", "recipe=digits", "world.devices=cuda",
         "submit.gpus_per_node=2"), (("hardware=h100",), ("pipeline.memory_limit_gib=10",)),
         code=0),
    Case("more than the usable {}", (*BATCHES, "data.batch_size=512",
         "pipeline.memory_limit_gib=0.003"),
         (("pipeline.chunks=16",), ("data.batch_size=64",))),
    Case("more than the usable {}", (*BATCHES, "data.batch_size=64",
         "pipeline.memory_limit_gib=0.00058"), (("pipeline.nb_part=4",),)),
    Case("cannot write output={}", ("predict", "run_name=digits", "output=file/a.jsonl"),
         (("output=a.jsonl",),), setup=file_at("file")),
    Case("searches for the {}", SEARCH, OTHER, setup=study(metric="accuracy")),
    Case("which may lead to a file of another program", SEARCH,
         (("search.storage=sqlite:///own.db",),), setup=link_for_the_study,
         by_hand=removed("outputs/digits-search/study.db")),
    Case("has an enqueued trial", (*SEARCH[:-1], "search.trials=3", "search.launcher=false"), OTHER,
         setup=study(enqueued="7")),
    Case("started with {} and cannot", SEARCH, OTHER, setup=study(choices="1,2")),
    Case("there is no sbatch on this machine", SUBMIT[:-1],
         (("--dry-run",), ("submit.to=torchrun",)), env={"PATH": "/nowhere"}),
    Case("cannot write {}: {}; set output_dir=", (*SUBMIT[:-1], "output_dir=file/outputs"),
         (("output_dir=outputs",),), setup=sbatch_that_accepts,
         env={"PATH": f"bin:{os.environ['PATH']}"}),
    Case("must be the name of a machine", ("plan", *SMALL, "run_name=new", "hardware={nodes:2}"),
         (("hardware=h100", "hardware.nodes=2"),)),
    Case("cannot read the run directory", ("evaluate", "run_name=digits", f"output_dir={LONG}"),
         (("output_dir=outputs",),)),
    Case("fewer than the {} micro-batches", (*SMALL, "run_name=new", "data.batch_size=auto",
         "pipeline.chunks=2000"), (("pipeline.chunks=4",),)),
    Case("chooses the number of replicas", (*SMALL, "run_name=new", "pipeline.nb_part=auto",
         "world.engine=distributed", "world.replica_shares=[1,2]"),
         (("pipeline.nb_part=1",), ("world.replica_shares=null",))),
    Case("needs a data set with a method labels", (*SMALL, "run_name=new", "data=token_files",
         "data.root=.", "data.eval=train.bin", "data.seq_len=8", "model=gpt",
         "trainer.class_weights=auto"), (("trainer.class_weights=[1,1,1,1,1,1,1]",),),
         setup=tokens),
    Case("cannot write to the run directory", (*SMALL, "output_dir=file"),
         (("output_dir=other",),), setup=file_at("file")),
    Case("cannot write to the run directory", (*SMALL, "run_name=file"), OTHER,
         setup=file_at("outputs/file")),
    Case("outside the run directory", (*SMALL, "run_name=new"), OTHER,
         setup=checkpoints_elsewhere, by_hand=removed("outputs/new/checkpoints")),
    Case("is not the directory of a run", (*SMALL, "run_name=new"), OTHER,
         setup=file_at("outputs/new/report.html"), by_hand=removed("outputs/new/report.html")),
    Case("free disk space, or", (*SMALL, "run_name=new"), (("output_dir=other",),),
         setup=file_at("outputs/new/overrides.yaml/file")),
    Case("the data has changed since", (*IMAGES, "run_name=pets", "trainer.steps=2"),
         (("allow_changes=true",), (*OTHER[0], "init_from=outputs/pets")), setup=run_on_images),
    Case("differently at the end of a conversation", CHATS,
         (("data.chat_template=my.jinja",), ("data.learn=all",)),
         setup=template_that_ends_otherwise),
    Case("has no padding token: set decoder_start=", ("recipe=t5_summaries", "model.source=./t5",
         *TEXTS[2:]), (('data.decoder_start="[SEP]"',),), setup=t5_without_padding_token),
    Case("pixels per side ({}): pass resize=", (*SMALL, "run_name=new", "model=torchvision",
         "model.name=squeezenet1_1", "model.resize=2", "trainer.steps=1"), (("model.resize=32",),)),
    Case("classifies by the last token", (TEXTS[0], "model.source=./gpt2", *TEXTS[2:]),
         (("model.pad_index=0",),), setup=gpt2_without_padding_token),
    Case("takes token ids, but", (*IMAGES, "run_name=new", "model=transformers",
         "trainer.loss=cross_entropy",
         f"model.config={{model_type: bert, {VIT}}}"),
         (("model.task=image_classification", f"model.config={{model_type: vit, {VIT}, "
           "patch_size: 4}"),), setup=images),
    Case("does not accept the images", (*IMAGES, "run_name=new", "model=transformers",
         "trainer.loss=cross_entropy",
         "model.task=image_classification",
         f"model.config={{model_type: vit, {VIT}, patch_size: 4, image_size: 16}}"),
         (("data.image_size=16",), (f"model.config={{model_type: vit, {VIT}, patch_size: 4}}",)),
         setup=images),
]  # fmt: skip


ELSEWHERE = {
    "generates no text, which data.task=seq2seq needs": (
        "test_predict.py",
        "test_texts_are_not_predicted_but_generated_by_the_export_that_the_error_names",
    ),
    "the chat template does not render them": (
        "test_fine_tuning.py",
        "test_what_is_wrong_in_a_chat_file_is_fixed_by_the_key_that_the_error_names",
    ),
    "does not render tool_calls": (
        "../unit/datasets/test_chat_formats.py",
        "test_calls_of_tools_are_learned_with_their_arguments",
    ),
    "the model was trained on {}: remove features=": (
        "test_tables_of_numbers.py",
        "test_classes_are_learnt_from_numbers_and_predicted_by_name",
    ),
    "columns ({}), separated by {}": (
        "test_real_files.py",
        "test_what_is_wrong_in_a_table_is_fixed_by_the_key_that_the_error_names",
    ),
    "was trained with the tokenizer of": (
        "test_base_files.py",
        "test_a_moved_base_is_followed_if_it_has_the_same_vocabulary",
    ),
    "--multirun does not work under torchrun": (
        "test_ways_out.py",
        "test_a_sweep_under_torchrun_is_submitted_by_the_command_of_the_error",
    ),
    "- (standard input) needs a single process": (
        "test_ways_out.py",
        "test_standard_input_of_two_processes_is_read_by_one_or_from_a_file",
    ),
    "cannot write its cache": (
        "test_ways_out.py",
        "test_a_cache_that_cannot_be_written_is_moved_by_the_variable_of_the_error",
    ),
    "does not see the run directory": (
        "../distributed/test_own_disks.py",
        "test_a_run_that_only_one_host_has_goes_on_by_what_the_error_says",
    ),
    "which reads and writes checkpoints, has": (
        "../distributed/test_own_disks.py",
        "test_a_run_that_only_one_host_has_goes_on_by_what_the_error_says",
    ),
    "this machine has not been measured yet": (
        "test_plan_for_hardware.py",
        "test_measure_machine_writes_what_this_machine_reads",
    ),
}
"""Errors whose advice a test of another file types: a part of the error, the file and the test."""


@pytest.mark.parametrize(("file", "test"), ELSEWHERE.values())
def test_a_test_that_tries_an_advice_elsewhere_exists(file: str, test: str) -> None:
    assert f"def {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_every_advice_is_tried() -> None:
    sources = [*advice_in(*PACKAGES)]
    parts = [*(case.part for case in TRIED), *ELSEWHERE]
    tried = {part: [text for text in sources if part in text] for part in parts}
    assert {part: texts for part, texts in tried.items() if len(texts) != 1} == {}
    others = {*sources} - {text for texts in tried.values() for text in texts}
    assert others == set(), "add a case to TRIED for each of these"


@pytest.mark.parametrize("case", TRIED, ids=lambda case: case.part)
# six that end at once, or train one short run
@pytest.mark.quick_cases(
    "resume=null: set resume=auto", "would compute only padding", "not with a sweep (--multirun)"
)
@pytest.mark.usefixtures("copied")
def test_the_advice_of_an_error_gets_further(
    case: Case, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case.setup()
    capfd.readouterr()
    for name, value in case.env.items():
        monkeypatch.setenv(name, value)
    assert main(case.words) == case.code
    said = "".join(capfd.readouterr())  # `check` prints its problems
    # what the sources format may stand between the words of a part
    pieces = [piece for piece in case.part.split("{}") if piece.strip(" :()")]
    pieces = [
        re.sub(r"\b(task|tokenizer|seq_len|resize|decoder_start)=.*", "", piece) for piece in pieces
    ]
    assert all(piece.strip("(): ") in said for piece in pieces), said
    ways = [*case.typed, *([()] if case.removed or case.by_hand else [])]
    for way in ways:
        keys = {word.partition("=")[0] for word in way}
        assert all(key in said for key in keys), (keys, said)
        gone = case.removed if not way else ()
        assert all(word in said or word.partition("=")[0] in said for word in gone)
        words = [w for w in case.words if w.partition("=")[0] not in keys and w not in gone]
        if not way and case.by_hand:
            case.by_hand()
        code = main([*words, *way])
        after = "".join(capfd.readouterr())
        assert code in (0, 2), after
        is_same = all(piece.strip("(): ") in after for piece in pieces)
        assert not is_same or (code, case.code) == (0, 2), after
