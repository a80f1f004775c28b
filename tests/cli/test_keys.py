"""Config keys in the place of the library's argument names, in error messages."""

import dataclasses

import pytest

from hybridtrain.app.config import LOADER_KEYS, Config
from hybridtrain.app.keys import KEYS, errors_with_config_keys, with_config_keys
from hybridtrain.errors import SplitError
from hybridtrain.options import PipelineOptions


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
