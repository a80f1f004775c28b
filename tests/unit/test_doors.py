"""The floor plan: packages import one another by their doors alone, and arrows point down.

Tests use the doors too, except for the imports that `INSIDE` lists.
"""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import hybridtrain

ROOT = Path(hybridtrain.__file__).parent
TESTS = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}

# From the ground up. What stands in one line may not import one another.
FLOORS = """
    errors
    _base
    models schedule head
    graph launch options
    partitioning
    price world
    pipeline
    loss
    verification
    model
    data integrations
    datasets piped
    step
    checkpoint
    loop
    observe smp
    cli
    __main__
"""
FLOOR = {name: number for number, line in enumerate(FLOORS.split("\n")) for name in line.split()}

# Annotations alone: the launch that devices are chosen for, and the model that is verified.
KNOWN_BY_NAME = {("_base", "launch"), ("verification", "model")}

# Shelves of small modules, which are imported by their own names.
SHELVES = {"_base", "datasets", "models"}

# Modules behind a door, each with the tests that import from it. The list only gets shorter: an
# entry that no test needs fails.
INSIDE = """
    # checkpoint: the bytes of the files, and where a save is interrupted
    checkpoint.host_copies faults/test_checkpoint_background.py unit/launch/test_gpu_faults.py
    checkpoint.json_tree unit/checkpoint/test_checkpoint_files.py
    checkpoint.manifest faults/test_checkpoint_crash.py unit/checkpoint/test_checkpoint_files.py
    checkpoint.read distributed/workers/joint_saves.py
    checkpoint.saving distributed/workers/state.py
    checkpoint.shared_files distributed/workers/joint_saves.py
    checkpoint.state distributed/test_joint_saves.py distributed/workers/checkpoint_bytes.py
    checkpoint.state unit/checkpoint/test_checkpoint_files.py unit/data/test_restore_streams.py
    checkpoint.state unit/launch/test_gpu_faults.py
    checkpoint.store distributed/workers/joint_saves.py distributed/workers/killed_save.py
    checkpoint.store faults/test_checkpoint_store.py
    checkpoint.tensor_files unit/checkpoint/test_checkpoint_files.py
    checkpoint.tensor_files unit/checkpoint/test_init_from.py
    # cli: private names of commands, and keys whose values a test of another part needs
    cli.commands.measure_machine unit/price/test_measure_machine.py
    cli.commands.search cli/test_search.py
    cli.config.keys unit/test_naming.py
    cli.config.schema unit/launch/test_gpu_faults.py unit/price/test_pricing.py
    cli.config.schema unit/price/test_unequal_hardware.py
    cli.config.schema unit/launch/test_repeatable.py
    cli.config.targets support/hostile_config.py
    cli.run.build unit/launch/test_gpu_faults.py unit/launch/test_repeatable.py
    cli.run.components unit/step/test_param_groups.py
    cli.run.directory unit/observe/test_progress.py
    cli.run.errors unit/launch/test_early_signals.py
    cli.run.hardware unit/price/test_unequal_hardware.py unit/test_bench_grid.py
    cli.run.job cli/test_submit.py
    # data: the order of the samples, and the threads that fetch them
    data.fetch cli/test_keys.py unit/data/test_loader.py
    data.loader distributed/workers/gradients.py unit/data/test_loader.py
    data.same_data unit/data/test_stream.py
    # head: the size of a chunk
    head.chunked_loss unit/head/test_lazy_logits.py unit/pipeline/test_fused_head.py
    # launch: signals, beats and exit codes, with clocks and process ids that a test sets
    launch.activity unit/launch/test_watchdog.py unit/loop/test_evaluation.py
    launch.environment unit/launch/test_meeting.py unit/launch/test_world.py
    launch.meeting unit/launch/test_meeting.py
    launch.notebook unit/observe/test_notebook.py
    launch.process_id unit/data/test_data_faults.py unit/launch/test_meeting.py
    launch.process_id unit/launch/test_watchdog.py
    launch.process_store unit/launch/test_watchdog.py
    launch.signals unit/launch/test_early_signals.py
    launch.watchdog unit/launch/test_liveness.py unit/launch/test_watchdog.py
    # loop: the breakdown of a step from given times, and a clock to patch
    loop.callbacks unit/test_naming.py
    loop.advice unit/loop/test_advice.py unit/loop/test_step_account.py
    loop.interruption unit/checkpoint/test_when_to_save.py
    loop.run_stats unit/loop/test_advice.py unit/loop/test_step_account.py
    loop.trainer unit/observe/test_trackers.py
    # observe: pictures as arrays, without a run
    observe.pictures unit/partitioning/test_plan_picture.py unit/pipeline/test_timeline.py
    observe.timeline unit/pipeline/test_timeline.py
    # partitioning: the parts of a plan: costs, cuts, objectives
    partitioning.measurements unit/partitioning/test_planner.py
    partitioning.measurements unit/partitioning/test_estimates.py
    partitioning.measurements unit/partitioning/test_cost_table.py
    partitioning.measurements unit/loop/test_profiler.py
    partitioning.measurements unit/launch/test_gpu_faults.py
    partitioning.cost_table unit/partitioning/test_cost_table.py

    partitioning.costs unit/partitioning/test_costs.py
    partitioning.cut_search unit/partitioning/test_balance.py
    partitioning.estimates unit/loop/test_profiler.py unit/partitioning/test_estimates.py
    partitioning.estimates unit/price/test_pricing.py
    partitioning.manual_split unit/partitioning/test_split_spec.py unit/pipeline/test_marks.py
    partitioning.objective unit/partitioning/test_balance.py
    partitioning.plan unit/partitioning/test_plan.py
    partitioning.planner unit/partitioning/test_no_trace.py
    # pipeline: the parts of a stage: messages, random numbers, backward in parts
    pipeline.forward.stage unit/pipeline/test_split_backward.py
    pipeline.message_wire distributed/workers/across_processes.py
    pipeline.message_wire unit/pipeline/test_order_of_messages.py
    pipeline.message_wire unit/pipeline/test_stand_in_nccl.py
    pipeline.layer_rng support/matrix.py unit/launch/test_gpu_faults.py
    pipeline.layer_state unit/pipeline/test_layer_state.py
    pipeline.messages unit/pipeline/test_messages.py unit/pipeline/test_order_of_messages.py
    pipeline.messages unit/pipeline/test_stand_in_nccl.py
    pipeline.model_watch unit/model/test_changed_model.py
    pipeline.recomputation_proof unit/pipeline/test_layer_state.py
    pipeline.recomputation_proof unit/pipeline/test_stand_in_gpus.py
    pipeline.recomputation_proof unit/step/test_optimizer_step.py
    pipeline.reducer unit/launch/test_gpu_faults.py unit/launch/test_repeatable.py
    pipeline.replicas unit/pipeline/test_replicas.py
    pipeline.point_to_point unit/pipeline/test_point_to_point.py
    pipeline.split_backward unit/pipeline/test_split_backward.py unit/test_emulated_devices.py
    pipeline.ties unit/pipeline/test_stand_in_nccl.py
    pipeline.timeline distributed/workers/across_processes.py unit/pipeline/test_timeline.py
    pipeline.transfer support/fake_gpus.py support/stand_in_gpus.py
    pipeline.transfer unit/pipeline/test_stand_in_gpus.py
    # price: the parts of a price, against brute force
    price.layout unit/price/test_memory_buys_time.py unit/price/test_pricing.py
    price.layout unit/price/test_unequal_hardware.py
    price.bounds unit/price/test_pricing.py
    price.search unit/price/test_pricing.py
    price.price unit/price/test_unequal_hardware.py
    price.price unit/price/test_memory_buys_time.py
    price.price unit/price/test_plan_answers.py unit/price/test_pricing.py
    price.price unit/schedule/test_registry.py
    price.stage_needs unit/price/test_memory_buys_time.py
    price.stage_needs unit/price/test_plan_answers.py unit/price/test_pricing.py
    price.stage_needs unit/schedule/test_registry.py
    # schedule: the registry, which each test leaves unchanged, and the parts of a zero-bubble table
    schedule.registry conftest.py
    schedule.named unit/schedule/test_split_schedules.py
    # smp: the tables of keys that its page repeats, and the runtime, which a test starts anew
    smp.__main__ support/aws.py support/smp_reference.py
    smp.bodies unit/smp/test_smp_bodies.py
    smp.config docs/test_smp_page.py unit/smp/test_smp_config.py
    smp.model unit/smp/test_smp_config.py
    smp.runtime distributed/workers/checkpoint_bytes.py distributed/workers/smp_rules.py
    smp.runtime distributed/workers/smp_scripts.py support/aws.py
    smp.step distributed/workers/smp_rules.py support/smp_plain.py unit/smp/test_smp_config.py
    # step: the search for the first value that is not finite
    step.non_finite distributed/workers/across_processes.py distributed/workers/loss_scaling.py
    step.non_finite unit/step/test_not_a_number.py
    step.optimizer_step unit/step/test_optimizer_check.py
    # verification: the state of Python that a check puts back
    verification.forward_check unit/verification/test_forward_check.py
    verification.python_state unit/verification/test_forward_check.py
"""


class Import(NamedTuple):
    """An import of one package, or module at the top, by another one."""

    file: str
    line: int
    package: str
    target: str
    module: str
    names: tuple[str, ...]
    of_types: bool


# Packages of many small modules of one kind, which their docstrings describe together.
OF_ONE_KIND = {"datasets", "models", "cli/commands", "loop/callbacks"}


def is_for_type_checkers(node: ast.AST) -> bool:
    """Whether it is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


@cache
def imports() -> list[Import]:
    return list(_imports())


def _imports() -> Iterator[Import]:
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT)
        package = where.parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        typed = {
            id(inner)
            for node in ast.walk(tree)
            if is_for_type_checkers(node)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hybridtrain."):
                target = node.module.split(".")[1]
                if target != package and package != "__init__":
                    names = tuple(each.name for each in node.names)
                    yield Import(
                        str(where), node.lineno, package, target, node.module, names,
                        id(node) in typed,
                    )  # fmt: skip


def test_no_import_goes_past_the_door_of_a_package():
    past = [
        f"{i.file}:{i.line} {i.module}"
        for i in imports()
        if i.module.count(".") > 1 and i.target not in SHELVES
    ]
    assert not past


@cache
def exported(package: Path) -> set[str]:
    """Returns the `__all__` of a package; empty where it has none."""
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_what_stands_in_a_door_is_what_others_may_use():
    for package in sorted(PACKAGES - {"cli", "_base", "models", "configs", "recipes"}):
        used = {name for i in imports() if i.target == package for name in i.names}
        assert used <= exported(ROOT / package), package


def test_the_docstring_of_a_package_lists_its_modules():
    for init in ROOT.glob("*/**/__init__.py"):
        package = init.parent
        if str(package.relative_to(ROOT)) in OF_ONE_KIND:
            continue
        docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
        parts = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
        parts |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
        missing = {name for name in parts if not re.search(rf"(?<!\w){name}(?!\w)", docstring)}
        assert not missing, init


def test_arrows_point_down():
    up = [
        f"{i.file}:{i.line} {i.package} -> {i.target}"
        for i in imports()
        if FLOOR[i.target] >= FLOOR[i.package]
        and not (i.of_types and (i.package, i.target) in KNOWN_BY_NAME)
    ]
    assert not up


def modules() -> dict[str, Path]:
    paths = ((path.relative_to(ROOT.parent).with_suffix(""), path) for path in ROOT.rglob("*.py"))
    return {".".join(module.parts).removesuffix(".__init__"): path for module, path in paths}


def imported_modules(path: Path, known: Collection[str]) -> set[str]:
    """Returns the modules that a module imports at run time, in functions too."""
    tree = ast.parse(path.read_text())
    imported = set()
    for node in ast.walk(tree):
        if is_for_type_checkers(node):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "") in known:
            for name in node.names:
                module = f"{node.module}.{name.name}"
                imported.add(module if module in known else node.module)
    return imported


def test_modules_import_in_no_circle_not_even_inside_functions():
    known = modules()
    graph = {module: imported_modules(path, known) - {module} for module, path in known.items()}
    circle = None
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = " -> ".join(error.args[1])
    assert circle is None


def modules_behind_doors(test: Path) -> Iterator[str]:
    """Yields the modules behind doors that a test imports, or imports names from.

    The tests of the command line may import the modules of its floors, which have no doors.
    """
    for node in ast.walk(ast.parse((TESTS / test).read_text())):
        root, *path = (getattr(node, "module", None) or "").split(".")
        if not isinstance(node, ast.ImportFrom) or root != "hybridtrain" or not path:
            continue
        is_package = ROOT.joinpath(*path).is_dir()
        if path[0] in SHELVES or not (is_package or path[1:]):
            continue
        names = {alias.name for alias in node.names}
        for name in names - (exported(ROOT.joinpath(*path)) if is_package else set()):
            if path[0] != "cli" or name.startswith("_") or test.parts[0] not in ("cli", "docs"):
                yield ".".join([*path, name] if is_package else path)


def test_a_test_imports_from_behind_a_door_only_what_is_listed():
    lines = [line.split() for line in INSIDE.splitlines() if "#" not in line]
    listed = {(module, test) for module, *tests in filter(None, lines) for test in tests}
    tests = sorted(path.relative_to(TESTS) for path in TESTS.rglob("*.py"))
    needed = {(module, str(test)) for test in tests for module in modules_behind_doors(test)}
    assert sorted(needed - listed) == [], "import the names that the package exports"
    assert sorted(listed - needed) == [], "remove these from the list"
