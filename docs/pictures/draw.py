"""Draws the pictures of the documentation: ``python docs/pictures/draw.py``.

All have one language. A filled box computes, a dashed one waits, a crossed one is dead, a green one
is new. Rows travel along solid arrows, everything else along dashed ones. Bars below a box are
bundles that it keeps. Each picture has its own background, so that it can be read on any page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
WIDTH, HEIGHT = 104, 42
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933; text-anchor: middle }
  .head { font-weight: 600 } .small { font-size: 11px; fill: #52606d } .left { text-anchor: start }
  .page { fill: #f7f9fb } .box { fill: #cfe3f5; stroke: #2f6ea5; stroke-width: 1.5 }
  .waits { fill: #f7f9fb; stroke: #2f6ea5; stroke-width: 1.5; stroke-dasharray: 5 4 }
  .dead { fill: #e4e7eb; stroke: #9aa5b1; stroke-width: 1.5 }
  .new { fill: #d3efdc; stroke: #2f855a; stroke-width: 1.5 } .kept { fill: #2f6ea5 }
  .cross { stroke: #c53030; stroke-width: 2; opacity: 0.6 } .line { stroke: #1f2933 }
  .rows { fill: none; stroke: #1f2933; stroke-width: 1.5; marker-end: url(#tip) }
  .tell { fill: none; stroke: #52606d; stroke-width: 1.5; stroke-dasharray: 4 3;
    marker-end: url(#tip) }
  #tip { fill: #52606d } .slice { fill: none; stroke: #b7791f; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #b8c2cc } .page { fill: #1b2229 }
    .box { fill: #234564; stroke: #79b0df } .waits { fill: #1b2229; stroke: #79b0df }
    .dead { fill: #323f4b; stroke: #7b8794 } .new { fill: #1f4d33; stroke: #68d391 }
    .kept { fill: #79b0df } .cross { stroke: #fc8181 } .rows { stroke: #e4e7eb }
    .tell { stroke: #b8c2cc } #tip { fill: #b8c2cc } .slice { stroke: #ecc94b }
  }
"""


class Picture:
    """Collects the elements of one SVG file."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(self, x: float, y: float, words: str, below: str, kind: str = "box") -> None:
        """A box around (`x`, `y`)."""
        left, top = x - WIDTH / 2, y - HEIGHT / 2
        self._parts.append(
            f'<rect x="{left:g}" y="{top:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
            f'class="{kind}"/>'
        )
        if kind == "dead":
            for up in (1, -1):
                dx, dy = WIDTH / 2 - 10, up * (HEIGHT / 2 - 5)
                self._parts.append(
                    f'<line x1="{x - dx:g}" y1="{y - dy:g}" x2="{x + dx:g}" y2="{y + dy:g}" '
                    'class="cross"/>'
                )
        self.text(x, y - 3, words)
        self.text(x, y + 13, below, "small")

    def kept(self, x: float, y: float, count: int, words: str) -> None:
        """Bundles that the box around (`x`, `y`) keeps."""
        for n in range(count):
            left = x - WIDTH / 2 + 4 + 9 * n
            self._parts.append(
                f'<rect x="{left:g}" y="{y + HEIGHT / 2 + 4:g}" width="6" height="10" '
                'class="kept"/>'
            )
        self.text(x - WIDTH / 2 + 9 * count + 8, y + HEIGHT / 2 + 13, words, "small left")

    def arrow(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        """From the right side of the box around `start` to the left of that around `end`; between
        boxes above each other, or backwards, from edge to edge."""
        (x1, y1), (x2, y2) = start, end
        if x1 == x2:
            up = 1 if y2 > y1 else -1
            path = f"M{x1:g} {y1 + up * HEIGHT / 2:g} L{x2:g} {y2 - up * (HEIGHT / 2 + 4):g}"
        else:
            right = 1 if x2 > x1 else -1
            low = 0 if right > 0 else 12
            path = (
                f"M{x1 + right * WIDTH / 2:g} {y1 + low:g} "
                f"L{x2 - right * (WIDTH / 2 + 4):g} {y2 + low:g}"
            )
        self._parts.append(f'<path d="{path}" class="{kind}"/>')

    def divide(self, x: float) -> None:
        path = f"M{x:g} 16 V{self._size[1] - 16}"
        self._parts.append(f'<path d="{path}" class="tell" style="marker-end: none"/>')

    def slice(self, left: float, right: float, y: float, words: str) -> None:
        path = f"M{left:g} {y - 7:g} V{y:g} H{right:g} V{y - 7:g}"
        self._parts.append(f'<path d="{path}" class="slice"/>')
        self.text((left + right) / 2, y + 14, words, "small")

    def svg(self) -> str:
        width, height = self._size
        parts = "\n  ".join(self._parts)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img">
  <title>{escape(self._title)}</title>
  <style>{STYLE}  </style>
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z"/></marker>
  <rect width="{width}" height="{height}" rx="8" class="page"/>
  {parts}
</svg>
"""


def panels(title: str, before: str, after: str) -> Picture:
    """A picture with two halves: while the flow runs, and after a loss."""
    picture = Picture(860, 250, title)
    picture.text(215, 26, before, "head")
    picture.text(645, 26, after, "head")
    picture.divide(430)
    return picture


SOURCE, STAGE, SINK, UP, DOWN, NEW = 70.0, 215.0, 360.0, 70.0, 140.0, 200.0
RIGHT = 430.0


def flow() -> Picture:
    picture = Picture(860, 250, "Every partition has two replicas; one is killed")
    columns = (200.0, 350.0, 500.0, 650.0)
    names = ("source", "by (src, dst)", "by (app, src)", "sink")
    places = ((0, 1), (1, 2), (2, 3), (3, 0))
    for at, (x, name) in enumerate(zip(columns, names, strict=True)):
        for y, site in zip((75.0, 145.0), places[at], strict=True):
            picture.box(x, y, name, f"site {site}", "dead" if site == 2 else "box")
    picture.box(350, 210, "by (src, dst)", "site 4, new", "new")
    picture.box(500, 210, "by (app, src)", "site 4, new", "new")
    picture.arrow((350, 75), (500, 145), "rows")
    for y in (75.0, 145.0):
        picture.arrow((200, y), (350, 75 if y == 75 else 145), "rows" if y == 75 else "tell")
        picture.arrow((500, 145), (650, y), "rows")
    picture.text(70, 72, "Spark, Kafka,", "small")
    picture.text(70, 87, "files", "small")
    picture.text(792, 72, "Spark, Kafka,", "small")
    picture.text(792, 87, "PostgreSQL, parquet", "small")
    picture.arrow((66, 75), (200, 75), "rows")
    picture.arrow((650, 75), (788, 75), "rows")
    picture.text(
        430,
        28,
        "Site 2 is killed: the other replicas go on, and a new site gets copies while rows flow",
        "head",
    )
    return picture


def pairs() -> Picture:
    picture = panels("Partition pairs", "Both replicas compute", "One is lost")
    for dx in (0.0, RIGHT):
        for y, sites in ((UP, (0, 1, 2)), (DOWN, (1, 2, 0))):
            for x, name, site in zip(
                (SOURCE, STAGE, SINK), ("source", "stage", "sink"), sites, strict=True
            ):
                dead = dx > 0 and site == 2
                picture.box(x + dx, y, name, f"site {site}", "dead" if dead else "box")
    for y in (UP, DOWN):
        picture.arrow((SOURCE, y), (STAGE, y), "rows")
        picture.arrow((STAGE, y), (SINK, y), "rows")
    picture.text(215, 186, "each consumer takes from one replica of its producer", "small")
    picture.text(215, 202, "and tells both how far it is, so both keep what it lacks", "small")
    picture.arrow((SOURCE + RIGHT, UP), (STAGE + RIGHT, UP), "rows")
    picture.arrow((STAGE + RIGHT, UP), (SINK + RIGHT, DOWN), "rows")
    picture.box(STAGE + RIGHT, NEW + 8, "stage", "site 3, new", "new")
    picture.arrow((SOURCE + RIGHT, DOWN), (STAGE + RIGHT, NEW + 8), "rows")
    picture.text(SINK + RIGHT, 190, "the sink takes from", "small")
    picture.text(SINK + RIGHT, 205, "the replica that is left;", "small")
    picture.text(SINK + RIGHT, 220, "site 1 copies to site 3", "small")
    return picture


def active() -> Picture:
    picture = panels(
        "Active standby", "The second replica withholds its output", "The first is lost"
    )
    for dx in (0.0, RIGHT):
        picture.box(SOURCE + dx, 105, "source", "a pair")
        picture.box(STAGE + dx, UP, "stage", "site 1", "dead" if dx else "box")
        picture.box(STAGE + dx, DOWN, "stage", "site 2")
        picture.box(SINK + dx, 105, "sink", "a pair")
        picture.arrow((SOURCE + dx, 105), (STAGE + dx, DOWN), "rows")
    picture.arrow((SOURCE, 105), (STAGE, UP), "rows")
    picture.arrow((STAGE, UP), (SINK, 105), "rows")
    picture.kept(STAGE, DOWN, 3, "withheld")
    picture.text(215, 204, "the sink tells both what it has received", "small")
    picture.text(215, 220, "an epoch is taken whole from one of them, so they may differ", "small")
    picture.arrow((STAGE + RIGHT, DOWN), (SINK + RIGHT, 105), "rows")
    picture.box(STAGE + RIGHT, NEW + 8, "stage", "site 3, new", "new")
    picture.arrow((STAGE + RIGHT, DOWN), (STAGE + RIGHT, NEW + 8), "tell")
    picture.text(SINK + RIGHT, 175, "the second sends", "small")
    picture.text(SINK + RIGHT, 190, "what the sink lacks", "small")
    return picture


def passive() -> Picture:
    picture = panels("Passive standby", "The standby gets checkpoints", "The replica is lost")
    for dx in (0.0, RIGHT):
        picture.box(SOURCE + dx, UP, "source", "two replicas")
        picture.box(SINK + dx, UP, "sink", "two replicas")
        picture.box(STAGE + dx, UP, "stage", "site 1", "dead" if dx else "box")
        picture.kept(SOURCE + dx, UP, 4, "since 40")
    picture.box(STAGE, DOWN, "standby", "site 2: epoch 40", "waits")
    picture.arrow((SOURCE, UP), (STAGE, UP), "rows")
    picture.arrow((STAGE, UP), (SINK, UP), "rows")
    picture.arrow((STAGE, UP), (STAGE, DOWN), "tell")
    picture.text(STAGE + 14, 108, "what has changed, every interval", "small left")
    picture.text(215, 190, "producers keep their output", "small")
    picture.text(215, 206, "since the standby's last checkpoint", "small")
    picture.box(STAGE + RIGHT, DOWN, "stage", "site 2")
    picture.arrow((SOURCE + RIGHT, UP), (STAGE + RIGHT, DOWN), "rows")
    picture.arrow((STAGE + RIGHT, DOWN), (SINK + RIGHT, UP), "rows")
    picture.box(STAGE + RIGHT, NEW + 8, "standby", "site 3, new", "waits")
    picture.arrow((STAGE + RIGHT, DOWN), (STAGE + RIGHT, NEW + 8), "tell")
    picture.text(SINK + RIGHT, 150, "epochs 41 ... again,", "small")
    picture.text(SINK + RIGHT, 165, "from its checkpoint;", "small")
    picture.text(SINK + RIGHT, 180, "the sink drops", "small")
    picture.text(SINK + RIGHT, 195, "what it has", "small")
    return picture


def upstream() -> Picture:
    picture = panels(
        "Upstream backup", "Producers keep what state comes from", "The replica is lost"
    )
    for dx in (0.0, RIGHT):
        picture.box(SOURCE + dx, UP, "source", "two replicas")
        picture.box(SINK + dx, UP, "sink", "two replicas")
        picture.box(STAGE + dx, UP, "stage", "site 1", "dead" if dx else "box")
        picture.kept(SOURCE + dx, UP, 5, "the log")
    picture.arrow((SOURCE, UP), (STAGE, UP), "rows")
    picture.arrow((STAGE, UP), (SINK, UP), "rows")
    picture.arrow((SINK, UP), (STAGE, UP), "tell")
    picture.arrow((STAGE, UP), (SOURCE, UP), "tell")
    picture.text(215, 136, "acks go back: the sink has received epoch 47,", "small")
    picture.text(215, 152, "so the stage does not need input up to 40 again", "small")
    picture.text(215, 184, "the producer drops epochs up to 40 and keeps the rest", "small")
    picture.box(STAGE + RIGHT, DOWN, "stage", "site 3, empty", "new")
    picture.arrow((SOURCE + RIGHT, UP), (STAGE + RIGHT, DOWN), "rows")
    picture.arrow((STAGE + RIGHT, DOWN), (SINK + RIGHT, UP), "rows")
    picture.text(645, 190, "any site rebuilds the state from the log;", "small")
    picture.text(645, 206, "the sink drops what it has", "small")
    return picture


def rollback() -> Picture:
    picture = panels("Rollback", "Markers go h stages on, and come back", "Stage A is lost")
    for dx in (0.0, RIGHT):
        picture.box(SOURCE + dx, UP, "source", "two replicas")
        picture.box(STAGE + dx, UP, "stage A", "site 1", "dead" if dx else "box")
        picture.box(SINK + dx, UP, "stage B", "site 2")
        picture.kept(SOURCE + dx, UP, 5, "log")
    picture.kept(STAGE, UP, 3, "log")
    for one, other in ((SOURCE, STAGE), (STAGE, SINK)):
        picture.arrow((one, UP), (other, UP), "rows")
        picture.arrow((other, UP), (one, UP), "tell")
    picture.slice(SOURCE - WIDTH / 2, SINK + WIDTH / 2, 136, "a slice of thickness h = 2")
    picture.text(215, 182, "a marker that has come back from two stages further on", "small")
    picture.text(215, 198, "lets the source drop what came before it", "small")
    picture.text(215, 214, "(in Holdfast the end of an epoch is the marker)", "small")
    picture.box(STAGE + RIGHT, DOWN, "stage A", "site 3, empty", "new")
    picture.arrow((SOURCE + RIGHT, UP), (STAGE + RIGHT, DOWN), "rows")
    picture.arrow((STAGE + RIGHT, DOWN), (SINK + RIGHT, UP), "rows")
    picture.text(645, 190, "any site rebuilds the state from the log,", "small")
    picture.text(645, 206, "if at most h - 1 stages in a row were lost", "small")
    return picture


PICTURES = {p.__name__: p for p in (flow, pairs, active, passive, upstream, rollback)}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw().svg())
