"""`trainer.attention`, the kernel of PyTorch's attention."""

import pytest
from cli_runs import fail, succeed
from support.launch import SMALL

RUN = (*SMALL, "trainer.steps=2", "trainer.epochs=null", "monitor.report=false")


def test_a_kernel_that_the_device_does_not_have_is_one_line_whose_advice_trains(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = fail(capfd, *RUN, "trainer.attention=cudnn", "run_name=refused")
    assert "trainer.attention=cudnn: PyTorch has no such kernel" in said
    assert "use auto, math or flash" in said
    succeed(capfd, *RUN, "trainer.attention=math", "run_name=math")


def test_an_unknown_kernel_is_one_line_with_the_choices(capfd: pytest.CaptureFixture[str]) -> None:
    said = fail(capfd, *RUN, "trainer.attention=fa3", "run_name=a")
    assert "auto, math, efficient, flash, cudnn" in said
