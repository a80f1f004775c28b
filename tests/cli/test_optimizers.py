"""The optimizers of `optim`: fused kernels, Muon, state in 8 bits, and those that are refused."""

import json
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_runs import LAST, assert_same_checkpoint, fail, succeed
from safetensors.torch import load_file
from support.launch import SMALL
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.cli.run.components import build_model_optimizer, optimizer_state
from hybridtrain.errors import ConfigError
from hybridtrain.models import gpt

QUIET = ("monitor.report=false", "monitor.tensorboard=false")


def option(name: str, **changes: Any) -> dict[str, Any]:
    """The config of `optim=<name>`, with changes; None removes a key."""
    text = (files("hybridtrain.configs") / "optim" / f"{name}.yaml").read_text()
    return {k: v for k, v in {**yaml.safe_load(text), **changes}.items() if v is not None}


def fused(optim: dict[str, Any], net: nn.Module | None = None) -> Any:
    """The value of `fused` in the last group of an optimizer of the command line."""
    model = HybridModel(net or nn.Linear(2, 2), World.from_env(devices="cpu"))
    return build_model_optimizer(optim, model).param_groups[-1].get("fused")


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_an_optimizer_is_fused_unless_it_is_turned_off_or_cannot_be(name: str) -> None:
    assert fused(option(name)) is True
    assert not fused(option(name, fused=False))
    assert not fused(option(name, fused=None))  # as in the config of an older run
    assert not fused(option(name, foreach=False))
    assert not fused(option(name, differentiable=True))
    assert not fused(option(name), nn.Embedding(3, 2, sparse=True))
    assert not fused(option(name), nn.Linear(2, 2, dtype=torch.complex64))
    assert fused(option(name), nn.Linear(2, 2, dtype=torch.bfloat16)) is True
    groups = [{"match": "bias", "_target_": "torch.optim.SGD", "lr": 0.1}]
    assert fused(option(name, groups=groups)) is True
    assert not fused(option(name, groups=groups, fused=None))


def test_the_adamw_of_muon_is_fused_and_other_optimizers_ignore_auto() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert fused(option("muon"), net) is True
    assert not fused(option("muon", fused=False), net)
    assert fused(option("adadelta", fused="auto")) is None


@pytest.mark.thorough
def test_a_run_that_began_without_the_key_resumes_without_fused_kernels(
    capfd: pytest.CaptureFixture[str],
) -> None:
    older = [*SMALL, *QUIET, "~optim.fused"]
    succeed(capfd, *older, "run_name=whole")
    succeed(capfd, *older, "trainer.steps=4", "run_name=old")
    said = succeed(capfd, *SMALL, *QUIET, "run_name=old")
    assert "optim.fused" in said
    assert "(recipe: auto)" in said
    assert "fused" not in Path("outputs/old/config.yaml").read_text()
    runs = [Path(f"outputs/{name}/checkpoints") / LAST for name in ("old", "whole")]
    assert_same_checkpoint(*runs)
    for run in runs:
        groups = json.loads((run / "optimizer.json").read_text())["param_groups"]
        assert [group["fused"] for group in groups] == [None]


@pytest.mark.parametrize("optim", ["muon", "adamw8bit"])
@pytest.mark.quick_cases("adamw8bit")
def test_a_run_with_muon_or_state_in_8_bits_resumes_bitwise_on_other_stages(
    optim: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if optim == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    run = [*SMALL, *QUIET, f"optim={optim}", "pipeline.nb_part=2"]
    said = succeed(capfd, *run, "run_name=whole")
    assert ("Muon updates 1 of 8 weights (32,768 of 53,002 parameters)" in said) == (
        optim == "muon"
    )
    shutil.copytree("outputs/whole", "outputs/halves")
    shutil.rmtree(f"outputs/halves/checkpoints/{LAST}")
    changed = ("pipeline.nb_part=3", "pipeline.schedule=zb-h1")
    said = succeed(capfd, *run[:-1], *changed, "run_name=halves")
    assert "at step 4 of 6" in said
    runs = [Path(f"outputs/{name}/checkpoints") / LAST for name in ("halves", "whole")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, whole = [load_file(run / file) for run in runs]
        for name in ours.keys() | whole.keys():
            if name in whole or "qmap" not in name:  # a table that the parameters share at first
                assert torch.equal(ours[name], whole[name]), name
    bytes_of_state = (runs[0] / "optimizer.safetensors").stat().st_size
    assert (bytes_of_state < 2 * 53_002 * 2) == (optim == "adamw8bit")


def test_a_rule_with_use_muon_decides_for_its_parameters() -> None:
    net = nn.Sequential()
    for name in ("first", "second", "head"):
        net.add_module(name, nn.Linear(4, 4))
    ours = HybridModel(net, World.from_env(devices="cpu"))
    rules = [{"match": "first.*", "lr": 0.1, "use_muon": False}, {"match": "*.bias", "lr": 0.2}]
    config = {"_target_": "hybridtrain.step.muon.MuonAdamW", "lr": 0.02, "adamw_lr": 0.01}
    optimizer = build_model_optimizer({**config, "groups": rules}, ours)
    groups = [(g["use_muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert groups == [(True, 0.02, 1), (False, 0.05, 2), (False, 0.1, 2), (False, 0.01, 1)]
    with pytest.raises(ConfigError, match=r"did you mean optim\.groups\.0\.weight_decay"):
        build_model_optimizer({**config, "groups": [{"match": "*", "weight_decy": 0}]}, ours)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"_target_": "torch.optim.AdamW", "fused": "auto"},
    "sgd": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    "adafactor": {"_target_": "torch.optim.Adafactor"},
    "muon": {"_target_": "hybridtrain.step.muon.MuonAdamW"},
    "two": {
        "_target_": "torch.optim.AdamW",
        "groups": [{"match": "h.0.*", "_target_": "torch.optim.SGD", "lr": 0.1}],
    },
    "adamw8bit": {"_target_": "bitsandbytes.optim.AdamW8bit"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_state_are_known_for_each_parameter_before_the_first_step(
    name: str,
) -> None:
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    net = gpt(500, 32, n_layer=2)
    if name == "two":
        OPTIMIZERS["two"]["groups"][0]["match"] = next(iter(dict(net.named_parameters())))
    predicted = optimizer_state(OPTIMIZERS[name])(net)
    model = HybridModel(net, World.from_env(devices="cpu"))
    optimizer = build_model_optimizer(OPTIMIZERS[name], model)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for key, parameter in net.named_parameters():
        state = optimizer.state[parameter].values()
        held = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
        assert predicted[key] == pytest.approx(held, rel=1e-3), key
    if name == "adamw8bit":
        weights = sum(p.nbytes for p in net.parameters())
        assert sum(predicted.values()) < 0.6 * weights  # AdamW: 2


def test_a_plan_counts_the_bytes_of_state(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    bytes_of = {}
    for optim in ("adamw", "adamw8bit"):
        succeed(capfd, "plan", *SMALL, f"optim={optim}", f"run_name={optim}")
        stages = yaml.safe_load(Path(f"outputs/{optim}/plan.yaml").read_text())["stages"]
        costs = [layer["weight_bytes"] for stage in stages for layer in stage["layers"]]
        bytes_of[optim] = sum(costs)
    # the largest matrix has 32,768 weights, and moments of 2 bytes instead of 8
    assert bytes_of["adamw"] - bytes_of["adamw8bit"] > 5 * 32_768


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.fused=maybe"], "optim.fused=maybe must be auto, true or false"),
        (["optim=adadelta", "+optim.fused=true"], "optim.fused: unknown key"),
        (["optim._target_=torchao.optim.AdamW8bit"], "a checkpoint cannot store"),
        (["optim._target_=torchao.optim.AdamW8bit", "allow_targets=[torchao]"], "cannot store"),
        (["optim._target_=bitsandbytes.nn.Linear4bit"], "is not allowed"),
    ],
)
def test_an_optimizer_that_cannot_be_is_one_line(
    overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capfd, *SMALL, *overrides)


def test_a_missing_bitsandbytes_names_the_extra(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "bitsandbytes":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.startswith("bitsandbytes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Missing(), *sys.meta_path])
    said = fail(capfd, *SMALL, "optim=adamw8bit")
    assert said.startswith(
        "error: optim._target_=bitsandbytes.optim.AdamW8bit: there is no package bitsandbytes: "
        "pip install 'hybridtrain[bnb]'"
    )
