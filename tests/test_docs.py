"""The examples in docstrings and the flow files under examples/ do what they say."""

import ast
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import runpy
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import holdfast
from holdfast import Flow, KeyedStream, Run, Stream, functions, protections, sinks, sources
from holdfast.api.windows import TimeWindows
from holdfast.net.reader import TableReader
from holdfast.plan.planner import plan
from holdfast.ui.flow_file import load_flow
from tests.support.pages import PAGES, blocks, name_of

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = [
    module.name
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast.")
    if not module.ispkg
    and ">>>" in (ROOT / module.name.replace(".", "/")).with_suffix(".py").read_text()
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module)
    assert tried > 0 and failed == 0


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_example_flows_can_be_planned_and_show_rows(file: Path) -> None:
    shown = [stage.sink for stage in plan(load_flow(str(file), None)).sinks]
    assert any(isinstance(sink, type(sinks.console())) for sink in shown)


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 50
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
        assert found, f"{file}::{name}"
        marks = [ast.unparse(mark) for mark in found[0].decorator_list]
        assert "pytest.mark.nightly" not in marks, f"{file}::{name} is no test of every change"


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub and the site spell them in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=name_of)
def test_every_page_is_in_the_navigation_and_links_stay_within_the_site(page: Path) -> None:
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert listed.count(name_of(page)) == 1
    for target in re.findall(r"\]\((\.\./[^)#\s]+)", page.read_text()):
        assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), target


def test_the_reference_has_the_public_api() -> None:
    """Every exported name has its entry; what is generated from it is for `make docs`."""
    shown = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown.update(re.findall(r"^::: holdfast\.([\w.]+)$", page.read_text(), re.M))
    modules = {"functions": functions, "protections": protections, "sinks": sinks}
    modules |= {"sources": sources}
    for name in holdfast.__all__:
        if name in modules:
            wanted = {f"{name}.{member}" for member in modules[name].__all__}
            assert wanted <= shown, wanted - shown
        else:
            assert name in shown, name


def test_the_pictures_are_those_that_the_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))["PICTURES"]
    files = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert {file.stem for file in files} == set(drawn)
    for file in files:
        assert file.read_text() == drawn[file.stem]().svg(), "python docs/pictures/draw.py"


# --- names in the documents -----------------------------------------------------------------------

OTHERS_NAMES = {
    # Spark, Kubernetes and YARN
    "asyncProgressTracking",
    "attemptFailuresValidityInterval",
    "maxAppAttempts",
    "maxUnavailable",
    "spreadOutApps",
    # PostgreSQL, Linux, Python
    "ip_local_port_range",
    "synchronous_standby_names",
}
"""Names in the documents that are not ours, and that our code has no use for."""


def inline_code(page: Path) -> Iterator[str]:
    """What stands in single backticks, without examples."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
    yield from re.findall(r"`([^`\n]+)`", text)


@cache
def known_names() -> set[str]:
    """Every identifier in the code, and every word of a string that is no docstring."""
    found = set()
    for folder in ("holdfast", "pyspark_holdfast", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            with io.StringIO(path.read_text()) as text:
                for token in tokenize.generate_tokens(text.readline):
                    if token.type == tokenize.NAME:
                        found.add(token.string)
                    elif token.type == tokenize.STRING and '"""' not in token.string:
                        found.update(re.findall(r"[A-Za-z_]\w*", token.string))
    return found


@cache
def members() -> dict[str, set[str]]:
    """What the classes of the package define, by the name of the class; bases are not followed."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "holdfast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(part.name)
                    elif isinstance(part, ast.Name | ast.Attribute):
                        names.add(part.id if isinstance(part, ast.Name) else part.attr)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_in_the_documents_exists(page: Path) -> None:
    missing = []
    shown = {"FLOW.py", *(block.title for block in blocks(page))}
    for code in inline_code(page):
        for file in re.findall(r"[\w./-]+\.py\b", code):
            if file not in shown and not any(
                (ROOT / base / file).exists() for base in ("", "holdfast", "tests")
            ):
                missing.append(file)
        rest = re.sub(r"[\w./-]+\.py\b|\bspark(\.\w+)+", "", code)
        for owner, name in re.findall(r"\b([A-Z]\w+)\.(\w+)", rest):
            if owner in members() and name not in members()[owner]:
                missing.append(f"{owner}.{name}")
        for name in re.findall(r"(?<![\w-])[A-Za-z_]\w*(?![\w-])", rest):
            ours = "_" in name.strip("_") or re.search(r"[A-Z][a-z]|[a-z][A-Z]", name)
            counter = name.removesuffix("_total")  # which Prometheus adds
            if ours and not {name, counter} & (known_names() | OTHERS_NAMES):
                missing.append(name)
    assert not missing, f"{page.name} names what does not exist: {missing}"


def _code() -> Iterator[tuple[str, ast.Module]]:
    for page in PAGES:
        found = [block.text for block in blocks(page) if block.language == "python"]
        for number, text in enumerate(found):
            yield f"{name_of(page)} {number}", ast.parse(text)


SPELLED = {
    name: getattr(module, name)
    for module in (holdfast, functions, protections, sinks, sources)
    for name in module.__all__
}
METHODS = {
    name: method
    for owner in (Run, TableReader, TimeWindows, KeyedStream, Stream, Flow)
    for name, method in vars(owner).items()
    if inspect.isfunction(method) and not name.startswith("_")
}


@pytest.mark.parametrize(("where", "tree"), list(_code()), ids=[name for name, _ in _code()])
def test_pages_use_the_api_as_it_is(where: str, tree: ast.Module) -> None:
    """What they import is there, and what they call takes what they give."""
    namespaces = {"F": functions, "sinks": sinks, "sources": sources, "protections": protections}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("holdfast"):
            module = importlib.import_module(str(node.module))
            offered = getattr(module, "__all__", None) or dir(module)
            assert all(a.name in offered for a in node.names), ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(ast.Name(space), name) if space in namespaces:
                called = getattr(namespaces[space], name)
            case ast.Attribute(ast.Name("flow" | "run"), name):
                called = METHODS[name]
            case ast.Name(name) if name in SPELLED:
                called = SPELLED[name]
            case _:
                continue
        known = inspect.signature(called).parameters
        for keyword in node.keywords:
            assert keyword.arg in known, f"{where}: {ast.unparse(node)}"
