"""What the site has besides the files of docs/: its contents, README as its first page, a page of messages.

MkDocs calls the `on_…` functions (mkdocs.org/user-guide/configuration/#hooks). All else is plain text in and
out, so that tests need no MkDocs.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": (
        "index",
        "recipes",
        "settings",
        "clients",
        "experiments",
        "own-scheduler",
        "fields",
        "structured-output",
        "tool-calls",
    ),
    "How it works": (
        "architecture",
        "request-lifecycle",
        "papers",
        "papers/*",
        "messages",
        "simulator",
        "simulation",
    ),
    "Memory": ("prefix-cache", "pie", "lending", "distattention", "migration", "bulk"),
    "The fleet": ("routing", "roles", "tenants", "gateways", "shadows", "vllm"),
    "Operating": (
        "models",
        "containers",
        "kubernetes",
        "hosts",
        "upgrades",
        "live-page",
        "explain",
        "metrics",
        "traces",
        "kv-events",
        "security",
    ),
    "Measured": ("benchmarks", "benchmarks/*"),
    "Decisions": ("decisions/*",),
}
"""Pages by where a reader looks for them; `folder/*`: all that are there. What is not written yet is left
out."""
MADE = ("index", "messages")
"""Pages that no file in docs/ is."""
MADE_FILES = tuple(f"{name}.md" for name in MADE)
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIAGRAMS = "diagrams"
"""Of docs/: what `make diagrams` drew."""
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def contents(docs: Path) -> list[dict[str, list[str]]]:
    """The site's sections, each with its pages, as paths in docs/."""
    sections = []
    for title, names in SECTIONS.items():
        pages = [page for name in names for page in _pages(docs, name)]
        sections.append({title: pages})
    return sections


def _pages(docs: Path, name: str) -> list[str]:
    if name.endswith("/*"):
        pages = sorted(docs.glob(f"{name}.md"), key=lambda path: (path.stem != "README", path))
        return [path.relative_to(docs).as_posix() for path in pages]
    return [f"{name}.md"] if name in MADE or (docs / f"{name}.md").exists() else []


def inside(text: str, page: str) -> str:
    """`text` of the file `page`, a path from the root: links to what the site has not become words."""

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        place, hash_, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not place:
            return found.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), place))
        if path == "README.md":
            path = "docs/index.md"
        is_page = path.startswith("docs/") and Path(path).suffix in (".md", ".png", ".svg")
        if not is_page:
            return f"{words[1:-1]} (`{path}`)" if not words.startswith("!") else ""
        home = "docs" if page == "README.md" else posixpath.dirname(page)
        return f"{words}({posixpath.relpath(path, home)}{hash_}{anchor})"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def diagrams_of(text: str) -> list[str]:
    """The sources of a page's diagrams, in order."""
    return _DIAGRAM.findall(text)


def picture_of(source: str) -> str:
    """The file in docs/diagrams/ that shows it."""
    return f"{sha256(source.encode()).hexdigest()[:12]}.svg"


def drawn(text: str, page: str) -> str:
    """`text` of `page`, a path in docs/, with pictures in the place of diagrams' sources."""
    home = posixpath.dirname(page)

    def picture(found: re.Match[str]) -> str:
        return f"![diagram]({posixpath.relpath(f'{DIAGRAMS}/{picture_of(found[1])}', home or '.')})"

    return _DIAGRAM.sub(picture, text)


def anchor(words: str, separator: str) -> str:
    """Of a heading, as the repository's own links have it."""
    plain = re.sub(r"[`*\[\]()]|<[^>]*>", "", words).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


def messages(folder: Path) -> str:
    """Every message and value that services exchange, from the code that defines them."""
    lines = [
        "# Messages",
        "",
        "All that services say to each other, in MessagePack over NATS, as the code in",
        "`shared/messages/` has it. What is not of the stated type and within its bounds reaches no handler.",
        "Who says which of them to whom, and under which subject, is in the README of each service.",
    ]
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        if not classes:
            continue
        lines += ["", f"## `{path.stem}`", "", *(ast.get_docstring(tree) or "").splitlines()]
        for node in classes:
            lines += ["", f"### {node.name}", "", *(ast.get_docstring(node) or "").splitlines(), ""]
            rows = list(_fields(node))
            if rows:
                lines += ["| field | type | |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = " ".join(str(following.value.value).split()).replace("|", "\\|")
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            kind = ast.unparse(item.annotation).replace("|", "\\|")
            default = "" if item.value is None else f" = {ast.unparse(item.value)}".replace("|", "\\|")
            yield f"| `{item.target.id}` | `{kind}{default}` | {said} |"
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            yield f"| `{item.targets[0].id}` | `{ast.unparse(item.value)}` | {said} |"


# --- what MkDocs calls


def on_config(config: Any) -> Any:
    config["nav"] = contents(ROOT / "docs")
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    readme = inside((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "messages.md", content=messages(ROOT / "shared" / "messages")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    path = page.file.src_uri
    return drawn(markdown if path in MADE_FILES else inside(markdown, f"docs/{path}"), path)
