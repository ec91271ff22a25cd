"""Draws knowledge_graph.png and expert_placement.png: what experts know, how they are tied, where they are placed.

In a knowledge graph experts are on a circle, concepts around them, near the experts that serve them. Circles are used,
since nothing on one can overlap, and the picture of the next epoch looks much the same.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drivetrain.core.knowledge_graph import Edge, KnowledgeGraph, Node, Relation
from drivetrain.core.run_folder import as_row
from drivetrain.report.picture import FAINT, GRID, INK, canvas
from drivetrain.report.run_data import Row, RunData

Point = tuple[float, float]
_TIES = ("similarity", "co-activation", "parent", "split")
_OUTER = 1.0
_SEARCHED = 24  # experts; the chain alone has to do for more
_TINTS = ["#dbe7f4", "#8fb3d9", "#2f6db5", "#163f73"]  # of specialization, from all concepts alike to one
_DORMANT, _CONCEPT, _FILL = "#b5485d", "#f3ead7", "#b98d3c"
_DORMANT_SHARE = 0.1  # of the run so far without a token
# Color, dashes, how far the line bends aside (two of one pair must not lie on each other), what it says.
_LINES: Mapping[Relation, tuple[str, Any, float, str]] = {
    "co-activation": ("#d9822b", "-", 0.22, "chosen together"),
    "similarity": ("#3a9679", "-", -0.22, "similar"),
    "split": ("#7a5fb0", (0, (2, 2)), 0.42, "share a concept, not its tokens"),
    "parent": (INK, "-", 0.0, "grown from"),
    "composition": ("#cdc3ae", "-", 0.0, "serves the concept"),
}
_LEAST = {"similarity": 0.3, "composition": 0.12, "co-activation": 0.1, "split": 0.25, "parent": 0.1}
_MOST = {"similarity": 2, "composition": 3, "co-activation": 2, "split": 1, "parent": 99}  # of a node
_MOST_TIES = 60
_FOLDER = "knowledge"
MOST_GRAPHS = 6  # on a page
_MOST_TOLD = 6  # ties of a kind
TIES = {relation: (color, words) for relation, (color, _, _, words) in _LINES.items()}


@dataclass(frozen=True)
class GraphLayout:
    places: Mapping[Node, Point]
    angles: Mapping[Node, float]
    inner: float  # radius of the experts' circle


def layout(graph: KnowledgeGraph) -> GraphLayout:
    experts = _in_a_ring(graph)
    inner = 0.62 if graph.concepts else 0.85
    angles: dict[Node, float] = dict(_evenly(experts))
    concepts = _around(graph, angles)
    angles |= concepts
    places: dict[Node, Point] = {
        node: _point(angle, _OUTER if node in concepts else inner if len(experts) > 1 else 0.0)
        for node, angle in angles.items()
    }
    return GraphLayout(places, angles, inner)


def _in_a_ring(graph: KnowledgeGraph) -> list[int]:
    """Order experts so that neighbors are tied: a chain of the strongest ties, then pairs swap while it helps."""
    ties = _ties(graph)
    left = list(graph.experts)
    ring: list[int] = []
    while left:
        best = max(left, key=lambda number: (ties.get((ring[-1], number), 0.0) if ring else 0.0, -number))
        ring.append(best)
        left.remove(best)
    for _ in range(4 if len(ring) <= _SEARCHED else 0):
        for first in range(len(ring)):
            for second in range(first + 1, len(ring)):
                before = _length(ring, ties)
                ring[first], ring[second] = ring[second], ring[first]
                if _length(ring, ties) >= before - 1e-12:
                    ring[first], ring[second] = ring[second], ring[first]
    return ring


def _ties(graph: KnowledgeGraph) -> dict[tuple[Node, Node], float]:
    """Return the weights of ties between experts, also through the concepts they share."""
    ties: dict[tuple[Node, Node], float] = {}

    def tie(one: Node, other: Node, weight: float) -> None:
        for pair in ((one, other), (other, one)):
            ties[pair] = ties.get(pair, 0.0) + weight

    for edge in graph.edges():
        if edge.relation in _TIES:
            tie(edge.one, edge.other, edge.weight)
    for concept in graph.concepts:
        serving = graph.serving(concept)
        for place, (one, first) in enumerate(serving):
            for other, second in serving[:place]:
                tie(one, other, first * second)
    return ties


def _length(ring: Sequence[int], ties: Mapping[tuple[Node, Node], float]) -> float:
    size = len(ring)
    where = {number: place for place, number in enumerate(ring)}
    return sum(
        weight * min(abs(where[one] - where[other]), size - abs(where[one] - where[other]))  # type: ignore[index]
        for (one, other), weight in ties.items()
    )


def _around(graph: KnowledgeGraph, angles: Mapping[Node, float]) -> dict[Node, float]:
    """Place each concept near its experts, all of them evenly apart, the whole rotated to where it fits best."""
    wanted: dict[str, float] = {}
    for concept in graph.concepts:
        serving = graph.serving(concept)
        east = sum(weight**2 * math.cos(angles[number]) for number, weight in serving)
        north = sum(weight**2 * math.sin(angles[number]) for number, weight in serving)
        wanted[concept] = math.atan2(north, east) % math.tau
    order = sorted(wanted, key=lambda concept: (wanted[concept], concept))
    count = len(order)
    if not count:
        return {}

    def cost(turn: float, shift: int) -> float:
        return sum(
            1 - math.cos(turn + math.tau * ((place + shift) % count) / count - wanted[concept])
            for place, concept in enumerate(order)
        )

    turns = [math.tau * step / (count * 12) for step in range(12)]
    shifts = range(count) if count <= 64 else range(1)
    turn, shift = min(((t, s) for t in turns for s in shifts), key=lambda pair: (cost(*pair), pair))
    return {concept: turn + math.tau * ((place + shift) % count) / count for place, concept in enumerate(order)}


def _evenly(nodes: Sequence[int]) -> list[tuple[int, float]]:
    return [(node, math.pi / 2 - math.tau * place / max(len(nodes), 1)) for place, node in enumerate(nodes)]


def _point(angle: float, radius: float) -> Point:
    return radius * math.cos(angle), radius * math.sin(angle)


def draw_knowledge(data: RunData, epoch: int | None = None) -> bytes | None:
    """Draw the graph that was written last, or that of the given epoch; None if there is none."""
    found = knowledge_of(data, epoch)
    if not found:
        return None
    name, layer = next(iter(found["layers"].items()))
    graph = KnowledgeGraph.from_json(layer["graph"])
    words = f"step {found['step']:,}   ·   {_layer(name)}"
    return draw_graph(graph, found["step"], f"{data.title}: what the experts know", words)


def draw_places(data: RunData) -> bytes | None:
    """Draw the placement of experts; None where all experts are on one device."""
    found = knowledge_of(data)
    name, layer = next(iter(found["layers"].items())) if found else ("", {"capabilities": ()})
    if len(layer["capabilities"]) < 2:
        return None
    words = f"step {found['step']:,}   ·   {_layer(name)}"
    return draw_placement(layer, f"{data.title}: who lives with whom", words)


def knowledge_of(data: RunData, epoch: int | None = None) -> Row:
    """Return what the hook `KnowledgeFiles` wrote."""
    pattern = "[es]*.json" if epoch is None else f"epoch_{epoch:04d}.json"
    found = sorted((data.folder / _FOLDER).glob(pattern))
    rows = [row for path in found if (row := as_row(path.read_bytes())) is not None]
    return max(rows, key=lambda row: int(row["step"]), default={})


def knowledge_figures(data: RunData, most: int = MOST_GRAPHS) -> list[dict[str, Any]]:
    """Return the graphs that the page draws: places, sizes, names and ties, the first, the last and some between."""
    paths = sorted((data.folder / _FOLDER).glob("[es]*.json"))
    rows = [row for path in paths if (row := as_row(path.read_bytes())) is not None and row.get("layers")]
    rows.sort(key=lambda row: int(row.get("step", 0)))
    count = min(most, len(rows))
    chosen = [rows[round(place * (len(rows) - 1) / max(count - 1, 1))] for place in range(count)]
    found = []
    for row in chosen:
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # damaged: the others are drawn
            found.append(_graph_figures(row))
    return found


def _graph_figures(row: Row) -> dict[str, Any]:
    name, layer = next(iter(row["layers"].items()))
    graph = KnowledgeGraph.from_json(layer["graph"])
    plan, step = layout(graph), int(row["step"])
    radii = _radii(graph, plan)
    seen = max((graph.facts(number).last_use for number in graph.experts), default=step)
    dormant = set(graph.dormant(seen, max(int(_DORMANT_SHARE * step), 1)))
    loads = dict(zip(layer["experts"], layer["loads"], strict=True))
    total = max(sum(load for number, load in loads.items() if number >= 0), 1)
    nodes: list[dict[str, Any]] = []
    for node, (x, y) in plan.places.items():
        drawn: dict[str, Any] = {"name": str(node), "x": round(x, 4), "y": round(-y, 4)}
        if isinstance(node, str):
            told = [f"{share:.0%} of it by expert {number}" for number, share in graph.serving(node)[:_MOST_TOLD]]
        else:
            facts, load = graph.facts(node), loads.get(node, 0) / total
            drawn |= {"radius": round(radii[node], 4), "share": round(load, 4), "dormant": node in dormant}
            drawn["specialization"] = round(facts.specialisation, 3)
            told = [f"{load:.1%} of the last step's tokens", f"{facts.activations:,} tokens in all"]
            told += [f"specialization {facts.specialisation:.2f}", *_ties_in_words(graph, node)]
            told += ["dormant: long without a token"] * (node in dormant)
        nodes.append({**drawn, "told": told})
    numbers = {node: index for index, node in enumerate(plan.places)}
    ties = [
        [numbers[edge.one], numbers[edge.other], edge.relation, round(edge.weight, 3)]
        for edge in _shown(graph)
        if edge.one in numbers and edge.other in numbers
    ]
    return {"step": step, "epoch": row.get("epoch"), "layer": _layer(name), "nodes": nodes, "ties": ties}


def _ties_in_words(graph: KnowledgeGraph, number: int) -> Iterator[str]:
    """Yield the strongest ties of an expert, a line for each kind."""
    for relation, (_, _, _, words) in _LINES.items():
        edges = [edge for edge in graph.edges(relation) if number in (edge.one, edge.other)]
        if relation == "parent":
            edges = [edge for edge in edges if edge.other == number]
        strongest = sorted(edges, key=lambda edge: -edge.weight)[:_MOST_TOLD]
        others = [(edge.other if edge.one == number else edge.one, edge.weight) for edge in strongest]
        if relation == "parent":  # which weakens with time only so that it is forgotten in the end
            yield from (f"{words} expert {other}" for other, _ in others)
        elif others:
            yield f"{words}: " + ", ".join(f"{other} ({weight:.0%})" for other, weight in others)


def draw_graph(graph: KnowledgeGraph, step: int, title: str, subtitle: str = "") -> bytes:
    """Draw a graph. Size: all tokens. Color: specialization. Red border: long without a token. Line width: weight."""
    plan = layout(graph)
    with canvas(11.5, 8.2) as drawn:
        axis = drawn.figure.add_axes((0.0, 0.01, 0.73, 0.9))
        side = drawn.figure.add_axes((0.735, 0.06, 0.25, 0.78))
        count = f"{len(graph.experts)} experts, {len(graph.concepts)} concepts, {len(graph.edges())} ties"
        drawn.head(title, "   ·   ".join(part for part in (count, subtitle) if part), left=0.03)
        for each in (axis, side):
            each.set_axis_off()
        _frame(axis, plan)
        radii = _radii(graph, plan)
        shown = _shown(graph)
        for edge in shown:
            _draw_edge(axis, edge, plan, radii)
        # Counted from the last use of any expert: use is recorded at looks only.
        seen = max((graph.facts(number).last_use for number in graph.experts), default=step)
        dormant = set(graph.dormant(seen, max(int(_DORMANT_SHARE * step), 1)))
        for number in graph.experts:
            _draw_expert(axis, plan.places[number], radii[number], number, graph, number in dormant)
        for concept in graph.concepts:
            _draw_concept(axis, concept, plan)
        _draw_legend(side, {edge.relation for edge in shown}, bool(dormant))
        return drawn.png()


def draw_placement(layer: Mapping[str, Any], title: str, subtitle: str = "") -> bytes:
    """Draw a box for each device, its experts in it, and lines between those that are chosen together."""
    graph = KnowledgeGraph.from_json(layer["graph"])
    ranks = range(len(layer["capabilities"]))
    held = {rank: [s for s, r in enumerate(layer["ranks"]) if r == rank] for rank in ranks}
    columns = min(len(ranks), 4)
    rows = -(-len(ranks) // columns)
    with canvas(max(7.2, 3.1 * columns + 0.7), 1.65 + 3.35 * rows) as drawn:
        height = drawn.figure.get_figheight()
        axis = drawn.figure.add_axes((0.02, 0.5 / height, 0.96, 1 - 1.3 / height))
        axis.set_axis_off()
        axis.set_aspect("equal")
        axis.set_xlim(-0.08, columns + 0.02)
        axis.set_ylim(-rows * 1.12 + 0.06, 0.05)
        kept = f"{layer['together']:.0%} of what works together shares a device"
        drawn.head(title, "   ·   ".join(part for part in (kept, subtitle) if part), left=0.03)
        total = max(sum(layer["loads"]), 1)
        places: dict[int, tuple[float, float, int]] = {}
        for rank in ranks:
            corner = (rank % columns, -(rank // columns) * 1.12 - 1.0)
            _draw_box(axis, corner, rank, held[rank], layer, total)
            for number, x, y in _in_box(corner, [layer["experts"][slot] for slot in held[rank]]):
                places[number] = (x, y, rank)
        size = _size_in_box(max(Counter(rank for _, _, rank in places.values()).values(), default=1))
        strongest = sorted(graph.edges("co-activation"), key=lambda edge: -edge.weight)[:_MOST_TIES]
        for edge in reversed(strongest):
            if edge.weight >= _LEAST["co-activation"] and edge.one in places and edge.other in places:
                _draw_bond(axis, edge, places, size)
        loads = dict(zip(layer["experts"], layer["loads"], strict=True))
        for number, (x, y, _) in places.items():
            _draw_resident(axis, (x, y), size, number, loads[number] / total * len(places))
        _draw_bonds_legend(drawn.figure)
        return drawn.png()


# ---- the graph's parts


def _frame(axis: Any, plan: GraphLayout) -> None:
    axis.set_aspect("equal")
    room = 1.3 if _has_many(plan) else 1.13
    axis.set_xlim(-room * 1.15, room * 1.15)
    axis.set_ylim(-room, room)


def _radii(graph: KnowledgeGraph, plan: GraphLayout) -> dict[int, float]:
    """Return radii by the square root of tokens, so that areas are proportional; neighbors never touch."""
    experts = graph.experts
    room = plan.inner * math.sin(math.pi / max(len(experts), 2)) * 0.8
    largest = min(0.125, room)
    most = max((graph.facts(number).activations for number in experts), default=1) or 1
    return {number: largest * (0.45 + 0.55 * math.sqrt(graph.facts(number).activations / most)) for number in experts}


def _shown(graph: KnowledgeGraph) -> list[Edge]:
    """Return the strongest edges of each node, the weaker first, so that the stronger are drawn above.

    All of the edges would be a ball.
    """
    left: dict[tuple[Node, Relation], int] = {}
    found = []
    for edge in sorted(graph.edges(), key=lambda edge: -edge.weight):
        ends = (edge.other,) if edge.relation == "composition" else (edge.one, edge.other)
        counts = [left.get((end, edge.relation), 0) for end in ends]
        if edge.weight >= _LEAST[edge.relation] and min(counts) < _MOST[edge.relation]:
            found.append(edge)
            left |= {(end, edge.relation): count + 1 for end, count in zip(ends, counts, strict=True)}
    return found[::-1]


def _draw_edge(axis: Any, edge: Edge, plan: GraphLayout, radii: Mapping[int, float]) -> None:
    from matplotlib.patches import FancyArrowPatch

    color, dashes, bend, _ = _LINES[edge.relation]
    is_parent, is_served = edge.relation == "parent", edge.relation == "composition"
    begin, end = plan.places[edge.one], plan.places[edge.other]
    begin = _towards(begin, end, radii[int(edge.one)])
    end = _towards(end, plan.places[edge.one], 0.035 if is_served else radii[int(edge.other)] + 0.012 * is_parent)
    axis.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle="-|>,head_length=6,head_width=3" if is_parent else "-",
            connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0, color=color, linestyle=dashes,
            linewidth=1.3 if is_parent else 0.8 + 4.2 * edge.weight,
            alpha=0.9 if is_parent else 0.45 + 0.5 * edge.weight, zorder=1 if is_served else 2, capstyle="round",
        )
    )  # fmt: skip


def _draw_expert(
    axis: Any, place: tuple[float, float], radius: float, number: int, graph: KnowledgeGraph, is_dormant: bool
) -> None:
    from matplotlib.patches import Circle

    specialisation = graph.facts(number).specialisation
    fill = "#e9ecef" if is_dormant else _tint(specialisation)
    edge, width = (_DORMANT, 2.0) if is_dormant else ("white", 1.5)
    axis.add_patch(Circle(place, radius, facecolor=fill, edgecolor=edge, linewidth=width, zorder=4))
    color = "white" if specialisation > 0.45 and not is_dormant else INK
    size = max(6.0, min(13.0, 130 * radius))
    axis.text(*place, str(number), ha="center", va="center", color=color, fontsize=size, fontweight="bold", zorder=5)


def _draw_concept(axis: Any, concept: str, plan: GraphLayout) -> None:
    from matplotlib.patches import Circle

    x, y = plan.places[concept]
    axis.add_patch(Circle((x, y), 0.026, facecolor=_CONCEPT, edgecolor=_FILL, linewidth=1.2, zorder=4))
    angle = plan.angles[concept]
    # Around the circle labels lie along the radius where there are many, so that they never meet.
    many = _has_many(plan)
    where = (x + 0.05 * math.cos(angle), y + 0.05 * math.sin(angle))
    east = math.cos(angle)
    turned = (math.degrees(angle) if east >= 0 else math.degrees(angle) + 180) if many else 0.0
    across = "left" if east > 0.2 else "right" if east < -0.2 else "center"
    upright = "center" if abs(east) > 0.2 else "bottom" if math.sin(angle) > 0 else "top"
    if many:
        across, upright = ("left" if east >= 0 else "right"), "center"
    text = concept if len(concept) <= 18 else concept[:17] + "…"
    axis.text(
        *where, text, rotation=turned, rotation_mode="anchor", ha=across, va=upright, fontsize=7.5 if many else 9.5,
        zorder=5,
    )  # fmt: skip


def _draw_legend(side: Any, relations: set[Relation], has_dormant: bool) -> None:
    """Draw the legend, from top to bottom: lines, sizes, colors."""
    from matplotlib.lines import Line2D

    side.set_xlim(0, 1)
    side.set_ylim(0, 1)
    y = 0.97
    side.text(0.0, y, "Ties", fontweight="bold", fontsize=11, va="center")
    for relation, (color, dashes, _, words) in _LINES.items():
        if relation not in relations:
            continue
        y -= 0.058
        side.add_line(Line2D([0.0, 0.16], [y, y], color=color, linestyle=dashes, linewidth=2.2))
        if relation == "parent":
            side.plot([0.155], [y], marker=">", color=color, markersize=6)
        side.text(0.21, y, words, va="center", fontsize=9.5)
    y -= 0.05
    side.text(0.0, y, "the wider, the stronger; weak ones are left out", va="center", fontsize=8.5, color=FAINT)
    y -= 0.095
    side.text(0.0, y, "Experts", fontweight="bold", fontsize=11, va="center")
    y -= 0.06
    for x, size in ((0.01, 4), (0.065, 8), (0.14, 12)):
        side.plot([x], [y], marker="o", markersize=size, color=_TINTS[1], clip_on=False)
    side.text(0.21, y, "tokens they got in all", va="center", fontsize=9.5)
    y -= 0.068
    steps = 40
    for step in range(steps):
        x = 0.96 * step / steps
        side.axvspan(x, x + 0.97 / steps, y - 0.013, y + 0.013, color=_tint((step + 0.5) / steps), linewidth=0)
    y -= 0.038
    side.text(0.0, y, "all concepts alike", va="center", fontsize=8.5, color=FAINT)
    side.text(0.96, y, "one concept", va="center", ha="right", fontsize=8.5, color=FAINT)
    if has_dormant:
        y -= 0.06
        style = {"markeredgecolor": _DORMANT, "markerfacecolor": "#e9ecef", "markeredgewidth": 2.0}
        side.plot([0.08], [y], marker="o", markersize=12, linestyle="", **style)
        side.text(0.21, y, "dormant: long without a token", va="center", fontsize=9.5)
    y -= 0.095
    side.text(0.0, y, "Concepts", fontweight="bold", fontsize=11, va="center")
    y -= 0.058
    side.plot([0.08], [y], marker="o", markersize=8, color=_CONCEPT, markeredgecolor=_FILL, markeredgewidth=1.2)
    side.text(0.21, y, "labels, or clusters of inputs", va="center", fontsize=9.5)


# ---- the placement's parts


def _draw_box(
    axis: Any, corner: tuple[float, float], rank: int, slots: Sequence[int], layer: Mapping[str, Any], total: int
) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    x, y = corner
    box = "round,pad=0,rounding_size=0.04"
    axis.add_patch(
        FancyBboxPatch((x, y), 0.92, 1.0, boxstyle=box, facecolor="#f7f9fb", edgecolor=GRID, linewidth=1.4, zorder=0)
    )
    load = sum(layer["loads"][slot] for slot in slots)
    here = sum(layer["experts"][slot] >= 0 for slot in slots)
    free = len(slots) - here
    over: dict[str, Any] = {"bbox": {"facecolor": "#f7f9fb", "edgecolor": "none", "pad": 1.0}, "zorder": 3}
    axis.text(x + 0.05, y + 0.925, f"rank {rank}", fontweight="bold", fontsize=11, va="center", **over)
    words = f"{here} expert{'s' * (here != 1)}" + (f", {free} free slot{'s' * (free != 1)}" if free else "")
    axis.text(x + 0.87, y + 0.925, words, fontsize=8.5, color=FAINT, va="center", ha="right", **over)
    axis.add_patch(Rectangle((x + 0.05, y + 0.055), 0.5, 0.035, facecolor=GRID, zorder=1))
    axis.add_patch(Rectangle((x + 0.05, y + 0.055), 0.5 * load / total, 0.035, facecolor="#8fb3d9", zorder=2))
    axis.text(
        x + 0.87, y + 0.0725, f"{load / total:.0%} of load", fontsize=8.5, color=FAINT, va="center", ha="right", **over
    )


def _in_box(corner: tuple[float, float], numbers: Sequence[int]) -> list[tuple[int, float, float]]:
    """Place the experts of a device on a ring, a single one in the middle."""
    there = sorted(number for number in numbers if number >= 0)
    x, y = corner[0] + 0.46, corner[1] + 0.5
    radius = 0.0 if len(there) == 1 else 0.25
    found = []
    for place, number in enumerate(there):
        angle = math.pi / 2 - math.tau * place / len(there)
        found.append((number, x + radius * 1.15 * math.cos(angle), y + radius * math.sin(angle)))
    return found


def _size_in_box(count: int) -> float:
    return min(0.085, 0.25 * math.sin(math.pi / max(count, 3)) * 0.8)


def _draw_bond(axis: Any, edge: Edge, places: Mapping[int, tuple[float, float, int]], size: float) -> None:
    from matplotlib.patches import FancyArrowPatch

    x, y, rank = places[int(edge.one)]
    u, v, other = places[int(edge.other)]
    is_near = rank == other
    axis.add_patch(
        FancyArrowPatch(
            (x, y), (u, v), arrowstyle="-", connectionstyle=f"arc3,rad={0.0 if is_near else 0.15}", capstyle="round",
            color="#d9822b" if is_near else "#9aa7b3", linestyle="-" if is_near else (0, (3, 2.5)), shrinkA=0,
            linewidth=0.6 + 3.6 * edge.weight, alpha=0.9 if is_near else 0.7, zorder=2 if is_near else 1, shrinkB=0,
        )
    )  # fmt: skip


def _draw_resident(axis: Any, place: tuple[float, float], size: float, number: int, relative_load: float) -> None:
    from matplotlib.patches import Circle

    radius = size * (0.62 + 0.38 * min(math.sqrt(relative_load), 1.4) / 1.4)
    axis.add_patch(Circle(place, radius, facecolor="#2f6db5", edgecolor="white", linewidth=1.5, zorder=4))
    style = {"ha": "center", "va": "center", "color": "white", "fontweight": "bold", "zorder": 5}
    axis.text(*place, str(number), fontsize=max(6.0, min(12.0, 140 * radius)), **style)


def _draw_bonds_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color="#d9822b", linewidth=2.6, label="chosen together, on one device"),
        Line2D([], [], color="#9aa7b3", linewidth=2.0, linestyle=(0, (3, 2.5)), label="on two"),
        Line2D([], [], color="#2f6db5", marker="o", markersize=9, linestyle="", label="an expert, by its tokens"),
    ]
    figure.legend(handles=lines, loc="lower center", ncols=3, fontsize=9, bbox_to_anchor=(0.5, 0.0))


# ---- what they need


def _has_many(plan: GraphLayout) -> bool:
    """Return whether there are more concepts than fit side by side with their names."""
    return sum(isinstance(node, str) for node in plan.places) > 24


def _towards(begin: tuple[float, float], end: tuple[float, float], distance: float) -> tuple[float, float]:
    length = math.dist(begin, end) or 1.0
    return tuple(b + (e - b) * distance / length for b, e in zip(begin, end, strict=True))  # type: ignore[return-value]


def _tint(value: float) -> str:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    return str(to_hex(LinearSegmentedColormap.from_list("tint", _TINTS)(min(max(value, 0.0), 1.0))))


def _layer(name: str) -> str:
    return f"layer {name}" if name else "the whole model"
