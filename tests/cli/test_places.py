"""Files of a config say neither where files are written nor to whom something is sent."""

import http.server
import importlib
import inspect
import json
import pkgutil
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from support.launch import run_command

from hybridtrain.cli import main
from hybridtrain.cli.config.places import PLACES, table
from hybridtrain.cli.config.resolve import resolve_settings
from hybridtrain.cli.config.schema import Config, groups
from hybridtrain.cli.config.targets import TARGETS
from hybridtrain.errors import ConfigError
from hybridtrain.observe.trackers import CSVFile, MetricsFile
from hybridtrain.partitioning import Plan

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = str(Path(sys.executable).parent / "hybridtrain")
ACCURACY = {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 10}
QUICK = ["world.devices=cpu", "trainer.steps=2", "trainer.epochs=null", "monitor.tensorboard=false"]


def write_recipe(values: dict[str, Any], name: str = "evil.yaml") -> str:
    Path(name).write_text(json.dumps({"defaults": ["digits"], **values}))
    return f"recipe={name}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder, outside the working directory; it must stay as it is."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".bashrc").write_text("mine\n")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(folder))
    yield folder
    assert (folder / ".bashrc").read_text() == "mine\n"
    assert [path.name for path in folder.iterdir()] == [".bashrc"]


def of_run(run: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run in `outputs`, with another config.yaml."""
    target = Path("outputs") / name
    shutil.copytree(run, target)
    config = yaml.safe_load((target / "config.yaml").read_text())
    config["run_name"], config["output_dir"] = name, "outputs"
    change(config)
    (target / "config.yaml").write_text(yaml.safe_dump(config))
    return target


@pytest.mark.thorough
def test_a_recipe_does_not_replace_a_file_of_the_user(home: Path) -> None:
    """The attack: a CSV file with a command in its header, in the place of .bashrc."""
    metrics = {"metrics": {"$(touch PWN)": ACCURACY}}
    csv = {"csv": {"path": "${oc.env:HOME}/.bashrc"}}
    write_recipe({"run_name": "x", "monitor": csv, "trainer": metrics})
    command = [CONSOLE, "recipe=evil.yaml", *QUICK]
    done = run_command(command, 120, {"HOME": str(home)})
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: monitor.csv.path={home}/.bashrc is set in recipe=evil.yaml")
    assert not Path("outputs").exists()


@pytest.mark.thorough
def test_a_run_of_someone_else_does_not_replace_a_file_of_the_user(
    home: Path, finished: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["monitor"]["csv"] = {"path": "${oc.env:HOME}/.bashrc"}

    of_run(finished, "theirs", change)
    command = [CONSOLE, "run_name=theirs", "trainer.steps=8"]
    done = run_command(command, 120, {"HOME": str(home)})
    assert done.returncode == 2
    assert "is set in outputs/theirs/config.yaml, but a file may name only" in done.stderr
    assert main(["evaluate", "run_name=theirs", "world.devices=cpu"]) == 0, "it writes no metrics"


OUTSIDE: dict[str, dict[str, Any]] = {
    "an interpolation": {"monitor": {"csv": {"path": "${oc.env:HOME}/.bashrc"}}},
    "an absolute path": {"monitor": {"csv": {"path": "/somewhere/metrics.csv"}}},
    "a relative path": {"monitor": {"csv": {"path": "metrics.csv"}}},
    "..": {"monitor": {"csv": {"path": "${output_dir}/${run_name}/../../m.csv"}}},
    "a resolver of Hydra": {"monitor": {"csv": {"path": "${hydra:runtime.cwd}/m.csv"}}},
    "an interpolated mapping": {
        "monitor": {"csv": "${data.more}"},
        "data": {"more": {"path": "m"}},
    },
    "another name": {
        "monitor": {"m": {"_target_": "hybridtrain.observe.trackers.files.CSVFile", "path": "m"}}
    },
    "tensorboard": {"monitor": {"tensorboard": {"directory": "${oc.env:HOME}"}}},
    "profile": {"monitor": {"profile": {"directory": "../away"}}},
    "mlflow": {"monitor": {"mlflow": {"directory": "away"}}},
    "mlflow's server": {"monitor": {"mlflow": {"tracking_uri": "http://127.0.0.1:1"}}},
    "mlflow's server under another name": {
        "monitor": {
            "m": {
                "_target_": "hybridtrain.observe.trackers.mlflow.MLflow",
                "tracking_uri": "http://127.0.0.1:1",
            }
        }
    },
    "wandb": {"monitor": {"wandb": {"directory": "away"}}},
    "wandb's team": {"monitor": {"wandb": {"entity": "theirs"}}},
    "best_weights": {"callbacks": {"best_weights": {"directory": "${oc.env:HOME}"}}},
    "best_weights among the trackers": {
        "monitor": {
            "b": {
                "_target_": "hybridtrain.loop.callbacks.best_weights.BestWeights",
                "directory": "away",
            }
        }
    },
    "output_dir": {"output_dir": "/somewhere"},
    "output_dir with ..": {"output_dir": "../away"},
    "output_dir in a hidden folder": {"output_dir": ".config"},
    "output_dir of the environment": {"output_dir": "${oc.env:HOME}"},
    "output": {"output": "predictions.jsonl"},
    "push_to": {"push_to": "stranger/theirs"},
    "a download": {"data": {"root": "/somewhere", "download": True}},
}
"""What a recipe may not say, by its variant."""


def leaf(values: dict[str, Any]) -> tuple[str, Any]:
    """The key and value that a recipe of `OUTSIDE` must not set."""
    key, node = "", dict(values)
    while isinstance(node, dict):
        name = next(name for name in node if name not in ("_target_", "download"))
        key, node = f"{key}.{name}".lstrip("."), node[name]
    return key, node


@pytest.mark.parametrize("variant", OUTSIDE)
@pytest.mark.quick_cases(
    "an interpolation",
    "another name",
    "profile",
    "mlflow's server",
    "output_dir",
    "push_to",
    "a download",
)
def test_what_a_recipe_may_not_say_is_refused_and_the_advice_allows_it(
    variant: str, home: Path
) -> None:
    group, values = next(iter(OUTSIDE[variant].items()))
    data = ["+data.more=null"] if variant == "an interpolated mapping" else []
    recipe = write_recipe({"run_name": "x", **OUTSIDE[variant]})
    with pytest.raises(ConfigError) as refused:
        resolve_settings("train", [recipe, "world.devices=cpu"])
    message = str(refused.value)
    if variant == "a resolver of Hydra":  # a config has no values of Hydra's
        assert "HydraConfig was not set" in message
        return
    key = "monitor.csv.path" if data else leaf({group: values})[0]
    assert message.startswith(f"{key}=")
    assert "recipe=evil.yaml" in message or data
    assert "\n" not in message
    words = message.partition("add ")[2].partition(" to the command line")[0]
    (added,) = shlex.split(words)
    assert added.startswith(f"{key}=")
    settings = resolve_settings("train", [recipe, "world.devices=cpu", f"++{added}"])
    assert settings.config.run_name == "x"


@pytest.mark.parametrize("variant", ["a link", "an interpolated key of the recipe"])
def test_a_place_that_only_seems_to_be_allowed_is_refused(variant: str, home: Path) -> None:
    run = Path("outputs/x")
    run.mkdir(parents=True)
    words = []
    if variant == "a link":
        (run / "away").symlink_to(home)
        path = "outputs/x/away/.bashrc"
    else:
        path = "null"
        words = ["monitor.csv={path: '${data.more}'}"]
    values = {"run_name": "x", "data": {"more": f"{home}/.bashrc"}}
    recipe = write_recipe({**values, "monitor": {"csv": {"path": path}}})
    with pytest.raises(
        ConfigError, match=r"monitor\.csv\.path=.* may name only a place in the run"
    ):
        resolve_settings("train", [recipe, *words])


@pytest.mark.parametrize(
    "values",
    [
        {"monitor": {"csv": {"path": "${output_dir}/${run_name}/more/m.csv"}}},
        {"monitor": {"csv": {"path": "outputs/x/m.csv"}}},
        {"callbacks": {"best_weights": {"directory": "outputs/x/best"}}},
        {"output_dir": "runs/mine"},
        {"data": {"root": "/somewhere"}},
        {"monitor": {"mlflow": {"experiment": "mine"}, "wandb": {"project": "mine"}}},
        {"submit": {"setup": ["touch PWN"]}},  # only `submit` runs it
    ],
    ids=str,
)
def test_a_recipe_may_name_places_in_the_run_directory_and_what_to_read(
    values: dict[str, Any], home: Path
) -> None:
    settings = resolve_settings("train", [write_recipe({"run_name": "x", **values})])
    assert settings.config.run_name == "x"


@pytest.mark.parametrize(
    "typed",
    [
        "monitor.csv.path={home}/m.csv",
        "monitor.csv={{path: {home}/m.csv}}",
        "monitor.csv.path='${{oc.env:HOME}}/m.csv'",
        "++monitor.mlflow.tracking_uri='http://me'",
        "output_dir={home}",
        "callbacks={{best_weights: {{directory: {home}}}}}",
    ],
)
def test_the_command_line_names_any_place(typed: str, home: Path) -> None:
    values = {"monitor": {"csv": {"path": "x"}, "mlflow": {"tracking_uri": "y"}}}
    others = ["monitor.csv=false"] * ("csv" not in typed)
    others += ["monitor.mlflow=false"] * ("mlflow" not in typed)
    recipe = write_recipe({"run_name": "x", **values})
    settings = resolve_settings("train", [recipe, *others, typed.format(home=home)])
    assert settings.config.run_name == "x"


def test_a_typed_part_of_a_mapping_does_not_allow_the_rest_of_it(home: Path) -> None:
    recipe = write_recipe({"run_name": "x", "monitor": {"mlflow": {"tracking_uri": "http://y"}}})
    with pytest.raises(ConfigError, match=r"only the command line may send something"):
        resolve_settings("train", [recipe, "monitor.mlflow={experiment: mine}"])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("trainer.metrics", "$(touch PWN)"),
        ("trainer.metrics", "a\nb"),
        ("trainer.metrics", "`x`"),
        ("callbacks", "../../away"),
        ("callbacks", "/away"),
        ("callbacks", ".."),
        ("monitor", "a/../../b"),
        ("monitor", "-x"),
        ("run_name", "../../away"),
        ("run_name", ".config"),
        ("run_name", "$(touch PWN)"),
    ],
)
@pytest.mark.quick_cases(5)
def test_a_name_in_a_file_is_plain(
    key: str, name: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = {"_target_": "hybridtrain.loop.callbacks.best_weights.BestWeights"}
    values = {
        "trainer.metrics": {"trainer": {"metrics": {name: ACCURACY}}},
        "callbacks": {"callbacks": {name: callback}},
        "monitor": {"monitor": {name: callback}},
        "run_name": {"run_name": name},
    }
    assert main([write_recipe(values[key]), *QUICK]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {key}")
    assert not Path("outputs").exists()


class Received(http.server.BaseHTTPRequestHandler):
    """A server that fails and remembers the headers of its requests."""

    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append(dict(self.headers))
        self.send_response(400)
        self.end_headers()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Received.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Received) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("way", ["recipe", "run", "typed"])
@pytest.mark.quick_cases("recipe", "typed")
def test_credentials_of_mlflow_go_where_the_command_line_says(
    way: str, server: str, home: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow = {"mlflow": {"tracking_uri": server}}
    if way == "run":
        of_run(finished, "theirs", lambda config: config["monitor"].update(mlflow))
        words = ["run_name=theirs", "trainer.steps=8", "world.devices=cpu"]
    else:
        words = [write_recipe({"run_name": "x", "monitor": mlflow}), *QUICK]
    if way == "typed":
        assert main([*words, f"monitor.mlflow.tracking_uri='{server}'"]) == 0
        assert any(headers.get("Authorization") == "Bearer secret" for headers in Received.seen)
        return
    assert main(words) == 2
    assert Received.seen == []


@pytest.mark.parametrize(
    "space",
    [
        "monitor.csv.path=a,b",
        "monitor.csv={path: a},{path: b}",
        "+callbacks={best_weights: {directory: a}},{best_weights: {directory: b}}",
        "monitor.mlflow.tracking_uri=a,b",
        "data.root=a,b",
    ],
)
def test_a_search_space_names_no_place(
    space: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    recipe = write_recipe({"run_name": "x", "search": {"space": [space]}})
    assert main(["search", recipe, *QUICK]) == 2
    assert "cannot be searched" in capfd.readouterr().err
    assert not Path("outputs").exists()


def test_the_printed_command_of_the_best_run_has_no_place_of_a_stranger(
    home: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "theirs"):
        of_run(finished, name, lambda config: None)
    words = ["recipe=digits", f"monitor.csv.path={home}/.bashrc", f"output_dir={home}"]
    Path("outputs/theirs/overrides.yaml").write_text(json.dumps(words))
    text = Path("outputs/theirs/config.yaml").read_text()
    Path("outputs/theirs/config.yaml").write_text(
        text.replace("output_dir: outputs", f"output_dir: {home}")
    )
    summary = json.loads(Path("outputs/theirs/summary.json").read_text())
    summary["eval"]["loss"] = -1.0
    Path("outputs/theirs/summary.json").write_text(json.dumps(summary))
    assert main(["results", "outputs"]) == 0
    said = capfd.readouterr().err
    assert "best by loss: theirs" in said
    assert "(without monitor.csv.path" in said
    assert str(home) not in said


@pytest.mark.parametrize("way", ["recipe", "run"])
@pytest.mark.parametrize("key", ["setup", "srun_args", "container"])
@pytest.mark.quick_cases("setup-recipe", "container-run")
def test_a_job_runs_no_command_of_a_recipe_or_a_run(
    key: str, way: str, home: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    value = {"container": {"runtime": "pyxis", "image": "a.sqsh"}}.get(key, ["touch PWN"])
    if way == "recipe":
        words = [write_recipe({"run_name": "x", "submit": {key: value}}), "world.devices=cpu"]
    else:
        of_run(finished, "theirs", lambda config: config["submit"].update({key: value}))
        words = ["run_name=theirs"]
    assert main(["submit", *words, "submit.to=torchrun"]) == 2
    said = capfd.readouterr().err
    assert f"submit.{key}=" in said
    (added,) = shlex.split(said.partition("add ")[2].partition(" to the command line")[0])
    assert main(["submit", *words, "submit.to=torchrun", added]) in (0, 2)
    assert "only the command line" not in capfd.readouterr().err


def test_a_job_runs_the_commands_of_an_option_that_the_command_line_selects(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [write_recipe({"run_name": "x"}), "submit=lumi-g", "submit.account=a"]
    assert main(["submit", *words, "submit.time=1h", "--dry-run"]) in (0, 2)
    assert "only the command line" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [CSVFile, MetricsFile])
@pytest.mark.parametrize("text", ["mine\n", "a,b\n1,2\n", '{"a": 1}\n', "\x00"])
def test_a_file_that_is_no_metrics_file_is_not_replaced(
    kind: type[MetricsFile], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a metrics file of hybridtrain"):
        kind(path)
    assert path.read_text() == text


def test_the_metrics_file_of_the_command_line_is_replaced_only_if_it_is_one(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = Path("notes.csv")
    notes.write_text("mine\n")
    words = ["recipe=digits", *QUICK, f"monitor.csv.path={notes}"]
    assert main(words) == 2
    assert f"{notes} exists and is not a metrics file" in capfd.readouterr().err
    assert notes.read_text() == "mine\n"
    notes.unlink()
    for name in ("one", "two"):  # the second replaces the file of the first
        assert main([*words, f"run_name={name}"]) == 0
        assert notes.read_text().startswith("step,time,")


@pytest.mark.parametrize(
    "command",
    [
        "results outputs output=f.csv",
        "results outputs output=f.md",
        "report digits output=f.html",
        "predict run_name=digits output=f.jsonl",
        "predict run_name=digits output=f.npy",
    ],
)
@pytest.mark.quick_cases("results outputs output=f.csv", "predict run_name=digits output=f.jsonl")
def test_an_output_replaces_only_a_file_of_its_kind(
    command: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = Path(command.rpartition("=")[2])
    assert main(command.split()) == 0
    assert main(command.split()) == 0, "its own file"
    file.write_text("mine\n")
    assert main(command.split()) == 2
    assert f"{file} exists and is not a" in capfd.readouterr().err
    assert file.read_text() == "mine\n"


def test_a_plan_replaces_only_a_plan(tmp_path: Path, copied: Path) -> None:
    plan, path = Plan.read(copied / "plan.yaml"), tmp_path / "file.yaml"
    plan.write(path)
    plan.write(path)
    path.write_text("mine: 1\n")
    with pytest.raises(ConfigError, match="is not a plan"):
        plan.write(path)
    assert path.read_text() == "mine: 1\n"


@pytest.mark.parametrize("file", ["config.yaml", "summary.json", "report.html", "plan.yaml"])
def test_a_folder_that_is_no_run_is_not_written_to(
    file: str, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path("project")
    folder.mkdir()
    (folder / file).write_text("mine: 1\n")
    recipe = write_recipe({"run_name": "project", "output_dir": "."})
    assert main([recipe, *QUICK]) == 2
    assert f"project/{file}" in capfd.readouterr().err
    assert (folder / file).read_text() == "mine: 1\n"


@pytest.mark.parametrize("name", ["checkpoints", "best_weights", "export"])
@pytest.mark.quick_cases("checkpoints")
def test_a_folder_of_a_run_that_is_a_link_is_refused(
    name: str, home: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = of_run(finished, "theirs", lambda config: config.update(callbacks=["best_weights"]))
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(home)
    command = ["export", "run_name=theirs"] if name == "export" else ["run_name=theirs"]
    assert main([*command, *([] if name == "export" else ["trainer.steps=8"])]) == 2
    assert f"outputs/theirs/{name}" in capfd.readouterr().err


def test_a_run_directory_that_is_a_link_is_refused_and_its_place_may_be_typed(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path("outputs").mkdir(exist_ok=True)
    Path("outputs/linked").symlink_to(elsewhere)
    assert main(["recipe=digits", "run_name=linked", *QUICK]) == 2
    assert "outputs/linked is a link to" in capfd.readouterr().err
    assert not list(elsewhere.iterdir())
    typed = ["recipe=digits", "run_name=linked", f"output_dir={elsewhere}", *QUICK]
    assert main(typed) == 0


def test_a_trace_of_the_profiler_does_not_follow_a_link(home: Path) -> None:
    trace = Path("outputs/x/profile/rank_0_steps_1_to_2.pt.trace.json")
    trace.parent.mkdir(parents=True)
    trace.symlink_to(home / ".bashrc")
    words = ["recipe=digits", "run_name=x", *QUICK, "monitor.profile={steps: [1, 2]}"]
    assert main(words) == 0
    assert not trace.is_symlink()
    assert json.loads(trace.read_text())["traceEvents"]


SMELLS = {
    *("path", "paths", "dir", "directory", "file", "files", "filename", "folder", "root", "cache"),
    *("uri", "url", "host", "endpoint", "storage", "store", "push", "command", "setup", "launcher"),
    *("source", "tokenizer", "template", "download", "entity", "args", "container", "modules"),
    *("script", "exec", "recipe", "resume", "targets", "hardware", "socket", "port", "address"),
}
WHOLE = {"out", "output", "log", "split", "schedule", "init_from", "run_name"}
NO_PLACES = {
    "data.download": "true or false, see data.root",
    "hardware.from_host_bytes_per_s": "a rate",
    "hardware.to_host_bytes_per_s": "a rate",
    "model.modules": "of nn.ModuleList",
    "trainer.loss.output": "of the model",
    "trainer.loss.targets": "of the data",
    "trainer.metrics.validate_args": "true or false",
    **({"optim.args": "options as an object"} if find_spec("bitsandbytes") else {}),
}
"""Arguments with the name of a place that do not name one."""


def smells(name: str, annotation: object) -> bool:
    words = set(name.lower().split("_"))
    return bool(words & SMELLS) or name in WHOLE or "Path" in str(annotation)


def arguments() -> Iterator[str]:
    """Yields the keys of all arguments that a config can set, `*` for a free name."""
    for field in fields(Config):
        if field.name not in groups():
            if smells(field.name, field.type):
                yield field.name
            continue
        for inner in fields(groups()[field.name]):  # type: ignore[arg-type]
            if smells(inner.name, inner.type):
                yield f"{field.name}.{inner.name}"
    for key, targets in TARGETS.items():
        free = {"monitor": "monitor.*", "callbacks": "callbacks.*"}.get(key, key)
        for name in targets.modules:
            for target in targets_of(name, targets.kind):
                for argument in inspect.signature(target).parameters.values():
                    is_named = argument.kind is not argument.VAR_POSITIONAL
                    if is_named and smells(argument.name, argument.annotation):
                        yield f"{free}.{argument.name}"


def targets_of(name: str, kind: str | None) -> Iterator[Callable[..., Any]]:
    """Yields the classes and functions of a module that a key may name, and more."""
    module = importlib.import_module(name)
    base = pkgutil.resolve_name(kind) if kind else ()
    names = {*vars(module), *getattr(module, "__all__", ())}
    for name in sorted(name for name in names if not name.startswith("_")):
        target = getattr(module, name, None)
        is_function = inspect.isfunction(target) and name in getattr(module, "__all__", ())
        if is_function or (isinstance(target, type) and issubclass(target, base)):
            yield target
    if name == "torchvision.models":
        yield from map(module.get_model_builder, module.list_models())


def test_every_argument_that_names_a_place_is_in_the_table() -> None:
    known = {key.partition(" ")[0] for place in PLACES for key in place.keys}
    found = set(arguments())
    assert found >= {"monitor.*.path", "callbacks.*.directory", "data.root", "search.launcher"}
    assert found - known - NO_PLACES.keys() == set()
    assert NO_PLACES.keys() <= found


def test_the_security_policy_shows_the_table_of_places() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"\n\n{table()}\n" in page, table()
