"""The floor plan: packages import one another by their doors alone, and arrows point down."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import hybridtrain

ROOT = Path(hybridtrain.__file__).parent
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")}

# From the ground up. What stands in one line may not import one another.
FLOORS = """
    errors
    _base
    models schedule
    graph launch options
    partitioning
    price world
    pipeline
    loss
    verification
    model
    data
    datasets
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


class Import(NamedTuple):
    """An import of one package, or module at the top, by another one."""

    file: str
    line: int
    package: str
    target: str
    module: str
    names: tuple[str, ...]
    of_types: bool


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
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
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


def test_what_stands_in_a_door_is_what_others_may_use():
    for package in sorted(PACKAGES - {"cli", "_base", "models", "configs", "recipes"}):
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        (exported,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        used = {name for i in imports() if i.target == package for name in i.names}
        assert used <= set(exported), package


def test_arrows_point_down():
    up = [
        f"{i.file}:{i.line} {i.package} -> {i.target}"
        for i in imports()
        if FLOOR[i.target] >= FLOOR[i.package]
        and not (i.of_types and (i.package, i.target) in KNOWN_BY_NAME)
    ]
    assert not up
