"""Rules of the house: which way imports point, and what the package offers."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import holdfast
from holdfast.api.graph import Flow
from holdfast.api.streams import KeyedStream, Stream
from holdfast.api.windows import RowWindows, TimeWindows
from holdfast.control.run import Run
from holdfast.net.reader import TableReader
from tests.support.sharing import APPLICATIONS, OF_THE_SECOND, SPARK, shared

ROOT = Path(holdfast.__file__).parent
TESTS = Path(__file__).parent
LAYERS = [
    "errors",
    "log_limit",
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
    "functions",
    "protections",
    "sinks",
    "sources",
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


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.Module, top_level: bool, *, for_types: bool = True) -> set[str]:
    nodes = list(tree.body if top_level else ast.walk(tree))
    if not for_types:
        unloaded = {n for block in nodes if _for_types(block) for n in ast.walk(block)}
        nodes = [n for n in nodes if n not in unloaded]
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


@cache
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


MODULE_LINES_MAX, CLASS_LINES_MAX = 630, 460
"""Larger modules and classes hold more than one idea."""


def test_modules_and_classes_can_be_read_in_one_sitting() -> None:
    for _, path, tree in modules():
        length = len((ROOT / path).read_text().splitlines())
        assert length <= MODULE_LINES_MAX, f"{path} has {length} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                assert length <= CLASS_LINES_MAX, f"{node.name} in {path} has {length} lines"


def test_no_class_name_stands_for_two_things() -> None:
    names = Counter(
        node.name for _, _, tree in modules() for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert [name for name, count in names.items() if count > 1] == []


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
            loaded = imports(tree, False, for_types=False)
            assert not any(n.split(".")[0] == "pyspark" for n in loaded), path


def test_pyspark_and_clients_are_not_loaded_until_they_are_needed() -> None:
    heavy = {"pyspark", "confluent_kafka", "kazoo", "psycopg"}
    code = f"import sys, holdfast; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PUBLIC = {
    "holdfast": """
        Aggregate Budget Checkpoint DivergenceError ExpiringStream Expr Flow FlowError HoldfastError
        HostError Http HungError InputError JoinedStream KeyedFunction KeyedStream OperatorError
        Options OutOfMemoryError Protection Rows Run Sink SinkError SinkRewoundError SiteLostError
        Source Stream TimedStream Tls col functions lit protections sinks sources
    """,
    "holdfast.functions": "at_start count first last max mean min sum",
    "holdfast.protections": "active none pairs passive rollback upstream",
    "holdfast.sinks": "callback console discard kafka outlet parquet postgres table",
    "holdfast.sources": "follow generator kafka lines rows spark_batch spark_stream",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_exported_names(module: str) -> None:
    """The public API is this, and nothing else."""
    loaded = importlib.import_module(module)
    assert loaded.__all__ == PUBLIC[module].split()
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None


FUNCTIONS = [
    (f"{module}.{name}", getattr(importlib.import_module(module), name))
    for module, names in PUBLIC.items()
    for name in names.split()
    if inspect.isfunction(getattr(importlib.import_module(module), name))
]
CLASSES = [Flow, Run, Stream, KeyedStream, RowWindows, TimeWindows, TableReader]
METHODS = [
    (f"{owner.__name__}.{name}", method)
    for owner in CLASSES
    for name, method in vars(owner).items()
    if inspect.isfunction(method) and not name.startswith("_")
]


@pytest.mark.parametrize(
    "called", [c for _, c in FUNCTIONS + METHODS], ids=[n for n, _ in FUNCTIONS + METHODS]
)
def test_an_editor_can_complete_and_check_a_call(called: Callable[..., object]) -> None:
    """Every parameter has a name and a type; what is named by the user is columns and aggregates.
    What is returned has a type, too."""
    signature = inspect.signature(called)
    assert signature.return_annotation not in (inspect.Signature.empty, "Any"), "of the result"
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            assert parameter.name in ("exprs", "aggregates"), parameter.name
        if parameter.annotation == "Any":
            assert called.__name__ in ("lit", "get"), parameter.name
    assert called.__doc__, "what it does"


# --- tests --------------------------------------------------------------------------------------


def test_what_tests_share_is_in_support() -> None:
    """A test that imports another one changes with it, and nobody expects that."""
    for path in sorted(TESTS.rglob("*.py")):
        place = path.relative_to(TESTS)
        if place.parts[0] == "support":
            continue
        known = path.name.startswith("test_") or path.name in ("conftest.py", "__init__.py")
        assert known, f"{place} has no tests: its place is tests/support"
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{place}: {node.module}"
        for name in imports(tree, False):
            if name.split(".")[0] == "tests":
                assert name.split(".")[1:2] in ([], ["support"]), f"{place} imports {name}"


def test_no_module_imports_a_test() -> None:
    """Not in a program either that a test writes for another process."""
    imported = re.compile(
        r"(?:from|import) tests(?:\.\w+)*\.test_\w+|from tests[\w.]* import test_"
    )
    for path in sorted(TESTS.rglob("*.py")):
        assert not imported.findall(path.read_text()), path


def test_tests_that_share_a_session_or_a_server_run_in_one_process() -> None:
    names = [f"{p.relative_to(TESTS.parent)}::test_it" for p in sorted(TESTS.rglob("test_*.py"))]
    common = Counter(shared(name) for name in names)
    assert all(common[session] > 1 for session in SPARK)
    assert shared("tests/integration/test_kafka.py::a") == shared(
        "tests/integration/test_ends.py::b"
    )
    assert shared("tests/site/test_pairs.py::a") != shared("tests/site/test_pairs.py::b")
    for module in (*OF_THE_SECOND, *APPLICATIONS):
        assert (TESTS / "spark" / f"{module}.py").exists()
