"""What `bench house` counts, and the layers that it draws, on small trees of their own."""

from pathlib import Path

import pytest

from bench.house import ceilings, layers, static

TREE = {
    "services/__init__.py": "",
    "services/one.py": "from services import two\nfrom services.three import Link\n\n\nclass Lane: ...\n",
    "services/two.py": "class Link: ...\n",
    "services/three.py": "Link = int\nLIMIT = 3\n",
    "services/four.py": "from services.three import (\n    LIMIT,\n)\n",
    "services/config.py": "x = 1\n",
    "services/five.py": "import services.config\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> list[static.Module]:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return static.modules(tmp_path, ["services"])


def test_rooms_that_import_each_other_share_a_box() -> None:
    circle = {"top": {"left"}, "left": {"right"}, "right": {"left", "base"}, "base": set[str]()}
    assert layers.without_cycles(circle) == {"top": {"left + right"}, "left + right": {"base"}, "base": set()}


def test_an_arrow_is_left_out_where_a_longer_way_leads_there() -> None:
    graph = {"top": {"middle", "base"}, "middle": {"base"}, "base": set[str]()}
    assert layers.without_detours(graph) == {"top": {"middle"}, "middle": {"base"}, "base": set()}


def test_a_room_imports_what_its_modules_import(tmp_path: Path) -> None:
    """Folders named core are one room, wherever they lie; the first pattern that fits counts."""
    for name, text in {
        "services/worker/kv/core/tree.py": "from shared.clock import Clock\n",
        "services/worker/kv/store.py": "from services.worker.kv.core.tree import Clock\n",
        "services/ledger/core/table.py": "import shared.clock\n",
        "shared/clock.py": "Clock = int\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    lines = [line.strip() for line in layers.mermaid(tmp_path).splitlines()]
    assert lines == [
        "flowchart TD",
        'r0["worker: kv/"]',
        'r1["core/, policy/: what services decide"]',
        'r2["shared: messages, subjects, configuration, errors"]',
        "r0 --> r1",
        "r1 --> r2",
    ]


def test_a_figure_above_its_ceiling_is_named_and_one_that_was_not_counted_is_not() -> None:
    house = ceilings.House({"lines": 10, "files": 3, "functions": 5}, {})
    assert house.excesses({"lines": 10, "files": 4}) == ["files is 4, and house.toml allows 3"]


def test_files_of_a_feature_that_is_off_are_found_below_its_folders() -> None:
    house = ceilings.House({}, {"Pie": ["services/worker/pie/*", "pool.py"], "roles": ["roles.py"]})
    touched = ["services/worker/pie/core/meter.py", "pool.py", "services/worker/pool.py"]
    assert house.off_files(touched) == {"Pie": ["pool.py", "services/worker/pie/core/meter.py"], "roles": []}


def test_the_projects_ceilings_and_patterns_are_about_what_there_is() -> None:
    """A pattern that matches no file would let its feature back onto every request's way."""
    root = Path(__file__).parent.parent.parent
    patterns = [pattern for each in ceilings.read(root).off.values() for pattern in each]
    assert [pattern for pattern in patterns if not list(root.glob(pattern))] == []
