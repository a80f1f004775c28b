"""What a config may name without `allow_targets`, all of it called with hostile values."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import hostile_config
from support.launch import environment

from hybridtrain.cli.config.targets import resolve

PACKAGES = ("bitsandbytes", "kernels")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(hostile_config.__file__))],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path_factory.mktemp("hostile"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_nothing_that_a_config_may_name_opens_another_file_imports_a_module_or_starts_a_process(
    tried: Any,
) -> None:
    controls = {(what, event) for what, event, *_ in tried["seen"] if what.startswith("control")}
    assert controls >= {
        ("control: pickle", "os.system"),
        ("control: pickle", "open"),
        ("control: import", "compile"),
    }
    assert [record for record in tried["seen"] if not record[0].startswith("control")] == []


@pytest.mark.thorough
def test_a_config_may_name_the_usual_models_optimizers_losses_and_metrics(tried: Any) -> None:
    wanted = {
        "model": [
            *("torch.nn.Linear", "torch.nn.Sequential", "torch.nn.TransformerEncoderLayer"),
            *("torchvision.models.resnet18", "torchvision.models.segmentation.fcn_resnet50"),
            *("torchvision.models.VisionTransformer", "hybridtrain.models.gpt"),
        ],
        "data": ["hybridtrain.datasets.digits", "hybridtrain.datasets.imdb"],
        "optim": ["torch.optim.AdamW", "torch.optim.Adafactor"],
        "lr_schedule": ["torch.optim.lr_scheduler.OneCycleLR"],
        "trainer.metrics": ["torchmetrics.F1Score", "torchmetrics.Perplexity"],
        "trainer.loss": [
            *("torch.nn.CrossEntropyLoss", "torch.nn.functional.l1_loss"),
            "hybridtrain.loss.nll",
        ],
        "callbacks": ["hybridtrain.loop.callbacks.EMA"],
        "monitor": ["hybridtrain.observe.trackers.WandB", "hybridtrain.observe.trackers.MLflow"],
    }
    for key, paths in wanted.items():
        assert set(paths) - set(tried["called"][key]) == set(), key


def test_an_optimizer_of_bitsandbytes_is_imported_without_a_download_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "kernels.py": "",
        "bitsandbytes/__init__.py": "",
        "bitsandbytes/optim.py": (
            "import torch\n"
            "try:\n    import kernels\nexcept ImportError:\n    kernels = None\n"
            "class AdamW8bit(torch.optim.AdamW): pass\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    try:
        optimizer = resolve("optim", "bitsandbytes.optim.AdamW8bit")
        assert sys.modules[optimizer.__module__].kernels is None
        assert importlib.import_module("kernels").__file__ == str(tmp_path / "site/kernels.py")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
