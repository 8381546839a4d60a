"""Runs the programs and commands that a page of the documentation shows.

A fenced block with a title is a file: ``python title="sales.py"``. A block ``console`` has commands
after ``$ ``, each followed by what it prints. All blocks of a page run in order in one folder.

Durations (``35 ms``, ``0.4 s``) and process numbers differ between runs: any will do. So does
anything for ``...``, within a line or, alone on a line, for several.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SERVERS = {
    "howto/backfill.md": "spark",
    "howto/kafka.md": "kafka",
    "howto/postgres.md": "postgres",
    "howto/spark.md": "spark",
}
"""What a page needs, if it cannot be run on this machine as it is."""
COMMAND_S_MAX = 120

_BLOCK = re.compile(r"^( *)```(\w+)?(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^\1```", re.M | re.S)
_DURATION = re.compile(r"\b[\d.,]+ (ms|s)\b")
_PROCESS = re.compile(r"\bprocess \d+")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def blocks(page: Path) -> Iterator[Block]:
    for indent, language, title, text in _BLOCK.findall(page.read_text()):
        lines = [line.removeprefix(indent) for line in text.splitlines(keepends=True)]
        yield Block(language, title or None, "".join(lines))


def is_run(page: Path) -> bool:
    """Whether a page shows commands with what they print."""
    return any(block.language == "console" for block in blocks(page))


def pages_that_need(server: str | None) -> list[Path]:
    return [page for page in PAGES if is_run(page) and SERVERS.get(name_of(page)) == server]


Run = Callable[[str, Path], str]
"""Runs a command in a folder, and returns what it prints."""


def run_page(
    page: Path,
    folder: Path,
    *,
    replaced: Mapping[str, str] | None = None,
    run: Run | None = None,
) -> None:
    """Run all blocks of a page. `replaced` has addresses that the page shows, and those of the
    servers that are there."""
    for block in blocks(page):
        text = block.text
        for shown, real in (replaced or {}).items():
            text = text.replace(shown, real)
        if block.title is not None:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif block.language == "console":
            for command, expected in _commands(text):
                printed = (run or run_command)(command, folder)
                assert matches(printed, expected), (
                    f"{command} prints\n{printed}\nand the page shows\n{expected}"
                )


def _commands(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def run_command(command: str, folder: Path) -> str:
    """In a shell."""
    env = dict(os.environ)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    # Lines that several processes print must come in the order in which they are printed.
    env["PYTHONUNBUFFERED"] = "1"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=COMMAND_S_MAX,
    )
    assert done.returncode == 0, f"{command}: exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def run_here(command: str, folder: Path) -> str:
    """``python FILE`` in this process, which has a Spark session already."""
    program, file = command.split()
    assert program == "python"
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


def matches(printed: str, shown: str) -> bool:
    pattern = ""
    for line in _without_figures(shown).splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.rstrip().split("..."))) + r" *\n"
    return re.fullmatch(pattern, _without_figures(printed)) is not None


def _without_figures(text: str) -> str:
    return _PROCESS.sub("process N", _DURATION.sub(r"N \1", text))
