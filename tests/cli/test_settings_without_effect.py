"""Settings that would do nothing, or make no sense, are errors that name the key."""

from pathlib import Path

import pytest
from cli_runs import fail, succeed
from support.launch import SMALL

STOPPING = "callbacks=[early_stopping]"
WEIGHTS = "trainer.class_weights=[1,1,1,1,1,1,1,1,1,{}]"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["trainer.eval_every=null", STOPPING], "callbacks.early_stopping compares evaluations"),
        (["trainer.eval_every=null", "callbacks=[plateau]"], "callbacks.plateau compares"),
        (["trainer.eval_every=6", STOPPING], "early_stopping compares evaluations, but with"),
        ([WEIGHTS.format(-1)], "trainer.class_weights="),
        ([WEIGHTS.format("1e400")], "trainer.class_weights="),
        (["trainer.class_weights=[0,0,0,0,0,0,0,0,0,0]"], "trainer.class_weights="),
        (["optim.lr=1e400"], "optim.lr=inf"),
        (["optim.lr=0"], "optim.lr=0 must be above 0, such as optim.lr=1e-3"),
        (["optim.lr=-1"], "optim.lr=-1 must be above 0"),
        (["optim.lr=null"], "optim.lr=null must be a number"),
        (["optim.lr=[0.1]"], "optim.lr=[0.1] must be a number"),
        (["optim=adamw", "optim.betas=[0.9,1e400]"], "optim.betas.1=inf"),
        (["+optim.groups=[{match: '*', lr: 1e400}]"], "optim.groups.0.lr=inf"),
        (["lr_schedule=linear", "lr_schedule.end_factor=1e400"], "lr_schedule.end_factor=inf"),
        (["recipe=mnist_basicnet"], "recipe= is given twice, as digits and mnist_basicnet"),
        (["callbacks=[ema,ema]"], "callbacks has ema twice"),
        (["trainer.metrics=[accuracy,accuracy]"], "trainer.metrics has accuracy twice"),
    ],
)
@pytest.mark.quick_cases(6)
def test_a_setting_without_effect_or_sense_is_refused(
    words: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = fail(capfd, *SMALL, *words)
    assert said.startswith(f"error: {key}")
    assert len(said.splitlines()) == 1
    assert not Path("outputs/digits/checkpoints").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.eval_every=3", STOPPING],
        ["trainer.eval_every=null", "trainer.eval_every_epochs=1", STOPPING],
        [WEIGHTS.format(0)],
        ["trainer.metrics=accuracy"],
        ["optim.lr=0", "+optim.groups=[{match: '*.bias', lr: 0.1}]"],
    ],
)
@pytest.mark.quick_cases(1)
def test_what_has_an_effect_is_taken(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    succeed(capfd, *SMALL, *words)
    assert Path("outputs/digits/summary.json").exists()
