"""The layers of the code as a picture, drawn from its imports.

A room is a group of folders. An arrow leads from a room to one that it imports, unless a longer path exists.
Rooms that import each other share a box. `python -m bench.house.layers` prints it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.house.static import Module, modules

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("services", "shared", "sim", "bench")
ROOMS = (
    (r"services\..*\.(core|policy)(\..*)?", "core/, policy/: what services decide"),
    (r"services\.worker\.(door|engine_thread|cores|engine(\..*)?)", "worker: engine/ and its thread"),
    (r"services\.worker\.(kv|peers|pie)(\..*)?", r"worker: \1/"),
    (r"services\.worker(\..*)?", "worker"),
    (r"services\.(stack(\..*)?|__main__)", "stack"),
    (r"services\.\w+(\..*)?", "gateway, scheduler, predictor, placement, ledger"),
    (r"shared\.bus(\..*)?", "shared/bus"),
    (r"shared(\..*)?", "shared: messages, subjects, configuration, errors"),
    (r"(sim|bench)(\..*)?", r"\1"),
)
"""Patterns of module names and their rooms; the first match counts."""

Graph = dict[str, set[str]]


def mermaid(root: Path = ROOT) -> str:
    """Return the picture of the tree below `root`."""
    graph = without_detours(without_cycles(imports_between_rooms(modules(root, FOLDERS))))
    order = sorted(graph, key=lambda room: (-_height(graph, room), room))
    ids = {room: f"r{at}" for at, room in enumerate(order)}
    boxes = [f'    {ids[room]}["{room}"]' for room in order]
    arrows = [
        f"    {ids[room]} --> {ids[other]}"
        for room in order
        for other in sorted(graph[room], key=order.index)
    ]
    return "\n".join(["flowchart TD", *boxes, *arrows])


def imports_between_rooms(of: Sequence[Module]) -> Graph:
    """Return every room with the rooms that it imports."""
    room_of = {module.name: name for module in of if (name := _room(module.name))}
    graph: Graph = {room: set() for room in room_of.values()}
    for module in of:
        if module.name in room_of:
            imported = {room_of[name] for name in module.imported() if name in room_of}
            graph[room_of[module.name]] |= imported - {room_of[module.name]}
    return graph


def without_cycles(graph: Mapping[str, set[str]]) -> Graph:
    """Join rooms that reach each other into one, with all their names."""
    reached = {room: _reached(graph, room) for room in graph}
    box = {
        room: " + ".join(sorted({room} | {other for other in reached[room] if room in reached[other]}))
        for room in graph
    }
    joined: Graph = {name: set() for name in box.values()}
    for room, others in graph.items():
        joined[box[room]] |= {box[other] for other in others} - {box[room]}
    return joined


def without_detours(graph: Mapping[str, set[str]]) -> Graph:
    """Remove arrows to rooms that a longer path reaches; the graph has no cycles."""
    beyond = {
        room: set().union(*(_reached(graph, other) for other in others)) for room, others in graph.items()
    }
    return {room: others - beyond[room] for room, others in graph.items()}


def _room(module: str) -> str:
    fits = ((re.fullmatch(pattern, module), name) for pattern, name in ROOMS)
    return next((match.expand(name) for match, name in fits if match), "")


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Return the rooms reachable over one arrow or more."""
    found: set[str] = set()
    to_visit = list(graph[start])
    while to_visit:
        room = to_visit.pop()
        if room not in found:
            found.add(room)
            to_visit += graph[room]
    return found


def _height(graph: Mapping[str, set[str]], room: str) -> int:
    """Return the number of arrows on the longest path down."""
    return max((1 + _height(graph, other) for other in graph[room]), default=0)


if __name__ == "__main__":
    print(mermaid())
