"""Configs, recipes and overrides, composed to the config of a run. Nothing here needs torch."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from support.cases import thinned
from support.launch import single

from hybridtrain.cli import main
from hybridtrain.cli.config import places
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.config.schema import Config, HardwareConfig
from hybridtrain.cli.config.tree import to_tree, to_yaml
from hybridtrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OPTIONS = sorted((ROOT / "configs").glob("*/*.yaml"))


def refusal(*overrides: str) -> str:
    """The message that `overrides` end with."""
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 450
    for jargon in ("full_key", "object_type", "Traceback", "To append to your config"):
        assert jargon not in message
    return message


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return f"recipe={name}"


# Recipes and options


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
@pytest.mark.quick_cases(1)
def test_every_recipe_composes_and_names_its_run(recipe: str) -> None:
    config = compose_config([f"recipe={recipe}"])
    assert config.run_name == recipe
    for part in (config.model, config.data, config.optim, config.lr_schedule):
        assert part["_target_"]
    assert (config.trainer.steps is None) != (config.trainer.epochs is None)


def test_the_recipes_of_the_first_release_exist() -> None:
    assert {path.stem for path in RECIPES} >= {
        "digits",
        "mnist_basicnet",
        "imdb_transformer",
        "python_source_gpt",
    }


@pytest.mark.parametrize(
    "path", thinned(OPTIONS, 3), ids=lambda path: f"{path.parent.name}={path.stem}"
)
@pytest.mark.quick_cases(2)
def test_every_option_of_every_group_composes_with_its_own_values(path: Path) -> None:
    group = path.parent.name
    chosen = getattr(compose_config([f"{group}={path.stem}"]), group)
    values = dataclasses.asdict(chosen) if dataclasses.is_dataclass(chosen) else chosen
    written = OmegaConf.to_object(OmegaConf.load(path))
    written.pop("defaults", None)
    of_the_schema = Config().data if group == "data" else {}
    if group == "hardware":  # a preset has what its data sheet says
        of_the_schema = dataclasses.asdict(HardwareConfig())
    if group == "monitor":  # each names one monitor, and several can be chosen
        of_the_schema = dataclasses.asdict(Config().monitor)
    if group == "submit":  # a size is written upon the defaults
        of_the_schema = dataclasses.asdict(Config().submit)
    assert values == of_the_schema | written


def test_a_command_parses_the_recipe_that_it_names_and_no_other() -> None:
    compose_config(["recipe=digits"])
    held = dict(ConfigStore.instance().repo["recipe"].items())
    unparsed = {name for name, recipe in held.items() if not isinstance(recipe.node, DictConfig)}
    assert {f"{path.stem}.yaml" for path in RECIPES} - unparsed <= {"digits.yaml"}


def test_the_keys_of_a_config_are_checked_on_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Config] = []
    monkeypatch.setattr(places, "to_tree", lambda config: made.append(config) or to_tree(config))
    config = compose_config(["recipe=digits"])
    assert made == [config]
    places.check_places("train", config, [])
    assert made == [config, config]


def test_the_tree_of_a_config_is_what_omegaconf_makes_of_it() -> None:
    config = compose_config(["recipe=digits", "callbacks={own: {_target_: my.Own, list: [1, 2]}}"])
    container = OmegaConf.to_container(OmegaConf.structured(config))
    assert repr({**to_tree(config), "monitor": {}}) == repr({**container, "monitor": {}})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.quick_cases(1)
def test_the_commands_at_the_head_of_a_recipe_compose(path: Path) -> None:
    head = path.read_text().split("\ndefaults:")[0].replace("\\\n#", " ")
    commands = dict(re.findall(r"^# +(1 process|4 GPUs|3 nodes)\b.*? {2,}(\S.*)$", head, re.M))
    assert set(commands) == {"1 process", "4 GPUs", "3 nodes"}
    words = {where: shlex.split(command) for where, command in commands.items()}
    for line in words.values():
        overrides = line[line.index("hybridtrain") + 1 :]
        config = compose_config(overrides)
        assert config.run_name == path.stem
        assert config.pipeline.nb_part == 2
    assert words["1 process"][0] == "hybridtrain"
    for where in ("4 GPUs", "3 nodes"):
        assert words[where][0] == "torchrun"
        assert words[where][words[where].index("--nproc-per-node") + 1] == "2"
    assert words["3 nodes"][words["3 nodes"].index("--nnodes") + 1] == "3"


# Precedence


def test_run_name_defaults_to_the_name_of_the_recipe() -> None:
    assert compose_config([write("mine.yaml", "seed: 1\n")]).run_name == "mine"
    assert compose_config([write("mine.yaml", "run_name: other\n")]).run_name == "other"
    assert compose_config(["recipe=digits", "run_name=third"]).run_name == "third"
    assert compose_config([]).run_name == "run"


def test_a_recipe_overrides_the_defaults_and_an_override_the_recipe() -> None:
    recipe = write(
        "mine.yaml",
        "defaults:\n  - override /optim: sgd\nseed: 7\noutput_dir: there\n"
        "optim:\n  lr: 0.5\npipeline:\n  chunks: 5\n",
    )
    config = compose_config([recipe])
    assert (config.seed, config.output_dir, config.pipeline.chunks) == (7, "there", 5)
    assert config.optim["_target_"] == "torch.optim.SGD"
    assert config.optim["lr"] == 0.5
    assert config.optim["momentum"] == 0.9  # the option's, which the recipe leaves alone
    for overrides in ([recipe, "seed=8", "optim.lr=2"], ["optim.lr=2", "seed=8", recipe]):
        config = compose_config(overrides)
        assert (config.seed, config.optim["lr"], config.pipeline.chunks) == (8, 2, 5)
    assert compose_config([recipe, "optim=adam"]).optim["_target_"] == "torch.optim.Adam"


def test_a_users_config_folder_adds_options() -> None:
    Path("mine/model").mkdir(parents=True)
    Path("mine/model/tiny.yaml").write_text("_target_: mine.tiny\nwidth: 3\n")
    config = compose_config(["model=tiny", "model.width=4"], "mine")
    assert config.model == {"_target_": "mine.tiny", "width": 4}


def test_every_data_set_has_the_settings_of_the_loader() -> None:
    Path("mine/data").mkdir(parents=True)
    Path("mine/data/tiny.yaml").write_text("_target_: mine.tiny\nbatch_size: 8\nworkers: 2\n")
    data = compose_config(["data=tiny", "data.drop_last=true"], "mine").data
    assert (data["workers"], data["drop_last"], data["timeout_s"]) == (2, True, 120)


def test_the_yaml_of_a_config_loads_back_as_the_same_config() -> None:
    config = compose_config(["recipe=digits", "pipeline.split=[5,7]"])
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(to_yaml(config)))
    assert OmegaConf.to_object(merged) == config


# Mistakes


@pytest.mark.parametrize(
    ("override", "message"),
    thinned(
        [
            ("pipeline.chunk=4", "pipeline.chunk: .* did you mean pipeline.chunks?"),
            ("optim.lrr=1", "optim.lrr: .* did you mean optim.lr?"),
            ("pipelin.chunks=3", "pipelin.chunks: .* did you mean pipeline.chunks?"),
            ("chunks=3", "chunks: .* did you mean pipeline.chunks?"),
            ("+trainer.step=3", "trainer.step: .* did you mean trainer.steps?"),
            ("++trainer.step=3", "trainer.step: .* did you mean trainer.steps?"),
            (
                "+trainer.foo=3",
                "trainer.foo: unknown key; the choices are: .*trainer.steps, .*trainer.log_every",
            ),
            ("~optim.lrr", "optim.lrr: .* did you mean optim.lr?"),
            ("trainer.gradient_accumulation_steps=4", ".* did you mean trainer.accumulate?"),
            ("+trainer.max_epochs=4", "trainer.max_epochs: .* did you mean trainer.epochs?"),
            ("learning_rate=1", "learning_rate: .* did you mean optim.lr?"),
            ("outputdir=x", "outputdir: .* did you mean output_dir?"),
            ("recipe=digit", "recipe=digit is unknown: did you mean 'digits'?"),
            ("recipe=zzz", "recipe=zzz .*digits, .*imdb_transformer"),
            ("model=basicnt", "model=basicnt is unknown: did you mean 'basicnet'?"),
            ("pipeline=3", "pipeline=3 is unknown: the choices are: default"),
            ("submit=2x4", "submit=2x4 .* submit.nodes=2 submit.gpus_per_node=4"),
            ("+recipe=digits", r"\+recipe=digits: .* write recipe=digits"),
            ("hydra.sweeep=3", "hydra.sweeep: "),
        ],
        3,
    ),
)
@pytest.mark.quick_cases(1)
def test_a_typo_in_an_override_is_one_line_with_a_suggestion(override: str, message: str) -> None:
    first = [] if "recipe=" in override else ["recipe=digits"]
    assert re.match(message.replace("?", r"\?"), refusal(*first, override))


@pytest.mark.parametrize(
    ("text", "message"),
    thinned(
        [
            ("pipeline:\n  chunk: 4\n", "pipeline.chunk: .* did you mean pipeline.chunks?"),
            ("trainer:\n  stepps: 4\n", "trainer.stepps: .* did you mean trainer.steps?"),
            ("outputdir: x\n", "outputdir: .* did you mean output_dir?"),
            ("trainer:\n  max_grad_norm: 1\n", "trainer.max_grad_norm: .* mean trainer.clip_norm?"),
            ("traner:\n  steps: 4\n", "traner: .* did you mean trainer?"),
            (
                "defaults:\n  - override /model: basicnt\n",
                "model=basicnt is unknown: .* 'basicnet'?",
            ),
            (
                "defaults:\n  - override /modell: gpt\n",
                "recipe/mine: .*modell.* 'override /model'?",
            ),
            (
                "defaults:\n  - override model: gpt\n",
                "recipe/mine: .*model.* mean 'override /model'?",
            ),
            ("trainer:\n  accumulate: two\n", "trainer.accumulate=two must be a whole number"),
            ("trainer:\n  steps: ${trainer.epocs}\n", "trainer.steps: .*trainer.epocs"),
            ("pipeline:\n  chunks: [1\n", "recipe=mine.yaml is not YAML: .*line 2"),
            ("pipeline:\n\tchunks: 1\n", "recipe=mine.yaml is not YAML: .*line 2"),
            ("seed: 1\nseed: 2\n", "recipe=mine.yaml is not YAML: .*duplicate key seed"),
            ("- a\n- b\n", "recipe=mine.yaml .* mapping"),
        ],
        3,
    ),
)
@pytest.mark.quick_cases("seed: 1\\nseed: 2\\n-recipe=mine.yaml is not YAML: .*duplicate key seed")
def test_a_mistake_in_a_users_recipe_is_one_line(text: str, message: str) -> None:
    assert re.match(message.replace("?", r"\?"), refusal(write("mine.yaml", text)))


def test_a_recipe_file_that_cannot_be_read_is_one_line() -> None:
    assert refusal("recipe=there/mine.yaml") == "recipe=there/mine.yaml: No such file or directory"
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal("recipe=binary.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    thinned(
        [
            ("trainer.accumulate=two", "trainer.accumulate=two must be a whole number$"),
            ("trainer.steps=1.5", "trainer.steps=1.5 must be a whole number, or null$"),
            ("trainer.steps=1e3", "trainer.steps=1000.0 must be a whole number, such as 1000, or"),
            ("seed=null", "seed=null must be a whole number$"),
            ("trainer.clip_norm=big", "trainer.clip_norm=big must be a number, or null$"),
            ("trainer.tf32=yess", "trainer.tf32=yess must be true or false$"),
            ("output_dir=null", "output_dir=null must be a text$"),
            ("trainer.metrics=a,b", r"trainer.metrics=a,b: write .* 'trainer.metrics=\[a,b\]'; to"),
            ("run_name=", "run_name= has no value: set one, or leave the key out$"),
            ("monitor.progress=maybe", "monitor.progress=maybe .* true, false"),
            ("allow_targets=3", r"allow_targets=3 must be a list, such as \[a,b\]$"),
            ("trainer.steps=${nowhere}", "trainer.steps: .*nowhere"),
            ("pipeline.chunks=[", r"cannot parse .* 'pipeline.chunks=\['"),
            ("optim.betas=[0.9", "cannot parse .* 'optim.betas="),
            ("a b", "cannot parse .* 'a b'"),
            ("submit.setup=[export A=1,b]", r""".*quotes: 'submit.setup=\["export A=1", "b"\]'$"""),
            ("=3", "cannot parse .* '=3'"),
        ],
        2,
    ),
)
@pytest.mark.quick_cases(1)
def test_a_wrong_value_or_grammar_is_one_line_that_names_the_key(
    override: str, message: str
) -> None:
    assert re.match(message, refusal("recipe=digits", override))


# Flags that show a config


def test_cfg_job_prints_the_recipes_values_without_importing_torch() -> None:
    shown = single(["--cfg", "job", "recipe=digits", "pipeline.chunks=3"], flags="-X importtime")
    assert shown.returncode == 0
    config = yaml.safe_load(shown.stdout)
    assert config["run_name"] == "digits"
    assert config["pipeline"]["nb_part"] == 2
    assert config["pipeline"]["chunks"] == 3
    assert config["trainer"]["clip_norm"] == 1.0
    imported = re.findall(r"^import time:.*\| *(\S+)$", shown.stderr, re.M)
    assert "hydra" in imported  # or the line above reads nothing
    assert [name for name in imported if name.split(".")[0] in ("torch", "numpy")] == []


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--multirun"], []], ids=["cfg", "m", "run"])
@pytest.mark.quick_cases(1)
def test_a_typo_is_reported_in_one_line_whatever_the_flags(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "recipe=digits", "+trainer.step=3"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "error: trainer.step: unknown key; did you mean trainer.steps?\n"


def test_cfg_job_shows_a_users_recipe(capfd: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    assert main(["--cfg", "job", write("there/mine.yaml", "seed: 77\n")]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["seed"] == 77


def test_a_config_is_shown_by_rank_0_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    assert main(["--cfg", "job"]) == 0
    assert capfd.readouterr() == ("", "")


def test_an_unknown_command_is_one_line_that_names_what_was_meant(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for word, meant in (
        ("trian", "did you mean 'train'?"),
        ("qqq", "the commands are: train, "),
    ):
        assert main([word, "recipe=digits"]) == 2
        err = capfd.readouterr().err
        assert err.count("\n") == 1
        assert f"{word!r}: {meant}" in err


def test_a_recipe_cannot_allow_packages_by_itself(tmp_path: Path) -> None:
    recipe = tmp_path / "stranger.yaml"
    recipe.write_text("allow_targets: [subprocess]\ndata: {_target_: subprocess.getoutput}\n")
    with pytest.raises(ConfigError, match=r"subprocess: if you trust it.*allow_targets="):
        compose_config([f"recipe={recipe}"])
    allowed = compose_config([f"recipe={recipe}", "allow_targets=[subprocess]"])
    assert allowed.allow_targets == ["subprocess"]


def test_a_setting_of_an_adapter_needs_no_mapping_before_it() -> None:
    config = compose_config(["recipe=bert_classifier", "model.lora.rank=4", "model.lora.dora=true"])
    assert config.model["lora"] == {"rank": 4, "dora": True}
    config = compose_config(["recipe=sft_chat", "model.lora.rank=4"])
    assert config.model["lora"]["rank"] == 4
    assert config.model["lora"]["targets"] == "all-linear"
