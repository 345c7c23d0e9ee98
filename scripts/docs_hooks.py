"""Hooks of the documentation site: pages that are made of files elsewhere, and the design pages' order.

mkdocs calls these functions by name; see `hooks` in mkdocs.yml.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS = ROOT / "docs" / "docs" / "advanced_features" / "server_arguments.mdx"
DESIGN_TITLE = "Design"


def arguments_page(mdx: str) -> str:
    """The generated page of server arguments without what only MDX understands.

    Raises: ValueError if the front matter or the comment after it is not where it was.
    """
    head, _, body = mdx.partition("\n---\n")
    if not head.startswith("---\n") or not body.lstrip().startswith("{/*"):
        raise ValueError(f"{ARGUMENTS.name} does not begin with front matter and a comment")
    comment, _, rest = body.partition("*/}")
    if "{" in rest:
        raise ValueError(f"{ARGUMENTS.name} has an expression that Markdown would show as text")
    return f"# Server arguments\n{rest}"


def page_from_root(name: str) -> str:
    """A Markdown file beside `docs/`, with links as seen from inside it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    arguments = ARGUMENTS.relative_to(ROOT).as_posix()
    return text.replace(f"]({arguments})", "](server_arguments.md)").replace("](docs/", "](")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of `docs/design/` into the navigation, the engine's first."""
    folder = Path(config.docs_dir) / "design"
    names = sorted((p.name for p in folder.glob("*.md")), key=lambda n: (n != "engine.md", n))
    nav = [item for item in config.nav or [] if DESIGN_TITLE not in item]
    config.nav = [*nav, {DESIGN_TITLE: [f"design/{name}" for name in names]}]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "server_arguments.md": arguments_page(ARGUMENTS.read_text(encoding="utf-8")),
        "contributing.md": page_from_root("CONTRIBUTING.md"),
        "changes.md": page_from_root("CHANGELOG.md"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files
