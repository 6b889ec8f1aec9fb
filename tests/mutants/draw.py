"""Draw the recorded sample of mutants: `python tests/mutants/draw.py > tests/mutants/sample.jsonl`.

Needs cosmic-ray 8.7 in the Python that runs it, and nothing of the project. The sample is drawn once: a new
sample makes shares from before and after incomparable.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[2]
MANY = 400
SEED = 0
_LEFT_OUT = ("BitOr", "RemoveDecorator", "VariableReplacer", "VariableInserter")
"""`X | None` is an annotation mostly; the others need arguments, or take a `@property` away."""
_NO_BEHAVIOUR = ("check_integrity", "__repr__", "__str__")


def places(path: Path) -> Iterator[tuple[tuple[int, int], str, int, str]]:
    """Of one file: position (line, column), the operator's name, its occurrence, the enclosing function."""
    tree = get_ast(path.read_text())
    nodes = list(ast_nodes(tree))
    for name in plugins.operator_names():
        if any(word in name for word in _LEFT_OUT):
            continue
        operator = plugins.get_operator(name)()
        found = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(found):
            function = ASTQuery(node).get_definition_name()
            if function and function not in _NO_BEHAVIOUR:
                yield start, name, occurrence, function


def draw() -> Iterator[dict[str, object]]:
    """One mutant at each of `MANY` positions, drawn from all positions in all cores and policies."""
    files = sorted(path for p in ("core", "policy") for path in (ROOT / "services").rglob(f"{p}/**/*.py"))
    at: dict[tuple[str, tuple[int, int]], list[tuple[str, int, str]]] = {}
    for path in files:
        for start, name, occurrence, function in places(path):
            at.setdefault((str(path.relative_to(ROOT)), start), []).append((name, occurrence, function))
    chance = random.Random(SEED)
    drawn = chance.sample(sorted(at), MANY * 2)
    made = 0
    for file, start in drawn:
        name, occurrence, function = chance.choice(at[file, start])
        before = (ROOT / file).read_text()
        after = mutate_code(before, plugins.get_operator(name)(), occurrence)
        lines = before.splitlines(), (after or "").splitlines()
        changed = [n for n, pair in enumerate(zip(*lines, strict=False)) if pair[0] != pair[1]]
        if len(lines[0]) != len(lines[1]) or len(changed) != 1 or made == MANY:
            continue  # a mutant of several lines could not be found again in code that has moved
        made += 1
        (line,) = changed
        yield {
            "file": file,
            "function": function,
            "nth": [n for n, text in enumerate(lines[0]) if text == lines[0][line]].index(line),
            "was": lines[0][line],
            "is": lines[1][line],
        }


if __name__ == "__main__":
    for mutant in draw():
        sys.stdout.write(json.dumps(mutant, ensure_ascii=False) + "\n")
