"""What an error tells the user to type is typed here, and gets further.

`TRIED` has the errors, each with what a user types to get it and to follow its advice. The file
`advice_not_tried.txt` has those that wait for a test. A new error with advice fails
`test_every_advice_is_tried_or_waits_for_its_test` until it has a case here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.advice import advice_in
from support.launch import SMALL
from support.small_hub import write_bert, write_reviews

from hybridtrain.cli import main

PACKAGES = ("cli", "datasets", "models")
NOT_TRIED = Path(__file__).with_name("advice_not_tried.txt")
# May only become smaller.
MOST_NOT_TRIED = 99

GROUPS = "+optim.groups=[{match: '*', _target_: torch.optim.SGD, lr: 0.1}]"
SUBMIT = ("submit", "recipe=digits", "--dry-run")
TEXTS = (
    *("recipe=bert_classifier", "model.source=./bert", "data.path=reviews.jsonl"),
    *("data.max_len=16", "data.batch_size=8", "trainer.epochs=null", "trainer.steps=1"),
    *("world.devices=cpu", "lr_schedule.warmup_steps=0", "monitor.report=false"),
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


@dataclass(frozen=True)
class Case:
    """An error and the ways out that it names.

    Attributes:
        part: a part of the error as it is in the sources, which no other error has.
        words: what a user types to get the error, in a folder with the run outputs/digits.
        typed: for each way out, what the user types then, instead of words with the same keys.
        removed: the words to remove, if the advice is to remove them.
        setup: writes files.
    """

    part: str
    words: tuple[str, ...]
    typed: tuple[tuple[str, ...], ...] = ()
    removed: tuple[str, ...] = ()
    setup: Callable[[], None] = lambda: None


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
    Case("to use the run as it is, set", (*SMALL, "seed=3"),
         (*OTHER, ("allow_changes=true",)), removed=("seed=3",)),
    Case("to use your own package", (*SMALL, "run_name=new", "model._target_=mine.net",
         "trainer.loss=cross_entropy"),
         (("allow_targets=[mine]",),), setup=own_module),
    Case("keeps the run the same on any number", (*SMALL, "run_name=new", "world.replicas=2",
         "data.batch_size=auto"), (("data.batch_size=32",),)),
    Case("chooses the number of stages, but", (*SMALL, "run_name=new", "pipeline.nb_part=auto",
         "pipeline.split=[3,4]"), (("pipeline.nb_part=2",), ("pipeline.split=balanced",))),
    Case("makes several optimizers", (*SMALL, "run_name=new", "world.shard=optimizer", GROUPS),
         (("world.shard=none",),)),
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
    Case("no such file or folder ({}): set tokenizer= to its place",
         (*TEXTS, "data.tokenizer=./nothing"), (("data.tokenizer=./words",),),
         setup=bert_without_tokenizer),
    Case("the folder has no tokenizer", TEXTS, (("data.tokenizer=./words",),),
         setup=bert_without_tokenizer),
]  # fmt: skip


def test_every_advice_is_tried_or_waits_for_its_test() -> None:
    sources = [*advice_in(*PACKAGES)]
    tried = {case.part: [text for text in sources if case.part in text] for case in TRIED}
    assert {part: texts for part, texts in tried.items() if len(texts) != 1} == {}
    waiting = NOT_TRIED.read_text(encoding="utf-8").splitlines()
    others = {*sources} - {text for texts in tried.values() for text in texts}
    assert others - {*waiting} == set(), "add a case to TRIED for each of these"
    assert {*waiting} - others == set(), "remove these from advice_not_tried.txt"
    assert len(waiting) <= MOST_NOT_TRIED


@pytest.mark.parametrize("case", TRIED, ids=lambda case: case.part)
@pytest.mark.quick_cases(6)
@pytest.mark.usefixtures("copied")
def test_the_advice_of_an_error_gets_further(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case.setup()
    assert main(case.words) == 2
    said = capfd.readouterr().err
    # what the sources format may stand between the words of a part
    pieces = [piece for piece in case.part.split("{}") if piece.strip(" :()")]
    pieces = [piece.replace("tokenizer= to", "data.tokenizer= to") for piece in pieces]
    assert all(piece.strip("(): ") in said for piece in pieces), said
    ways = [*case.typed, *([()] if case.removed else [])]
    for way in ways:
        keys = {word.partition("=")[0] for word in way}
        assert all(key in said for key in keys), (keys, said)
        gone = case.removed if not way else ()
        assert all(word in said or word.partition("=")[0] in said for word in gone)
        words = [w for w in case.words if w.partition("=")[0] not in keys and w not in gone]
        code = main([*words, *way])
        after = capfd.readouterr().err
        assert code in (0, 2), after
        assert code == 0 or not all(piece.strip("(): ") in after for piece in pieces), after
