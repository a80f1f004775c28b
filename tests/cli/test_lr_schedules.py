"""The learning rates of a run by the options of `lr_schedule`, as the run logs them."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import fail, metrics, succeed
from support.launch import SMALL

STEPS = 12
RUN = [
    *SMALL,
    *(f"trainer.steps={STEPS}", "trainer.epochs=null", "trainer.log_every=1", "run_name=a"),
    *(
        "lr_schedule.warmup_steps=0",
        "optim.lr=1.0",
        "monitor.report=false",
        "monitor.tensorboard=false",
    ),
]
HALF = math.sqrt(0.5)
RATES: dict[str, tuple[list[str], Callable[[int], float]]] = {
    "polynomial": (["lr_schedule.power=2"], lambda step: (1 - step / STEPS) ** 2),
    "inverse_sqrt": (["lr_schedule.timescale=3"], lambda step: math.sqrt(3 / (3 + step))),
    "wsd": (
        ["lr_schedule.decay_share=0.25", "lr_schedule.min_factor=0.1"],
        lambda step: 1 if step <= 9 else 1 - 0.9 * (step - 9) / 3,
    ),
    "cosine_restarts": (
        ["lr_schedule.cycles=3"],
        lambda step: (1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2)[step % 4],
    ),
    # 3 steps from 1/4 to 3/4, and from there on the square root of all steps
    "inverse_sqrt with a warm-up": (
        ["lr_schedule.warmup_share=0.25"],
        lambda step: (step + 1) / 4 if step < 3 else math.sqrt(3 / step),
    ),
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.quick_cases("wsd", "inverse_sqrt with a warm-up")
def test_a_schedule_by_name_sets_the_rate_of_each_step(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, rate = RATES[name]
    succeed(capfd, *RUN, f"lr_schedule={name.split()[0]}", *settings)
    logged = [line["train/lr"] for line in metrics(Path("outputs/a")) if "train/lr" in line]
    assert logged == pytest.approx([rate(step) for step in range(STEPS)], abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lr_schedule.warmup_share=1"], "warmup_share=1 must be a number from 0 to below 1"),
        (
            ["lr_schedule.warmup_share=0.1", "lr_schedule.warmup_steps=2"],
            "set lr_schedule.warmup_steps=0, or lr_schedule.warmup_share=0",
        ),
        (["lr_schedule=wsd", "lr_schedule.decay_share=0"], "lr_schedule.decay_share=0.0 must be"),
        (["lr_schedule=wsd", "lr_schedule.decay=linera"], "did you mean 'linear'"),
        (["lr_schedule=cosine_restarts", "lr_schedule.cycles=0"], "lr_schedule.cycles=0 must be"),
        (["lr_schedule=inverse_sqrt", "lr_schedule.timescale=0"], "lr_schedule.timescale=0 must"),
    ],
)
@pytest.mark.quick_cases(2)
def test_a_schedule_that_cannot_be_is_one_line(
    settings: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(capfd, *RUN, *settings)
