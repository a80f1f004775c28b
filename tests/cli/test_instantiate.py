"""The targets that a config may name, and the checks of their arguments."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.launch import SMALL
from torch import nn

from hybridtrain.cli import main
from hybridtrain.cli.config import targets as instantiate
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import (
    build_lr_schedule,
    build_optimizer,
    optimizer_state,
)
from hybridtrain.errors import ConfigError

# A user's package, which makes a file when it is imported.
MY_NETS = """
from functools import cache
from pathlib import Path
from shutil import which
from torch import nn

Path("imported").touch()
which = cache(which)  # an object that is neither a class nor a function
seen = {}

def net(num_classes, image_size=None, channels=1, **more):
    seen.update(more, num_classes=num_classes, image_size=image_size)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size**2, num_classes), nn.LogSoftmax(1)
    )

def nothing(*given, **more):
    return more
"""


@pytest.fixture
def my_nets(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the package, which is importable only from the working directory."""
    Path("my_nets.py").write_text(MY_NETS)
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return "my_nets"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("optim", "os.system"),
        ("optim", "builtins.eval"),
        ("optim", "torch.optim.os.system"),
        ("optim", "torch.optim.adamw.torch.load"),  # a name that passes through the package
        ("optim", "torch.optimizer.Adam"),
        ("optim", "torch.optim"),
        ("optim", "torch.optim."),
        ("model", "torch.load"),
        ("model", "torch.hub.load"),
        ("model", "torch.nn.init.torch.load"),
        ("model", "torch.nn.modules.module.torch.hub.load"),
        ("model", "torch.optim.AdamW"),
        ("model", "hybridtrain.cli.command_line.main"),
        ("model", "hybridtrain.models.basicnet.__globals__"),
        ("data", "hybridtrain.datasets.digits.__builtins__"),
        ("data", "pathlib.Path"),
        ("lr_schedule", "torch.optim.AdamW"),
        ("lr_schedule", "torch.optim.lr_scheduler.types.FunctionType"),
        ("trainer.metrics", "torch.nn.Linear"),
        # callables of the packages themselves, which load a pickle or import a module by its name
        ("model", "torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict"),
        ("model", "torchvision.models.feature_extraction.create_feature_extractor"),
        ("model", "torch.nn.Embedding.from_pretrained"),
        ("model", "torch.nn.attention._fa3._fa3_import_module"),
        ("trainer.loss", "torch.nn.attention._fa3.register_flash_attention_fa3"),
        ("trainer.loss", "torch.nn.Linear"),
        ("trainer.loss", "hybridtrain.loss.importlib.import_module"),
        ("trainer.metrics.fid", "torchmetrics.text.BERTScore"),
        ("trainer.metrics.fid", "torchmetrics.text.bert.BERTScore"),
        ("trainer.metrics.fid", "torchmetrics.functional.text.bert_score"),
        ("callbacks.mine", "hybridtrain.observe.trackers.MetricsFile"),
        ("data", "hybridtrain.data.DataSplits"),
        ("model", None),
        ("model", 3),
        ("model", ["torch.nn.Linear"]),
    ],
)
def test_a_target_that_does_not_fit_its_key_is_refused(key: str, path: object) -> None:
    assert f"{key}._target_={path}" in refusal(lambda: instantiate.resolve(key, path))


@pytest.mark.parametrize("command", ["plan", "evaluate"])
@pytest.mark.parametrize(
    ("key", "target", "keys"),
    [
        (
            "model",
            "torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict",
            {"model_dir": ".", "file_name": "evil.pth"},
        ),
        (
            "trainer.loss",
            "torch.nn.attention._fa3._fa3_import_module",
            {"module_path": "evil_module"},
        ),
    ],
)
@pytest.mark.quick_cases("trainer.loss-torch.nn.attention._fa3._fa3_import_module-keys1-plan")
def test_a_recipe_and_the_config_of_a_run_directory_run_no_code(
    command: str,
    key: str,
    target: str,
    keys: dict[str, str],
    capfd: pytest.CaptureFixture[str],
    copied: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Command:
        def __reduce__(self) -> Any:
            return Path.touch, (Path("ran").absolute(),)

    torch.save(Command(), "evil.pth")
    Path("evil_module.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.syspath_prepend(".")
    of_run = copied / "config.yaml"
    config = OmegaConf.load(of_run) if command == "evaluate" else OmegaConf.create()
    OmegaConf.update(config, key, {"_target_": target, **keys}, merge=False)
    OmegaConf.save(config, of_run if command == "evaluate" else "evil.yaml")
    words = ["run_name=digits" if command == "evaluate" else "recipe=evil.yaml"]
    assert main([command, *words, "world.devices=cpu"]) == 2
    assert f"error: {key}._target_={target} is not allowed" in capfd.readouterr().err
    assert not Path("ran").exists()


def test_the_help_of_a_recipe_calls_nothing_that_it_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    handler = {"class": "logging.FileHandler", "filename": "written"}
    logging = {"handlers": {"evil": handler}, "root": {"handlers": ["evil"]}}
    OmegaConf.save({"hydra": {"hydra_logging": logging}}, "evil.yaml")
    assert main(["plan", "recipe=evil.yaml", "--help"]) == 0
    assert "usage: hybridtrain plan" in capfd.readouterr().out
    assert not Path("written").exists()


def test_what_an_allowed_module_has_only_imported_is_refused(
    my_nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    assert instantiate.resolve("model", f"{my_nets}.nn.Linear", [my_nets]) is nn.Linear
    for imported in ("Path", "which", "nn.init.torch.load", "nn.Embedding.from_pretrained"):
        path = f"{my_nets}.{imported}"
        assert f"{path} is not allowed: " in refusal(
            lambda path=path: instantiate.resolve("model", path, [my_nets])
        )


def test_a_refused_target_is_not_called() -> None:
    config = {"_target_": "os.system", "command": "touch called"}
    message = refusal(lambda: instantiate.build("model", config, nn.Module))
    assert "allow_targets=[its.name]" in message
    assert not Path("called").exists()


def test_a_nested_target_is_passed_on_and_not_called(
    my_nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    nested = {"_target_": "os.system", "command": "touch called"}
    config = {"_target_": f"{my_nets}.nothing", "a": nested, "b": [nested]}
    assert instantiate.build("model", config, dict, [my_nets]) == {"a": nested, "b": [nested]}
    overrides = ["+model.a={_target_:os.system,command:'touch called'}", "+model._partial_=true"]
    composed = compose_config(["model=basicnet", *overrides]).model
    assert composed["a"] == nested
    message = refusal(lambda: instantiate.build("model", composed, nn.Module))
    assert re.match("model.(a|_partial_): unknown key", message)
    assert not Path("called").exists()


def test_optim_and_lr_schedule_refuse_targets_of_another_kind(
    my_nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    mine = {"_target_": f"{my_nets}.nothing"}
    message = refusal(lambda: build_optimizer(mine, [weight], [my_nets]))
    assert message == (
        "optim._target_=my_nets.nothing must return a torch.optim.optimizer.Optimizer, not dict"
    )
    message = refusal(lambda: build_lr_schedule(mine, optimizer, 5, [my_nets]))
    assert message == (
        "lr_schedule._target_=my_nets.nothing must return a torch.optim.lr_scheduler.LRScheduler, "
        "not dict"
    )
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "warmup_step": 3}
    message = refusal(lambda: build_lr_schedule(schedule, optimizer, 5))
    assert "did you mean lr_schedule.warmup_steps?" in message


def test_the_memory_of_an_optimizer_for_gpus_alone_is_counted_on_the_cpu() -> None:
    config = {"_target_": "torch.optim.AdamW", "lr": 0.1, "capturable": True}
    assert optimizer_state(config)(torch.nn.Linear(3, 2)) == {"weight": 52, "bias": 20}


def test_an_optimizer_with_modes_is_counted_and_one_with_a_closure_refused() -> None:
    schedule_free = {"_target_": "support.schedule_free.ScheduleFree"}
    sizes = optimizer_state(schedule_free, ["support"])(torch.nn.Linear(3, 2, bias=False))
    assert sizes == {"weight": 24}
    asks = {"_target_": "support.schedule_free.AsksForClosure"}
    message = refusal(lambda: optimizer_state(asks, ["support"]))
    assert message.startswith(
        f"optim._target_={asks['_target_']}: this optimizer recomputes the loss"
    )


@pytest.mark.parametrize(
    ("key", "path", "meant"),
    [
        ("optim", "torch.optim.AdamWW", "did you mean AdamW?"),
        ("model", "hybridtrain.models.basicnt", "did you mean basicnet?"),
        ("lr_schedule", "torch.optim.lr_scheduler.CosineAnealingLR", "mean CosineAnnealingLR?"),
    ],
)
def test_a_typo_in_a_target_says_what_was_meant(key: str, path: str, meant: str) -> None:
    assert meant in refusal(lambda: instantiate.resolve(key, path))


def test_null_takes_its_value_from_the_metadata_of_the_data_and_nothing_else_does(
    my_nets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    config = {"_target_": f"{my_nets}.nothing", "a": None, "b": 2, "c": None, "d": 0, "e": False}
    metadata = {"a": 10, "b": 20, "d": 40, "e": 50, "unasked": 60}
    made = instantiate.build("model", config, dict, [my_nets], defaults=metadata)
    assert made == {"a": 10, "b": 2, "c": None, "d": 0, "e": False}


def test_a_null_that_the_target_does_not_take_is_left_out() -> None:
    config = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    inherited = {"num_classes": None, "image_size": None}
    net = instantiate.build("model", config | inherited, nn.Module, defaults={"num_classes": 10})
    assert isinstance(net, nn.Linear)
    with pytest.raises(ConfigError, match=r"model\.image_size: unknown key"):
        instantiate.build("model", config | {"image_size": 8}, nn.Module)


def test_a_users_package_runs_only_if_it_is_allowed(
    my_nets: str, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, "model._target_=my_nets.net", "trainer.steps=2"]
    assert main(overrides) == 2
    assert "error: model._target_=my_nets.net is not allowed" in capfd.readouterr().err
    assert not Path("imported").exists()

    assert main([*overrides, "allow_targets=[my_nets]", "+model.depth=3"]) == 0, capfd.readouterr()
    assert Path("imported").exists()
    seen: dict[str, Any] = sys.modules["my_nets"].seen
    assert seen == {"num_classes": 10, "image_size": 8, "depth": 3}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model", "must return a torch.nn.modules.module.Module, not dict"),
        ("data", "must return a hybridtrain.data.splits.DataSplits, not dict"),
    ],
)
@pytest.mark.quick_cases(1)
def test_the_return_value_of_a_users_target_is_checked(
    key: str, message: str, my_nets: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "allow_targets=[my_nets]", f"{key}._target_=my_nets.nothing"]) == 2
    assert f"{key}._target_=my_nets.nothing {message}" in capfd.readouterr().err


def test_a_tokenizer_by_its_path_must_come_from_an_allowed_package(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, "data=imdb", f"data.root={tmp_path}", f"output_dir={tmp_path}"]
    assert main([*overrides, "data.tokenizer=subprocess:getoutput"]) == 2
    message = capfd.readouterr().err
    assert "data.tokenizer=subprocess.getoutput is not allowed" in message
    assert "allow_targets=[its.name]" in message


@pytest.mark.thorough
def test_a_project_allows_its_package_once_for_all_commands(
    my_nets: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pyproject.toml").write_text('[tool.hybridtrain]\nallow_targets = ["my_nets"]\n')
    overrides = [*SMALL, "model._target_=my_nets.net", "trainer.steps=2"]
    assert main(overrides) == 0, capfd.readouterr()
    assert "allow_targets=[my_nets] (from pyproject.toml)\n" in capfd.readouterr().err
    assert OmegaConf.load("outputs/digits/config.yaml").allow_targets == ["my_nets"]
    assert main(["evaluate", "run_name=digits"]) == 0, capfd.readouterr()
    assert main(["evaluate", "run_name=digits", "allow_targets=[]"]) == 2
    assert "model._target_=my_nets.net is not allowed" in capfd.readouterr().err
    # the file counts in the working directory, and in no directory of runs
    line = "a directory of runs"
    for folder, run in (("outputs", ["output_dir=."]), ("outputs/digits/checkpoints", [])):
        shutil.copy("pyproject.toml", folder)
        with monkeypatch.context() as there:
            there.chdir(folder)
            assert main(["evaluate", "run_name=digits", *run]) == 2
            assert line in capfd.readouterr().err
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main(["evaluate", "run_name=digits", "output_dir=../outputs"]) == 2
    assert "allow_targets=[my_nets]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool", "pyproject.toml: "),
        ("[tool.hybridtrain]\nallow_target = []", "allow_targets and config_dir, not allow_target"),
        ("[tool.hybridtrain]\nallow_targets = 'a'", "must be a list of packages"),
        ("[tool.hybridtrain]\nallow_targets = ['a]', 'b']", "must be a list of packages"),
        ("[tool]\nhybridtrain = 3", "must be a table"),
    ],
)
def test_a_mistake_in_pyproject_is_one_line(
    text: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("pyproject.toml").write_text(text)
    assert main(["plan", *SMALL]) == 2
    assert message in capfd.readouterr().err
