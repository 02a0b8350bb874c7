"""After the build: every link within the site has its page and anchor, and no page asks another host for anything."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.errors import ExtensionError

FETCHED = {
    ("link", "href"),
    ("script", "src"),
    ("img", "src"),
    ("source", "src"),
    ("iframe", "src"),
    ("object", "data"),
}


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser fetches to show it."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.fetched = set(), [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name"):
                self.anchors.add(value)
            elif (tag, name) in FETCHED:
                self.fetched.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")


def check(app, error):
    if error is not None or app.builder.format != "html":
        return
    folder, wrong = Path(app.outdir).resolve(), []
    pages = {path: Page(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        where = path.relative_to(folder)
        for url in page.fetched:
            if urlsplit(url).netloc:
                wrong.append(f"{where} asks another host for {url}")
        for url in [*page.links, *page.fetched]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                wrong.append(f"{where} links to {url}, which is not there")
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{where} links to {url}, and that page has no such anchor")
    if wrong:
        raise ExtensionError("\n".join(wrong))


def setup(app):
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
