"""The report: it leads with the point, its figures hold the data of the records, and a real browser draws it."""

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lab_runs import write_run
from thinwire.lab import LabError
from thinwire.lab.pages import figures
from thinwire.lab.pages.report import command, find_runs, names, render, write_report
from thinwire.lab.pages.splits import COMPUTE, EXCHANGE, OWN, WHOLE, splits
from thinwire.lab.pages.styles import short, styles
from thinwire.lab.records.record import Run, rank_file
from thinwire.lab.records.summary import Records, Target
from thinwire.lab.studies.compare import conclude

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


def read(folder: Path) -> dict[str, Records]:
    return names([Records.read(one) for one in find_runs([folder])])


def rows_of(text: str) -> list[list[str]]:
    """The table's cells, as a reader sees them."""
    body = text.split("<tbody>")[1].split("</tbody>")[0]
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td.*?</td>", row)]
        for row in re.findall(r"<tr.*?</tr>", body)
    ]


def test_the_figures_hold_the_data_of_the_records(page: Path) -> None:
    named = read(page.parent)
    style, view = styles(list(named)), figures.view(named, None)
    hero = figures.against_seconds(named, style, view, {"DDP": 2.0}, 900, 400)
    drawn = {one.title: one for one in figures.costs(named, style, view, splits(named, {}))}
    for i, one in enumerate(hero.series):
        judged = Records.read(page.parent / str(i)).evaluations()
        later = [line for line in judged if line["step"] > 0]  # a logarithm has no place for zero seconds, or bytes
        assert one.name == METHODS[i] and list(one.y) == [line["value"] for line in later]
        assert list(one.x) == [line["seconds"] * (2.0 if i == 0 else 1.0) for line in later]
        steps = drawn["validation against steps"].series[i]
        assert list(steps.x) == [line["step"] for line in judged] and list(steps.y) == [v["value"] for v in judged]
        sent = drawn["validation against bytes sent by a worker"].series[i]
        assert list(sent.x) == [line["wire_bytes"] for line in later]
    told = {one.title: one for one in figures.diagnostics(named, style)}
    assert list(told["threshold"].series[0].y) == [0.5] * 40
    assert [one.name for one in told["density: share of the entries really sent"].series] == list(METHODS[1:])
    text = page.read_text()
    for drawing in (*drawn.values(), *told.values()):
        assert drawing.inline() in text
    assert len(text) < 500_000


def test_many_methods_that_tell_much_fit_on_a_page(tmp_path: Path) -> None:
    """A dozen methods, a dozen measures each, two of them with five measures of two dozen layers."""
    draw = random.Random(0).random
    for i in range(12):
        keys = [f"measure{k}" for k in range(12)]
        keys += [f"blocks.{n}.mlp/{what}" for n in range(24) for what in "abcde"] if i in (3, 4) else []
        write_run(tmp_path / f"{i:02d}", f"QSGD({i + 2})", steps=200, workers=1)
        path = tmp_path / f"{i:02d}" / "rank0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told = [line | {key: draw() for key in keys} if line.get("step") else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in told))
    write_report(find_runs([tmp_path]), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000


def test_a_step_is_split_for_baselines_too(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP", step_s=0.2)
    assert splits(read(tmp_path), {})["DDP"].parts == {WHOLE: pytest.approx(0.2)}
    write_run(tmp_path / "1", "ErrorFeedback(TopK(0.01))", step_s=0.1)
    found = splits(read(tmp_path), {})
    topk = found["ErrorFeedback(TopK(0.01))"]
    assert topk.parts == {COMPUTE: pytest.approx(0.03), OWN: pytest.approx(0.04), EXCHANGE: pytest.approx(0.03)}
    assert not topk.guess and found["DDP"].guess
    assert found["DDP"].parts == {COMPUTE: pytest.approx(0.03), EXCHANGE: pytest.approx(0.17)}
    write_run(tmp_path / "2", "Dense()", step_s=0.05, exchange_s=0.0, capture_s=0.0, select_s=0.0, apply_s=0.0)
    on_a_link = splits(read(tmp_path), {"Dense()": 0.5})["Dense()"]
    assert on_a_link.parts == {COMPUTE: pytest.approx(0.05), OWN: 0.0, EXCHANGE: pytest.approx(0.45)}


def test_only_exchanges_are_drawn_where_local_steps_are_taken(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "LocalSteps(Dense(), every=4)")
    path = tmp_path / "0" / "rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step", 0) % 4:
            line |= {"collectives": 0, "density": 0.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    x, y = figures.told("density")(Records.read(tmp_path / "0"), "step")
    assert x == list(range(4, 41, 4)) and y == [0.01] * 10


def test_a_method_has_one_style_throughout_and_plain_ddp_is_grey(page: Path) -> None:
    named = read(page.parent)
    style, view = styles(list(named)), figures.view(named, None)
    drawn = [*figures.costs(named, style, view, splits(named, {})), *figures.diagnostics(named, style)]
    seen: dict[str, set[int]] = {}
    for one in (one for drawing in drawn for one in drawing.series):
        seen.setdefault(one.name, set()).add(one.slot)
    assert seen == {"DDP": {0}, METHODS[1]: {1}, METHODS[2]: {2}}


def test_names_are_short_and_never_the_same() -> None:
    assert short("LocalSteps(ErrorFeedback(PowerSGD(4)), every=5)") == "PowerSGD(4) every 5"
    assert short("LocalSteps(Dense(), every=5, outer=Outer(0.7, 0.9))") == "Dense() every 5 outer=Outer(0.7, 0.9)"
    assert short("ErrorFeedback(TopK(0.1), decay=0.9)") == "ErrorFeedback(TopK(0.1), decay=0.9)"
    assert short("DDP (lr 0.1)") == "DDP (lr 0.1)" and short("a)(b)") == "a)(b)"
    both = styles(["TopK(0.1)", "ErrorFeedback(TopK(0.1))"])
    assert [style.label for style in both.values()] == ["TopK(0.1)", "ErrorFeedback(TopK(0.1))"]


def test_the_table_leads_with_who_was_first_and_says_who_failed(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP", step_s=0.1, wire=8e5)
    write_run(tmp_path / "1", "ErrorFeedback(TopK(0.01))", step_s=0.025, wire=1e4)
    write_run(tmp_path / "2", "QSGD(4)", speed=0.7)
    write_run(tmp_path / "3", "SignSGD()", validation_loss=9.0)
    write_run(tmp_path / "4", "Strom(0.1)", ended=False)
    write_run(tmp_path / "5", "Variance(2.0)")
    (tmp_path / "5" / "rank0.jsonl").unlink()
    (tmp_path / "5" / "rank1.jsonl").unlink()
    folders = [tmp_path / str(i) for i in range(5)]
    failed = {tmp_path / "5": "worker 1 fell <over>"}
    summary = conclude(tmp_path, [*folders, tmp_path / "5"], failed, link=None, emulated=False, target=0.9)
    write_report(folders, tmp_path / "report.html", summary["winner"], summary)
    text = (tmp_path / "report.html").read_text()
    rows = rows_of(text)
    assert rows[0] == ["ErrorFeedback(TopK(0.01))", "0.8", "4", "0.0", "100 %", "25.0", "15 kB"]
    assert rows[1] == ["DDP", "3.2", "1", "0.0", "100 %", "100.0", "1.2 MB"]
    assert rows[2] == ["QSGD(4)", "-", "-", "20.0", "80 %", "100.0", "1.5 kB"]
    assert [row[0] for row in rows[3:]] == ["SignSGD()", "Strom(0.1)", "Variance(2.0)"]
    assert "diverged" in rows[3][1] and rows[4][1] == "stopped after step 40 of 40"
    assert rows[5][1] == "worker 1 fell <over>" and text.count('class="failed"') == 3
    assert "<h1>digits/mlp, 2 workers, no slow link</h1>" in text and "target 90 %" in text


def test_losses_are_told_in_per_cent_and_predicted_times_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP", metric="loss", wire=8e5)
    write_run(tmp_path / "1", "QSGD(4)", metric="loss", speed=0.7)
    summary = {"target": {"metric": "loss", "value": 0.5}, "link": "8mbit", "emulated": False}
    text = render([Records.read(tmp_path / str(i)) for i in range(2)], "", summary)
    rows = rows_of(text)
    assert rows[0][0] == "DDP" and rows[1][3] == f"{100 * (0.7 / 0.3 - 1):.1f}" and "% more loss" in text
    assert float(rows[0][5]) > 850 and "times are predicted" in text  # 8e5 bytes at 8 Mbit/s, and 0.1 s of computing


def test_a_damaged_summary_is_no_reason_to_fail(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP")
    records = [Records.read(tmp_path / "0")]
    for summary in ({"target": 3, "failed": [], "link": "soup", "emulated": False}, {"target": {"value": "x"}}):
        assert "target 99 %" in render(records, "", summary)


def test_records_of_which_the_first_workers_are_gone_still_have_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "DDP")
    rank_file(tmp_path / "0", 0).unlink()
    write_report(find_runs([tmp_path]), tmp_path / "report.html", "")
    assert "digits" in (tmp_path / "report.html").read_text()


def test_the_view_shows_what_differs(tmp_path: Path) -> None:
    """The first plunge is cut off, and so is one who ends far away: the others would be one line."""
    for i, speed in enumerate((0.9, 0.88, 0.86, 0.2)):
        write_run(tmp_path / str(i), f"QSGD({i + 2})", speed=speed)
    view = figures.view(read(tmp_path), Target("accuracy", 0.95))
    assert 0.5 < view.low < 0.95 < 1.0 <= view.high + 0.01 and view.line() == (0.95, "target 95 %")


def test_text_from_outside_cannot_become_a_script(page: Path) -> None:
    text = page.read_text()
    assert "</script><b>" not in text and "&lt;much&gt;" in text
    assert html.escape("</script><b>") in text


def test_a_name_cannot_swallow_the_page(tmp_path: Path) -> None:
    """By the HTML standard "<!--<script" in a script element hides its own end."""
    for i, method in enumerate(("<!--<script>", "<!--TABLE-->", "]]></style>")):
        write_run(tmp_path / str(i), method)
    write_report(find_runs([tmp_path]), tmp_path / "report.html", "<!--SECTIONS--> & <!--<script>")
    text = (tmp_path / "report.html").read_text()
    assert "<!--" not in text and text.count("<script") == text.count("</script>") == 1
    assert text.count("</style>") == 1 and text.count("<table>") == 1
    assert html.escape("<!--<script>") in text and html.escape("<!--TABLE-->") in text


def test_nothing_is_loaded_from_elsewhere(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"(?:src|href|url|import)\s*[=(]", text)
    assert "default-src 'none'" in text  # so that a browser would refuse


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
const shown = (one) => one.getBoundingClientRect().width > 0;
const drawings = () => [...document.querySelectorAll("figure svg.drawing")].filter(shown);
for (const one of document.querySelectorAll("details")) one.open = true;
const key = document.querySelector('.legend button[data-run="1"]');
// A window that is not in front sends no focus events: this one is sent by hand.
key.focus();
const focused = document.activeElement === key;
key.dispatchEvent(new FocusEvent("focus"));
const lit = [...document.querySelectorAll("figure .dim")].map((one) => one.dataset.run);
key.blur();
key.dispatchEvent(new FocusEvent("blur"));
const heading = document.querySelectorAll("th button")[5];
const column = () => [...document.querySelectorAll("tbody tr")].map((row) => parseFloat(row.cells[5].textContent));
heading.click();
const up = column();
heading.click();
const told = {
  drawings: drawings().map((one) => ({ title: one.getAttribute("aria-label"), width: one.getBoundingClientRect().width,
    marks: one.querySelectorAll("path, rect").length, letters: parseFloat(getComputedStyle(one).fontSize) *
    one.getBoundingClientRect().width / one.viewBox.baseVal.width })),
  focused, lit, after: document.querySelectorAll(".dim").length, up, down: column(),
  paper: getComputedStyle(document.body).backgroundColor,
  page: document.documentElement.scrollWidth, window: innerWidth,
};
const out = document.createElement("pre");
out.id = "told";
out.textContent = JSON.stringify(told);
document.body.append(out);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1000, False), (500, True)])
def test_a_real_browser_draws_it(page: Path, width: int, dark: bool) -> None:
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
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
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
    titles = [one["title"] for one in seen["drawings"]]
    assert titles.count("validation accuracy against seconds of training") == 1  # the wide one or the narrow one
    assert "where the time of a step goes (ms)" in titles and "threshold" in titles
    for one in seen["drawings"]:
        assert one["marks"] > 3 and 0.3 * width < one["width"] <= width
        assert one["letters"] >= 10  # pixels: to be read on a phone
    assert seen["focused"] and set(seen["lit"]) == {"0", "2"} and seen["after"] == 0
    assert seen["up"] == [100, 200, 300] and seen["down"] == [300, 200, 100]
    assert (seen["paper"] == "rgb(255, 255, 255)") != dark
    assert seen["page"] <= seen["window"] + 1  # nothing makes a phone scroll sideways
