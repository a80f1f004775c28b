"""Config keys in the place of the library's argument names, in messages."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.config.compose import compose_settings
from hybridtrain.cli.config.keys import KEYS, NAMING, OTHER_NAMES
from hybridtrain.cli.config.schema import (
    LOADER_KEYS,
    WRAPPER_KEYS,
    Config,
    HardwareConfig,
    arguments_of,
)
from hybridtrain.cli.config.tree import flat_keys
from hybridtrain.data.fetch import worker_hangs
from hybridtrain.errors import ConfigError, argument, naming, phrase, setting
from hybridtrain.models import WRAPPERS
from hybridtrain.options import PipelineOptions, TrainerOptions


def test_an_argument_becomes_its_config_key_with_the_value_as_yaml_has_it() -> None:
    assert argument("chunks") == "chunks="
    assert setting("keep", None) == "keep=None"
    with naming(NAMING):
        assert argument("chunks") == "pipeline.chunks="
        assert setting("batch_size", 4) == "data.batch_size=4"
        assert setting("drop_last", False) == "data.drop_last=false"
        assert setting("keep", None) == "checkpoint.keep=null"
        assert setting("split", "time", repr) == "pipeline.split='time'"
        assert setting("seed", 3) == "seed=3"
        assert phrase("start a new run") == "set another run_name"
    assert setting("drop_last", False) == "drop_last=False"


def test_arguments_of_a_target_are_named_inside_the_command_line() -> None:
    with naming(NAMING):
        with naming({"chunks": "model.chunks"}):
            assert argument("chunks") == "model.chunks="
            assert setting("keep", None) == "checkpoint.keep=null"
        assert argument("chunks") == "pipeline.chunks="


def test_what_a_user_has_written_stays_in_messages() -> None:
    with naming(NAMING), pytest.raises(ConfigError, match=r"pipeline\.schedule=") as caught:
        PipelineOptions(schedule="x chunks=3")
    assert "pipeline.schedule=x chunks=3 is unknown" in str(caught.value)


def test_other_threads_name_arguments_in_the_same_way() -> None:
    with naming(NAMING), ThreadPoolExecutor() as threads:
        assert threads.submit(argument, "chunks").result() == "pipeline.chunks="


def test_every_setting_of_a_pipeline_has_a_key_that_exists() -> None:
    config = dataclasses.asdict(Config(data=dict.fromkeys(LOADER_KEYS)))
    for key in KEYS.values():
        group, _, name = key.partition(".")
        assert name in config[group]
    without_a_group = {"seed", "optimizer_tensors_per_param"}
    settings = {field.name for field in dataclasses.fields(PipelineOptions)}
    assert settings - without_a_group <= set(KEYS)


def test_the_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    known = list(flat_keys(compose_settings(["recipe=digits"]).tree))
    for name, key in OTHER_NAMES.items():
        assert key in known
        assert name not in {other.rpartition(".")[2] for other in known}


def test_the_time_limit_of_a_loader_is_not_taken_for_that_of_the_processes() -> None:
    with naming(NAMING):
        text = str(worker_hangs(0, 8.0, "samples 1, 2 of D"))
        assert argument("timeout_s") == "world.timeout_s="
    assert "data.timeout_s=8 seconds" in text
    assert "data.workers=0" in text
    assert " timeout_s=8 seconds" in str(worker_hangs(0, 8.0, "samples 1, 2 of D"))


@pytest.mark.parametrize("options", [PipelineOptions, TrainerOptions, Hardware])
def test_a_key_has_the_name_and_the_default_of_the_option_that_it_sets(options: type) -> None:
    config = Config(hardware=HardwareConfig())
    defaults = {each.name: each.default for each in dataclasses.fields(options)}
    of_the_run = {"seed", "optimizer_tensors_per_param"}
    given = arguments_of(config, options)
    assert given.keys() == defaults.keys() - of_the_run
    for name, value in given.items():
        assert value == defaults[name] or defaults[name] is dataclasses.MISSING


def test_every_wrapper_of_models_has_a_key() -> None:
    assert list(WRAPPER_KEYS) == list(WRAPPERS)
