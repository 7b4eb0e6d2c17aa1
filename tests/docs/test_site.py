"""The site is built without a warning, and its pages load nothing from other hosts."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADED = {"script", "img", "iframe", "source", "video", "object", "embed", "use", "image"}


class Loads(HTMLParser):
    """The addresses that a page loads, and the text of its styles and scripts."""

    def __init__(self, page):
        super().__init__()
        self.addresses, self.inline, self._in = [], "", ""
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._in = tag
        self.inline += values.get("style") or ""
        if tag in LOADED:
            self.addresses += [values.get(key) for key in ("src", "href", "data", "srcset")]
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(values["href"])

    def handle_data(self, data):
        if self._in == "style":
            self.inline += data


def test_the_site(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "index.html" in pages
    for page in pages:
        loads = Loads(page)
        for address in filter(None, loads.addresses):
            assert not re.match(r"(https?:)?//", address), (page, address)
        assert not re.search(r"(@import|url\()\W*(https?:)?//", loads.inline), page
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(@import|url\()[\"' ]*(https?:)?//", style.read_text("utf-8")), style
    assert "moving_rate" in (tmp_path / "api" / "torch.html").read_text("utf-8")
    assert "DiLoCo, by hand" in (tmp_path / "search" / "search_index.json").read_text("utf-8")
