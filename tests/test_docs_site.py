"""The built site in Chromium: pages are shown without an error and ask no other host, and the search finds pages."""

import contextlib
import functools
import http.server
import json
import os
import re
import threading
from pathlib import Path

import chromium
import pytest

SITE = Path(__file__).resolve().parents[1] / "build" / "docs"
pytestmark = [
    pytest.mark.slow,
    chromium.needs_chromium,
    pytest.mark.skipif(
        not (SITE / "index.html").exists() and "CI" not in os.environ, reason="needs the site, which `make docs` builds"
    ),
]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and forbids the browser to ask others, which it then says in its console."""

    def end_headers(self):
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data:")
        super().end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def address():
    with served(SITE) as address:
        yield address


def show(url, folder):
    """The page as the browser has made it, and what its console says."""
    options = "--enable-logging=stderr", "--virtual-time-budget=15000", "--dump-dom"
    page, said = chromium.show(url, folder, *options)
    return page, [line for line in said.splitlines() if "CONSOLE" in line]


# Opens each page in a frame as wide as a phone, and as a desktop's window, and says what is wrong with it.
EVERY_PAGE = """<pre></pre><script>(async () => {
  const said = document.querySelector("pre");
  for (const page of PAGES) for (const window_width of [390, 1280]) {
    const frame = document.createElement("iframe");
    [frame.width, frame.height, frame.src] = [window_width, 800, page];
    document.body.append(frame);
    await new Promise(loaded => frame.onload = loaded);
    const shown = frame.contentDocument;
    const width = Math.max(...[...shown.querySelectorAll("html, .content")].map(part => part.scrollWidth));
    if (!shown.querySelector("article") || width > window_width)
      said.textContent += `${page} has no article, or is ${width} pixels wide;`;
    frame.remove();
  }
  said.textContent += "done";
})();</script>"""


def test_every_page_is_shown_without_an_error_and_fits_a_phone_and_a_desktop(tmp_path):
    (tmp_path / "site").symlink_to(SITE)
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    every = EVERY_PAGE.replace("PAGES", json.dumps([f"site/{page}" for page in pages]))
    (tmp_path / "every.html").write_text(every)
    with served(tmp_path) as address:
        shown, console = show(f"{address}/every.html", tmp_path / "profile")
    assert len(pages) > 40 and console == []
    assert re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)[1] == "done"


def test_the_search_finds_the_layer(address, tmp_path):
    shown, console = show(f"{address}/search.html?q=SyncBatchNorm", tmp_path)
    results = re.findall(r'class="search">.*?</ul>', shown, re.DOTALL)
    assert console == [] and "reference/api/nn.html" in "".join(results)
