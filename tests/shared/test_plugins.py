"""What comes from outside: a class in a file, or the name of an installed package."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.plugins import PluginFaults, PluginKind, absolute, label

KIND = PluginKind("kvasir.tests", "greeter", "greeter", ("greet",))
SOURCE = """
class Polite:
    def greet(self):
        return "good day"

class Silent:
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "torn.py").write_text("class Polite(\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["mine.py:Polite", "./mine.py:Polite"])
def test_a_class_in_a_file_is_found_from_where_one_stands(name: str, folder: Path) -> None:
    assert KIND.find(name, {})().greet() == "good day"
    assert absolute(name) == f"{folder}/mine.py:Polite" and label(absolute(name)) == "mine.py:Polite"
    assert KIND.find(name, {}) is KIND.find(absolute(name), {}), "read once"
    (folder / "mine.py").write_text(SOURCE.replace("good day", "hello"))
    assert KIND.find(name, {})().greet() == "hello", "and again when it has changed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:Polite", r"there is no file \S+nowhere.py that can be read: No such file"),
        ("mine.py:Plite", "has no class 'Plite'; its classes are: Polite, Silent"),
        ("mine.py", "has no class ''; its classes are: Polite, Silent"),
        ("mine.py:Silent", "lacks what a greeter needs: greet"),
        ("broken.py:Polite", r"ModuleNotFoundError: No module named 'nothing_of_that_name' \(broken.py:1\)"),
        ("torn.py:Polite", r"SyntaxError: .*\(torn.py:1\)"),
        ("polte", r"'polte' is not known; did you mean 'polite'\? write one of: polite, or FILE.py:CLASS"),
    ],
)
def test_what_cannot_be_loaded_is_told(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        KIND.find(name, {"polite": lambda: None})
    assert error.value.param == "greeter"


def test_failures_count_for_a_minute() -> None:
    faults = PluginFaults()
    for at_s in (0.0, 30.0):
        faults.note("greeter Polite", "greet", ValueError("no"), at_s)
    assert faults.text(31.0) == "greeter Polite raised ValueError: no in greet; 2 times within a minute"
    assert faults.text(70.0).endswith("once within a minute") and faults.text(91.0) == ""
