"""Pages of the site that are made of files elsewhere: sources that pages link to, and the tour."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TOUR = "../examples/tour.ipynb"
ASIDE = "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---\n"
SOURCE = re.compile(r"\]\(\.\./((?:examples|src)/[\w./]+\.(py|sh))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for the tour, and one for each source that a page links to."""
    files.append(File.generated(config, "tour.md", content=tour()))
    pages = [page.content_string for page in files.documentation_pages()]
    sources = {found for page in pages for found in SOURCE.findall(page)}
    for path, kind in sorted(sources):
        language = {"py": "python", "sh": "bash"}[kind]
        text = (ROOT / path).read_text("utf-8")
        page = f"{ASIDE}# {path}\n\n````{language}\n{text}````\n"
        files.append(File.generated(config, f"{path}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to these files go to their pages: in the repository they go to the files."""
    return SOURCE.sub(r"](\1.md)", markdown).replace(f"({TOUR})", "(tour.md)")


def tour() -> str:
    """The notebook as Markdown, with its stored outputs."""
    notebook = json.loads((ROOT / "docs" / TOUR).read_text("utf-8"))
    return "\n\n".join(part for cell in notebook["cells"] for part in parts(cell))


def parts(cell: dict[str, Any]) -> list[str]:
    """A cell of a notebook as Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text.replace("](../docs/", "](")]
    return [f"```python\n{text}\n```", *map(output, cell["outputs"])]


def output(stored: dict[str, Any]) -> str:
    """What a cell printed or drew."""
    if stored["output_type"] == "stream":
        return f"```text\n{''.join(stored['text'])}```"
    picture = "".join(stored["data"]["image/svg+xml"]).encode()
    data = base64.b64encode(picture).decode()
    return f"![{stored['metadata']['alt']}](data:image/svg+xml;base64,{data})"
