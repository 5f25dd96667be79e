"""The report: the figures hold the data of the records, and a real browser draws them without an error."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire.lab import LabError
from thinwire.lab.figures import COLOURS, style
from thinwire.lab.record import Run
from thinwire.lab.report import command, figures_of, find_runs, names, write_report
from thinwire.lab.summary import Records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
METHODS = ("DDP", "ErrorFeedback(TopK(0.01))", "ErrorFeedback(</script><b>)")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for i, method in enumerate(METHODS):
        write_run(
            tmp_path / f"{i}", method, wire=1000.0 * (i + 1), measured=1010.0, step_s=0.1 * (i + 1), threshold=0.5
        )
    path = tmp_path / "report.html"
    write_report(find_runs([tmp_path]), path, "TopK won, by <much>.")
    return path


def expected(folder: Path, axis: str) -> tuple[list[float], list[float]]:
    judged = Records.read(folder).evaluations()
    return [line[axis] for line in judged], [line["value"] for line in judged]


def test_the_figures_hold_the_data_of_the_records(page: Path) -> None:
    figures = figures_of(page.read_text())
    by_title = {figure["layout"]["title"]["text"]: figure for figure in figures}
    for title, axis in (("validation against steps", "step"), ("validation against seconds of training", "seconds")):
        for i, trace in enumerate(by_title[title]["data"]):
            x, y = expected(page.parent / str(i), axis)
            assert trace["name"] == METHODS[i] and trace["x"] == x and trace["y"] == y
    for i, trace in enumerate(by_title["validation against bytes on a worker's wire"]["data"]):
        x, y = expected(page.parent / str(i), "wire_bytes")
        assert trace["x"] == x[1:] and trace["y"] == y[1:]  # a logarithm has no place for zero bytes
    split = by_title["where the time of a step goes (ms)"]["data"]
    assert {trace["name"] for trace in split} == {"whole step", "compute", "capture", "select", "exchange", "apply"}
    assert next(trace for trace in split if trace["name"] == "exchange")["x"] == [
        0.0,
        pytest.approx(30),
        pytest.approx(30),
    ]
    wires = by_title["bytes a step on each worker's wire"]["data"]
    assert wires[0]["x"] == [pytest.approx(1500 * (i + 1)) for i in range(3)]
    assert wires[2]["x"] == [pytest.approx(v) for _ in range(3) for v in (1010, 2020)]
    assert by_title["threshold"]["data"][0]["y"] == [0.5] * 40
    assert "density: share of the entries really sent" in by_title


def test_a_method_has_one_colour_throughout(page: Path) -> None:
    seen: dict[str, set[str]] = {}
    for figure in figures_of(page.read_text()):
        for trace in figure["data"]:
            if trace["type"] == "scatter" and trace.get("line"):
                seen.setdefault(trace["name"], set()).add(trace["line"]["color"])
    assert {name: {COLOURS[i]} for i, name in enumerate(METHODS)} == seen
    styles = {tuple(style(i).values()) for i in range(4 * len(COLOURS))}
    assert len(styles) == 4 * len(COLOURS)


def test_text_from_outside_cannot_become_a_script(page: Path) -> None:
    text = page.read_text()
    assert "</script><b>" not in text and "&lt;much&gt;" in text
    assert html.escape("</script><b>") in text


def test_nothing_is_loaded_from_elsewhere(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text)


def test_runs_of_one_method_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for i, lr in enumerate((0.1, 0.2)):
        run = write_run(tmp_path / str(i), "DDP")
        Run(**{**vars(run), "lr": lr}).write(tmp_path / str(i))
    assert list(names([Records.read(tmp_path / str(i)) for i in range(2)])) == ["DDP (lr 0.1)", "DDP (lr 0.2)"]
    assert "--lr 0.2" in command(Run.read(tmp_path / "1"))


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no folder"):
        find_runs([tmp_path / "nothing"])
    with pytest.raises(LabError, match="holds no run"):
        find_runs([tmp_path])


PROBE = """<script>
const told = [...document.querySelectorAll(".js-plotly-plot")].map(p => ({
  title: p.layout.title.text,
  y: p.data.map(t => Array.from(t.y)),
  drawn: p.querySelectorAll(".trace, .bars .point").length,
  width: p.getBoundingClientRect().width,
}));
const out = document.createElement("pre");
out.id = "told";
out.textContent = JSON.stringify({figures: told, page: document.documentElement.scrollWidth, window: innerWidth});
document.body.append(out);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1000, 500])
def test_a_real_browser_draws_it(page: Path, width: int) -> None:
    page.write_text(page.read_text().replace("</body>", PROBE))
    shown = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--window-size={width},2000",
            f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "CONSOLE" not in shown.stderr
    told = re.search(r'<pre id="told">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert told, shown.stdout[-2000:]
    seen = json.loads(html.unescape(told[1]))
    assert len(seen["figures"]) == len(figures_of(page.read_text()))
    for drawn, figure in zip(seen["figures"], figures_of(page.read_text())):
        assert drawn["title"] == figure["layout"]["title"]["text"]
        assert drawn["y"] == [trace["y"] for trace in figure["data"]]
        assert drawn["drawn"] > 0
        assert 0.5 * width < drawn["width"] <= width
    assert seen["page"] <= seen["window"] + 1  # nothing makes a phone scroll sideways
