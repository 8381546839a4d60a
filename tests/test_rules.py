"""Rules of the house: which way imports point, and what the package offers."""

import ast
import subprocess
import sys
from pathlib import Path

import holdfast

ROOT = Path(holdfast.__file__).parent
LAYERS = [
    "errors",
    "arbiter",
    "core",
    "flow",
    "site",
    "run",
    "spark",
    "sim",
    "dashboard",
    "web",
    "bench",
    "paper",
    "demo",
    "cli",
]
MAY_IMPORT = {
    "errors": set(),
    "arbiter": {"errors"},
    "core": {"errors"},
    "flow": {"errors", "core"},
    "site": {"errors", "core", "flow"},
    "checkpoint_store": {"errors", "core", "flow", "site"},
    "checking": {"errors", "checkpoint_store", "flow"},
    "durable": {"errors", "checkpoint_store", "core", "flow", "site"},
    "signs": {"core", "site"},
    "hosting": {"errors", "core", "flow", "site"},
    "control": {
        "errors",
        "arbiter",
        "checkpoint_store",
        "core",
        "durable",
        "flow",
        "hosting",
        "signs",
        "site",
    },
    "settle": {"errors", "arbiter", "flow", "hosting", "site"},
    "stopped": {"errors", "checkpoint_store", "core", "flow", "site"},
    "run": {
        "errors",
        "checkpoint_store",
        "control",
        "core",
        "durable",
        "flow",
        "hosting",
        "settle",
        "site",
        "stopped",
    },
    "apps": {"errors", "flow", "hosting"},
    "spark": {"errors", "core", "flow", "site"},
    "sim": {"errors", "core", "flow", "site"},
    "drawing": set(),
    "advise": {"errors", "core", "flow", "site", "run", "bench"},
    "paper": {"errors", "core", "flow", "site", "sim", "bench", "drawing"},
    "dashboard": set(),
    "web": {"errors"},
}
# `flow.start(spark)` and its like hand over to outer layers; they are imported when called.
LAZY = {
    ("flow", "run"),
    ("flow", "spark"),
    ("run", "spark"),
    ("run", "web"),
    ("run", "dashboard"),
    ("apps", "run"),
    ("apps", "cli"),
    ("apps", "spark"),
    ("apps", "web"),
}


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


def test_imports_point_inward() -> None:
    for layer, path, tree in modules():
        allowed = MAY_IMPORT.get(layer)
        if allowed is None:
            continue
        for top_level in (True, False):
            for name in imports(tree, top_level):
                if not name.startswith("holdfast."):
                    continue
                target = name.split(".")[1]
                if target != layer and not (not top_level and (layer, target) in LAZY):
                    assert target in allowed, f"{path} imports {name}"


def test_the_core_imports_only_the_standard_library() -> None:
    for layer, path, tree in modules():
        if layer == "core":
            outside = {n.split(".")[0] for n in imports(tree, False)} - {"holdfast"}
            assert outside <= set(sys.stdlib_module_names), path
            impure = {"time", "random", "socket", "threading", "asyncio", "os"}
            assert not outside & impure, path


def test_only_the_spark_package_and_its_users_import_pyspark() -> None:
    for layer, path, tree in modules():
        if layer not in ("spark", "bench", "demo", "cli"):
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
