"""Building the native library: once, by whoever comes first; and its attention operator under sanitizers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine.native import build
from shared.errors import ConfigError

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")
DRIVER = Path(__file__).with_name("attention_driver.cpp")
_BUILD = "import sys; from pathlib import Path; from services.worker.engine.native.build import build"


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small source instead of the real ones."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_a_second_build_compiles_nothing_and_a_changed_source_does(
    small_sources: Path, tmp_path: Path
) -> None:
    library = build.build(tmp_path / "builds")
    made_ns = library.stat().st_mtime_ns
    assert build.build(tmp_path / "builds") == library
    assert library.stat().st_mtime_ns == made_ns
    assert [path.name for path in (tmp_path / "builds").iterdir()] == [library.parent.name]
    (small_sources / "small.h").write_text("// new\n")
    assert build.build(tmp_path / "builds") != library


def test_what_the_compiler_says_is_told_and_nothing_is_left(small_sources: Path, tmp_path: Path) -> None:
    (small_sources / "small.cpp").write_text("this is no C++")
    with pytest.raises(ConfigError, match=r"small\.cpp"):
        build.build(tmp_path / "builds")
    assert list((tmp_path / "builds").iterdir()) == []


def test_a_library_made_before_is_found_without_a_compiler(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.build(tmp_path / "builds")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.build(tmp_path / "builds") == library
    (small_sources / "small.h").write_text("// other sources\n")
    with pytest.raises(ConfigError, match="no C"):
        build.build(tmp_path / "builds")


def test_a_folder_that_cannot_be_written_is_told(small_sources: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        build.build(blocker / "builds")


def test_several_processes_may_build_at_once(small_sources: Path, tmp_path: Path) -> None:
    program = (
        f"{_BUILD}; import services.worker.engine.native.build as b; b.SOURCES = Path(sys.argv[1]);"
        "print(build(Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(small_sources), str(tmp_path / "builds")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate(timeout=100)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    (library,) = printed
    assert Path(library).exists()
    assert len(list((tmp_path / "builds").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", ["-march=native", "-DKVASIR_PORTABLE"])
def test_attention_reads_nothing_that_no_row_sees(machine: str, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    flags = "-std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fopenmp".split()
    sources = [str(DRIVER), *(str(build.SOURCES / name) for name in ("attention.cpp", "digest.cpp"))]
    program = str(tmp_path / "driver")
    subprocess.run(
        [compiler, *flags, machine, "-Wno-psabi", f"-I{build.SOURCES}", *sources, "-o", program],
        check=True,
        timeout=250,
    )
    done = subprocess.run(
        [program, "100"], capture_output=True, text=True, timeout=250, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"[\d.e+-]+", done.stdout.strip())
