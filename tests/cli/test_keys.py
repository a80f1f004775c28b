"""Config keys in the place of the library's argument names, in error messages."""

import dataclasses
import logging
from pathlib import Path

import pytest

from hybridtrain._base.hardware import Hardware
from hybridtrain.cli.config.compose import compose_settings
from hybridtrain.cli.config.keys import KEYS, OTHER_NAMES, errors_with_config_keys, with_config_keys
from hybridtrain.cli.config.schema import LOADER_KEYS, Config, HardwareConfig, arguments_of
from hybridtrain.cli.config.tree import flat_keys
from hybridtrain.cli.run.directory import RunLog
from hybridtrain.data.fetch import worker_hangs
from hybridtrain.errors import DataError, SplitError, WorldError
from hybridtrain.options import PipelineOptions, TrainerOptions


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("chunks=3 is too many", "pipeline.chunks=3 is too many"),
        ("lower chunks= or (batch_size=4)", "lower pipeline.chunks= or (data.batch_size=4)"),
        ("set drop_last=False, keep=None", "set data.drop_last=false, checkpoint.keep=null"),
        ("split='time' needs it", "pipeline.split='time' needs it"),
        ("keep it, or start a new run", "keep it, or set another run_name"),
        (
            "the model's chunks=2, not split=x",
            "the model's pipeline.chunks=2, not pipeline.split=x",
        ),
    ],
)
def test_an_argument_becomes_its_config_key(message: str, expected: str) -> None:
    assert with_config_keys(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "pipeline.chunks=3",
        "model.checkpoint=x",
        "layer 'chunks=3' is unknown",
        'in "split=time"',
        "outputs/digits-chunks=4/plan.yaml",
        "chunks == 3",
        "seed=3",
        "HybridModel(..., example_inputs=x)",
        "chunks: 3",
    ],
)
def test_keys_quotes_paths_and_other_words_stay(message: str) -> None:
    assert with_config_keys(message) == message


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


def test_the_type_of_an_error_stays_and_its_notes_are_translated_too() -> None:
    error = SplitError("split=x is unknown")
    error.add_note("lower chunks=")
    with pytest.raises(SplitError) as caught, errors_with_config_keys():
        raise error
    assert str(caught.value) == "pipeline.split=x is unknown"
    assert caught.value.__notes__ == ["lower pipeline.chunks="]


def test_the_message_of_another_exception_stays() -> None:
    with pytest.raises(ValueError, match=r"^split=x$"), errors_with_config_keys():
        raise ValueError("split=x")


def test_the_time_limit_of_a_loader_is_not_taken_for_that_of_the_processes() -> None:
    with pytest.raises(DataError) as caught, errors_with_config_keys():
        raise worker_hangs(0, 8.0, "samples 1, 2 of D")
    assert "in data.timeout_s=8 seconds" in str(caught.value)
    assert "raise data.timeout_s=, or use data.workers=0" in str(caught.value)
    with pytest.raises(WorldError, match=r"within world\.timeout_s=8"), errors_with_config_keys():
        raise WorldError("rank 1 did not come within timeout_s=8 s")


def test_a_warning_of_the_library_names_config_keys_in_the_log_and_on_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "logs", 0)
    library = logging.getLogger("hybridtrain.checkpoint.saving")
    library.warning("no checkpoint of step %d: lower keep=", 3)
    (tmp_path / "logs").mkdir()
    log.begin_file()
    library.warning("no checkpoint of step %d: lower keep=", 4)
    library.info("loss=0.3")
    logging.getLogger("mine").warning("keep=3")
    lines = ["no checkpoint of step 3: lower checkpoint.keep="]
    lines += ["no checkpoint of step 4: lower checkpoint.keep=", "loss=0.3", "keep=3"]
    assert capfd.readouterr().err.splitlines() == lines
    written = (tmp_path / "logs" / "rank_000.log").read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in written] == lines


@pytest.mark.parametrize("options", [PipelineOptions, TrainerOptions, Hardware])
def test_a_key_has_the_name_and_the_default_of_the_option_that_it_sets(options: type) -> None:
    config = Config(hardware=HardwareConfig())
    defaults = {each.name: each.default for each in dataclasses.fields(options)}
    of_the_run = {"seed", "optimizer_tensors_per_param"}
    given = arguments_of(config, options)
    assert given.keys() == defaults.keys() - of_the_run
    for name, value in given.items():
        assert value == defaults[name] or defaults[name] is dataclasses.MISSING
