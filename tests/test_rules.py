"""Rules of the house: which way imports point, and what the package offers."""

import ast
import subprocess
import sys
from pathlib import Path

import holdfast

ROOT = Path(holdfast.__file__).parent
LAYERS = [
    "errors",
    "core",
    "arbiter",
    "engine",
    "storage",
    "connectors",
    "api",
    "plan",
    "net",
    "site",
    "hosts",
    "control",
    "spark",
    "ui",
    "advise",
    "lab",
    "__init__",
]
"""The folders are the architecture: a module imports its own layer, and those before it."""
LAZY = {
    ("api", "control"),
    ("api", "spark"),
    ("control", "spark"),
    ("control", "ui"),
    ("ui", "advise"),
    ("ui", "lab"),
}
"""`flow.start(spark)`, a command and their like hand over to outer layers when they are called."""


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.Module, top_level: bool) -> set[str]:
    nodes = tree.body if top_level else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "holdfast":
                names = [f"holdfast.{a.name}" for a in node.names]
            found.update(names)
        elif isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
    return found


def modules() -> list[tuple[str, str, ast.Module]]:
    paths = sorted(ROOT.rglob("*.py"))
    return [(layer_of(p), str(p.relative_to(ROOT)), ast.parse(p.read_text())) for p in paths]


def targets(tree: ast.Module, top_level: bool) -> set[str]:
    """The layers that a module imports."""
    names = {n for n in imports(tree, top_level) if n.startswith("holdfast.")}
    return {n.split(".")[1] for n in names}


def test_every_module_is_in_a_layer() -> None:
    found = {layer for layer, _, _ in modules()}
    assert found == set(LAYERS), "add a new layer to LAYERS, where it belongs"


def test_imports_point_inward() -> None:
    rank = {layer: position for position, layer in enumerate(LAYERS)}
    handed_over = set()
    for layer, path, tree in modules():
        for target in targets(tree, top_level=True):
            assert rank[target] <= rank[layer], f"{path} imports {target}"
        for target in targets(tree, top_level=False) - targets(tree, top_level=True):
            if rank[target] > rank[layer]:
                assert (layer, target) in LAZY, f"{path} imports {target}"
                handed_over.add((layer, target))
    assert handed_over == LAZY, "some of LAZY is no longer needed"


def test_the_core_imports_only_the_standard_library() -> None:
    for layer, path, tree in modules():
        if layer == "core":
            outside = {n.split(".")[0] for n in imports(tree, False)} - {"holdfast"}
            assert outside <= set(sys.stdlib_module_names), path
            impure = {"time", "random", "socket", "threading", "asyncio", "os"}
            assert not outside & impure, path


def test_only_the_spark_package_and_its_users_import_pyspark() -> None:
    for layer, path, tree in modules():
        if layer not in ("spark", "lab"):
            assert not any(n.split(".")[0] == "pyspark" for n in imports(tree, False)), path


def test_pyspark_and_clients_are_not_loaded_until_they_are_needed() -> None:
    heavy = {"pyspark", "confluent_kafka", "kazoo", "psycopg"}
    code = f"import sys, holdfast; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_exported_names() -> None:
    assert holdfast.__all__ == sorted(holdfast.__all__)
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    assert set(holdfast.__all__) >= {"Flow", "col", "mean", "max_", "pairs", "rows", "parquet"}
