"""The page of a profile in headless Chromium: no error, nothing from the network, nothing wider than the window."""

import html
import re

import chromium
import pytest
from profiling_recordings import USUAL, recording

from gluon_parallel.commands.profiling import activities
from gluon_parallel.commands.profiling.analysis import Analysis
from gluon_parallel.commands.profiling.findings import findings
from gluon_parallel.commands.profiling.page import page

# Written into the title of a copy of the page: its errors, what it loaded, and how wide it is.
WATCH = """<script>
const errors = [];
addEventListener("error", event => errors.push(event.message || event.target.tagName), true);
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll(".wide")].filter(box => box.scrollWidth > box.clientWidth);
  const lines = boxes.map(box => { box.scrollLeft = 1e5; return box.querySelectorAll("td"); });
  document.title = JSON.stringify({
  errors, inner: innerWidth, width: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
  scroll: boxes.length, cut: lines.filter((cells, number) => !boxes[number].scrollLeft ||
    cells[0].getBoundingClientRect().left < boxes[number].getBoundingClientRect().left).length,
  drawn: [...document.querySelectorAll("svg")].filter(one => one.getBoundingClientRect().width > 100).length,
}); });</script>"""


def made():
    slow = [(what, 1.5 * time) for what, time in USUAL]
    both = [
        recording([("reading data", 20), *USUAL, ("exchange", 60)], USUAL, would_convert={"clip": 1}),
        recording(slow, [*slow, (activities.DEVICES, 10), ("exchange", 20)], rank=1, busy=0.5),
    ]
    return Analysis(both)


def test_the_page_holds_every_finding_and_the_numbers_of_every_device():
    analysis = made()
    text = page(analysis, ["Here is <b>a</b> finding: gp.nn.convert_for_cpu(net)."])
    assert "Here is &lt;b&gt;a&lt;/b&gt; finding: <code>gp.nn.convert_for_cpu(net)</code>." in text
    for timeline in analysis.timelines:
        assert f"<th>{timeline}</th>" in text
        assert f"<td>{timeline.seconds(activities.FORWARD) * 1e3:.2f}</td>" in text
    words = re.sub(r"<[^>]+>", "", html.unescape(page(analysis, findings(analysis))))
    assert all(sentence in words for sentence in findings(analysis))
    assert not re.search(r"(src|href)=.(?!data:)", text)


def test_one_process_waits_for_no_other_in_its_layers():
    text = page(Analysis([recording([*USUAL, (activities.DEVICES, 20)])]), [])
    assert "<th>for devices</th>" in text and "<th>for processes</th>" not in text
    assert "<th>for processes</th>" in page(made(), [])


@chromium.needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_without_errors_and_fits_the_window(tmp_path, width):
    analysis = made()
    watched = html.escape(page(analysis, findings(analysis)).replace("<head>", f"<head>{WATCH}"))
    file = tmp_path / "frame.html"  # Chromium's own windows are no narrower than 500
    report = "onload='document.title = this.contentDocument.title'"
    file.write_text(f'<title></title><iframe width={width} height=900 {report} srcdoc="{watched}"></iframe>', "utf-8")
    shown, _ = chromium.show(file.as_uri(), tmp_path / "user", "--window-size=1400,1000", "--dump-dom")
    seen = html.unescape(re.search("<title>(.*?)</title>", shown).group(1))
    assert '"errors":[]' in seen
    assert '"loaded":[]' in seen
    assert f'"inner":{width}' in seen
    numbers = {name: int(number) for name, number in re.findall(r'"(\w+)":(\d+)', seen)}
    assert numbers["width"] <= numbers["inner"], seen
    assert (numbers["scroll"] > 0) == (width < 500) and numbers["cut"] == 0  # the first column stays in sight
    assert numbers["drawn"] >= 4 + 4 + 2 + 2 + 1  # bars, devices, Python, exchanges, steps
