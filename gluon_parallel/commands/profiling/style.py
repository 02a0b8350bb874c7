"""Style sheet and colours of the page."""

from .parts import BACKWARD, DEVICES, ENGINE, FORWARD, LATE, LAUNCHING, READING, SCRIPT, SUM, TRANSFER, UPDATE

COLOURS = {
    FORWARD: "#7aa6d8",
    BACKWARD: "#3d6fb4",
    UPDATE: "#3f9c8f",
    SUM: "#86b65a",
    DEVICES: "#f0a23b",
    LATE: "#d9534f",
    TRANSFER: "#b07ab8",
    LAUNCHING: "#e8cf52",
    READING: "#a5795b",
    SCRIPT: "#a9adb4",
    ENGINE: "#5f6b7a",
}

CSS = """
:root { color-scheme: light dark; --text: #1d2430; --soft: #5c6675; --back: #f4f6f9; --card: #ffffff;
  --line: #dfe4ec; --accent: #3d6fb4; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --soft: #9aa5b5; --back: #14181f; --card: #1d232c;
  --line: #323a47; --accent: #7aa6d8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 0 0 .25rem; }
p, ul { margin: 0; }
.soft { color: var(--soft); font-size: .9rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; padding: 1.1rem 1.2rem;
  margin-top: 1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin-top: 1rem; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; padding: .7rem 1rem; }
.cards b { display: block; font-size: 1.45rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.findings { list-style: none; padding: 0; }
.findings li { border-left: 4px solid var(--accent); padding: .15rem 0 .15rem .8rem; margin-top: .7rem; }
.findings code, p code { background: var(--back); border-radius: .3rem; padding: .05rem .3rem; font-size: .88em; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .5rem 0 .8rem; padding: 0; list-style: none;
  font-size: .88rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .35rem;
  vertical-align: -.06rem; }
.row { display: grid; grid-template-columns: 9rem 1fr 4.5rem; gap: .2rem .7rem; align-items: center;
  margin-top: .45rem; font-size: .9rem; }
.row svg, .chart svg { display: block; width: 100%; border-radius: .3rem; background: var(--back); }
.row .number { text-align: right; font-variant-numeric: tabular-nums; }
.axis { display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft);
  font-variant-numeric: tabular-nums; margin-top: .2rem; }
.row .axis { grid-column: 2; }
.chart { display: grid; grid-template-columns: auto 1fr; gap: 0 .5rem; margin-top: .6rem; }
.chart .scale { display: flex; flex-direction: column; justify-content: space-between; text-align: right;
  font-size: .8rem; color: var(--soft); line-height: 1; font-variant-numeric: tabular-nums; }
.chart .axis { grid-column: 2; }
.wide { overflow-x: auto; margin-top: .6rem; background:
  linear-gradient(270deg, var(--card) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, #8888, transparent) right / .6rem 100% no-repeat scroll; }
.wide th:first-child, .wide td:first-child { position: sticky; left: 0; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; }
td.bar { width: 45%; min-width: 7rem; } td.bar span { display: block; height: .7rem; border-radius: .2rem; }
.words td { white-space: normal; vertical-align: top; } td.text { text-align: left; width: 75%; color: var(--soft); }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto; } .row svg, .row .axis { grid-column: 1 / -1; }
  .row .number { grid-row: 1; grid-column: 2; } main { padding: 1rem .6rem 3rem; } section { padding: .9rem; }
  .bar { display: none; } th, td:first-child { white-space: normal; }
  .wide th { min-width: 4.6rem; } .wide th:first-child { min-width: 6.5rem; } }
"""
