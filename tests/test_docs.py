"""The examples in docstrings and the flow files under examples/ do what they say."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import load_flow
from holdfast.flow.plan import plan

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
def test_example_flows_can_be_planned(file: Path) -> None:
    assert plan(load_flow(str(file), None)).sinks


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 50
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"


def test_every_document_that_is_linked_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in ("advise", "architecture", "cluster", "decisions", "guarantees", "hacking"):
        target = f"docs/{page}.md"
        assert target in readme and (ROOT / target).exists()
