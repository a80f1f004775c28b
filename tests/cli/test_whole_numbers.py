"""A key that is a number takes a whole number, as YAML has it: 0 for 0.0."""

from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed
from support.launch import SMALL

KEYS = (
    *("trainer.precision=fp16", "trainer.loss_scale=1024", "trainer.clip_norm=1"),
    *("trainer.max_time=1000", "trainer.label_smoothing=0", "checkpoint.every_minutes=3"),
    *("world.timeout_s=60", "world.stall_s=60", "world.replica_shares=[1]", "data.timeout_s=10"),
    *("pipeline.split=balanced", "pipeline.memory_weight=1", "pipeline.memory_limit_gib=4"),
    *("optim.lr=1", "optim.weight_decay=0", "optim.betas=[0,0]", "optim.eps=1"),
    *("lr_schedule=linear", "lr_schedule.start_factor=1", "lr_schedule.end_factor=0"),
    "callbacks={plateau:{min_delta:1},early_stopping:{min_delta:1},clip_value:{value:1}}",
    "trainer.eval_every=1",
)


@pytest.mark.parametrize(
    "keys",
    [KEYS, ("optim=sgd", "optim.lr=1", "optim.momentum=0", "pipeline.device_speeds=[1,2]")],
    ids=["adamw", "sgd"],
)
@pytest.mark.quick_cases("adamw")
def test_whole_numbers_are_taken_for_every_number(
    capfd: pytest.CaptureFixture[str], keys: tuple[str, ...]
) -> None:
    succeed(capfd, *SMALL, *keys, "trainer.steps=2", "trainer.log_every=1")
    assert metrics(Path("outputs/digits"))[0]["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.max_len=24.5", "data.max_len=24.5 must be a whole number"),
        ("data.max_len=1e3", "data.max_len=1000.0 must be a whole number, such as 1000"),
    ],
)
@pytest.mark.quick_cases(1)
def test_a_whole_number_is_asked_for_by_the_name_of_the_key(
    key: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=imdb_transformer", "world.devices=cpu", key]
    assert f"error: {message}" in fail(capfd, *words)
