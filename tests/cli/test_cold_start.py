"""What a command imports, and how: the time from the shell to the first step."""

import json
import subprocess
import sys

import pytest

# of a run whose config names none of them
UNUSED = {
    *("PIL.ImageShow", "datasets", "jinja2", "matplotlib", "mlflow", "optuna", "pandas", "plotly"),
    *("sklearn", "timm", "torchmetrics", "torchtext", "torchvision", "transformers", "wandb"),
    "hybridtrain.smp",
    "hybridtrain.observe.notebook",
    "hybridtrain.observe.report",
    "hybridtrain.observe.trackers.mlflow",
    "hybridtrain.observe.trackers.wandb",
    "hybridtrain.loop.callbacks.ema",
    "hybridtrain.cli.commands.plan",
    "hybridtrain.cli.commands.search",
    "hybridtrain.cli.run.job",
    "hybridtrain.cli.run.sweep",
}

CODE = """
import gc, json, sys
from hybridtrain.cli import main
code = main()
print(json.dumps([code, gc.isenabled(), gc.get_freeze_count(), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The exit code of a run of one step, and its collector and modules at the end."""
    words = ["recipe=digits", "trainer.steps=1", f"output_dir={tmp_path_factory.mktemp('runs')}"]
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_imports_no_package_that_it_does_not_use(run):
    code, _, _, modules = run
    assert code == 0
    assert not UNUSED & set(modules)


def test_a_run_imports_the_data_set_and_the_model_that_it_names_and_no_other(run):
    _, _, _, modules = run
    packages = ("hybridtrain.datasets.", "hybridtrain.models.")
    plugins = {module.partition(".")[2] for module in modules if module.startswith(packages)}
    shared = {"datasets.standard_input", "models.check", "models.quantized"}
    assert plugins - shared == {"datasets.digits", "models.basicnet"}


def test_the_library_imports_pytorch_and_the_extras_only_when_they_are_used():
    code = "import sys, hybridtrain; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tensorboard", "hydra", "omegaconf", *UNUSED} & set(done.stdout.split())


def test_a_run_collects_garbage_but_leaves_out_the_modules_that_it_has_imported(run):
    _, collects, frozen, _ = run
    assert collects
    assert frozen > 100_000


def test_a_command_that_is_called_in_a_script_leaves_its_collector_alone():
    code = "import gc; from hybridtrain.cli import main; main(['--version'])\nassert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.thorough
def test_commands_that_train_nothing_do_not_import_the_compiler():
    code = (
        "import sys; from hybridtrain.cli.command_table import COMMANDS\n"
        "for name in ('plan', 'submit', 'predict', 'export'): COMMANDS[name].load()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
