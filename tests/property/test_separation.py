"""Which sites stages get that must not be lost together, against all divisions there are."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.layout import Domain, Shape, StageShape
from holdfast.core.placement import place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.separation import domains_needed, exposures, stretches

Edge = tuple[int, int]


def made(k: int, keyed: int, edges: list[Edge]) -> Shape:
    """Keyed stages 1 to `keyed` between a source and a sink, with these edges among them."""
    last = keyed + 1
    fed, used = {to for _, to in edges}, {of for of, _ in edges}
    edges = [*edges, *((0, n) for n in range(1, last) if n not in fed)]
    edges += [(n, last) for n in range(1, last) if n not in used]
    ends = ProtectionSpec("pairs", 2, followers=True)
    guard = ProtectionSpec("upstream", 1, level=k, rebuild_level=k)
    stages = tuple(
        StageShape(
            n,
            f"s{n}",
            "keyed",
            6 if 0 < n < last else 1,
            tuple(x for x, e in enumerate(edges) if e[1] == n),
            tuple(x for x, e in enumerate(edges) if e[0] == n),
            guard=guard if 0 < n < last else ends,
        )
        for n in range(last + 1)
    )
    return Shape(stages, tuple(e[0] for e in edges), tuple(e[1] for e in edges))


def can_be_divided(shape: Shape, keyed: int, domains: int) -> bool:
    """By going through all ways to give each keyed stage one failure domain."""
    ways = stretches(shape)
    return any(
        not any(len({chosen[stage - 1] for stage in way}) == 1 for way in ways)
        for chosen in product(range(domains), repeat=keyed)
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, int]:
    keyed, k = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    possible = [(a, b) for a in range(1, keyed + 1) for b in range(a + 1, keyed + 1)]
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    return made(k, keyed, sorted(edges)), keyed


@settings(max_examples=200, deadline=None)
@given(shapes(), st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_no_loss_of_one_domain_ends_a_flow_if_that_can_be(
    made: tuple[Shape, int], sizes: list[int]
) -> None:
    """Some failure domains have more sites than others."""
    shape, keyed = made
    hosts = [h for h, size in enumerate(sizes) for _ in range(size)]
    domains = {s: Domain(f"h{h}", f"h{h}", "h", "a") for s, h in enumerate(hosts)}
    view = place(shape, list(domains), domains)
    possible = can_be_divided(shape, keyed, len(sizes))
    assert (exposures(view, shape, domains) == []) == possible, str(view)
    assert (domains_needed(shape) <= len(sizes)) == possible
    for stage in view.groups[1:-1]:
        counts = [group.end - group.first for group in stage]
        assert max(counts) - min(counts) <= 1, "a stage is spread evenly over its sites"
    if stretches(shape):
        held = {s for stage in view.groups[1:-1] for c in stage for s in c.replicas}
        assert len(held) >= min(len(domains), 2), "more than one site has something to do"
