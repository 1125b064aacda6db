"""The page: files that are there, text that is escaped, and what a browser makes of it."""

import base64
import re
import shutil
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from moonopt.errors import UserError
from moonopt.runs.report.page import write_report
from moonopt.runs.report.study import read_runs


@pytest.fixture(scope="module")
def report(many_runs, tmp_path_factory):
    return write_report(read_runs([many_runs]), tmp_path_factory.mktemp("written") / "report")


def test_every_file_of_the_report_is_there(report):
    assert report.name == "index.html"
    plots = ("losses", "progress", "weights", "pareto", "conflict", "costs")
    expected = {"index.html"}
    for folder in ("toy", "report_bench:Scenes", "report_bench:Thirty"):
        expected |= {f"{folder}/table{suffix}" for suffix in (".csv", ".md", ".tex")}
        expected |= {f"{folder}/figures/{plot}{suffix}" for plot in plots for suffix in (".svg", ".png")}
    assert {str(path.relative_to(report.parent)) for path in report.parent.rglob("*") if path.is_file()} == expected


def test_links_have_the_tables_in_them_and_nothing_comes_from_elsewhere(report):
    text = report.read_text()
    links = re.findall(r'<a [^>]*href="([^"#][^"]*)"', text)
    files = [path.read_bytes() for path in report.parent.rglob("table.*")]
    assert len(links) == len(files) == 9
    assert sorted(base64.b64decode(link.partition("base64,")[2]) for link in links) == sorted(files)
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "http" not in without_names
    assert not re.search(r"@import|<link(?! rel=\"icon\" href=\"data:)|src=", without_names)


def test_labels_are_escaped(report):
    text = report.read_text()
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert "-->" not in text


def test_the_page_says_how_to_repeat_and_what_is_missing(report):
    text = report.read_text()
    for said in (
        "moonopt run toy --method moon --seed 2",
        "abc1234",
        "torch 2.13.0",
        "cpu AVX512",
        "2026-11-15T13:00:00+00:00 to 2026-11-15T13:02:00+00:00",
        "uw, seed 0: failed (FloatingPointError: loss is NaN); uw, seed 1: unfinished, at step 60",
        "Doe et al. (2025), Table 3",
        "There is no run of ls here",
    ):
        assert said in text


def test_examples_are_shown_as_they_are(make_run, toy_metrics, tmp_path):
    make_run("moon", 0, toy_metrics("moon", 0))
    (run,) = read_runs([make_run.args[0]])
    example = {"given": {"question": "1 < 2?"}, "made": {"response": "First,\nyes.", "more": "2 ± 3"}}
    line = {**run.evaluation[-1], "examples": [example, {"given": {}, "made": {"number": 3}}]}
    text = write_report([replace(run, evaluation=[line])], tmp_path / "report").read_text()
    assert "<summary>1 &lt; 2?</summary>" in text
    assert "First,\nyes.</td>" in text
    assert ">2 ± 3</td>" in text
    assert "<summary>Example 2</summary>" in text


def test_overrides_that_all_rows_share_are_said_once_in_the_summary_and_below_the_table(make_run, toy_metrics, tmp_path):
    for method in ("moon", "ls"):
        make_run(method, 0, toy_metrics(method, 0), overrides={"data.spread": 1})
    text = write_report(read_runs([make_run.args[0]]), tmp_path / "report").read_text()
    assert "2 methods, 2 finished runs, all with data.spread=1." in text
    assert "<li>All with data.spread=1.</li>" in text
    assert "moon, data.spread=1" not in text


def test_a_table_can_be_saved_from_a_page_that_is_alone(browser, report, tmp_path):
    alone = tmp_path / "alone.html"
    shutil.copy(report, alone)
    opened = browser.new_page()
    opened.goto(alone.as_uri())
    with opened.expect_download() as download:
        opened.locator("#toy .files a").first.click()
    assert download.value.suggested_filename == "toy.csv"
    assert download.value.path().read_bytes() == (report.parent / "toy" / "table.csv").read_bytes()
    opened.close()


def test_no_finished_run_makes_a_page_that_says_so(make_run, tmp_path):
    make_run("moon", 0, {}, state="unfinished")
    text = write_report(read_runs([make_run.args[0]]), tmp_path / "report").read_text()
    assert "No run is finished." in text
    assert "<figure" not in text
    with pytest.raises(UserError, match="no runs"):
        write_report([], tmp_path / "report")


def test_losses_that_are_not_numbers_do_not_stop_the_page(make_run, tmp_path):
    folder = make_run("moon", 0, {"first": float("nan"), "second": None, "average loss": float("inf")})
    log = folder / "metrics.jsonl"
    log.write_text(re.sub(r'"first": [-\d.e]+', '"first": NaN', log.read_text()))
    text = write_report(read_runs([folder]), tmp_path / "report").read_text()
    assert "NaN" in text
    assert "inf" in text


def test_the_page_stays_whole_if_writing_fails(make_run, toy_metrics, tmp_path, monkeypatch):
    make_run("moon", 0, toy_metrics("moon", 0))
    runs = read_runs([make_run.args[0]])
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("before")

    written = []

    def full(*arguments):
        written.append(arguments)
        if len(written) > 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report(runs, tmp_path / "report")
    assert (tmp_path / "report" / "index.html").read_text() == "before"
    assert (tmp_path / "report" / "toy" / "table.csv").exists()
    assert not list((tmp_path / "report").rglob("*.part"))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, report):
    """Opens the report; at the end there must have been no error and no request for anything but the page."""
    opened, complaints = [], []

    def open_page(width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if request.url != report.as_uri() else None)
        page.goto(report.as_uri())
        opened.append(page)
        return page

    yield open_page
    for each in opened:
        each.close()
    assert [complaint for complaint in complaints if not complaint.startswith("data:")] == []


def test_every_figure_is_drawn(page):
    drawn = page().evaluate(
        """() => [...document.querySelectorAll("figure .panel")].map((panel) => {
            const box = panel.querySelector("svg").getBoundingClientRect();
            const paths = [...panel.querySelectorAll("path")].filter((path) => path.getTotalLength() > 0).length;
            return [panel.closest("figure").id, box.width, box.height, paths];
        })"""
    )
    assert len({name for name, *_ in drawn}) == 18
    for name, width, height, paths in drawn:
        assert width > 200, name
        assert height > 100, name
        assert paths > 0, name


def test_ids_are_unique(page):
    ids = page().evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))


def column(page, index):
    cells = page.locator("#toy table.results tbody tr").evaluate_all(
        f"rows => rows.map((row) => row.cells[{index}].dataset.value ?? row.cells[{index}].textContent)"
    )
    return [cell.strip() for cell in cells]


def test_a_click_on_a_heading_sorts_by_raw_value_with_missing_ones_last(page):
    opened = page()
    heading = opened.locator("#toy table.results thead th").nth(1)
    before = column(opened, 0)
    values = [float(value) for value in column(opened, 1)]
    finite = sorted(value for value in values if value == value)
    assert len(finite) < len(values)  # one is NaN
    assert heading.get_attribute("aria-sort") == "none"
    for direction, expected in (("ascending", finite), ("descending", finite[::-1])):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == direction
        found = [float(value) for value in column(opened, 1)]
        assert found[:-1] == expected
        assert found[-1] != found[-1]
    assert sorted(column(opened, 0)) == sorted(before) != column(opened, 0)
    corner = opened.locator("#toy table.results thead th").first
    corner.locator("button").focus()
    opened.keyboard.press("Enter")
    assert corner.get_attribute("aria-sort") == "ascending"
    assert heading.get_attribute("aria-sort") == "none"
    assert column(opened, 0)[1:3] == ["famo", "ls"]


def test_light_and_dark_differ_and_the_button_switches(page):
    def colours(opened):
        axis = "getComputedStyle(document.querySelector('.panel svg text')).fill"
        return opened.evaluate(f"[getComputedStyle(document.body).backgroundColor, {axis}]")

    light, dark = page(), page(scheme="dark")
    on_light, on_dark = colours(light), colours(dark)
    assert on_light[0] != on_dark[0]
    assert on_light[1] != on_dark[1]
    for opened, other in ((light, on_dark), (dark, on_light)):
        opened.click("#theme")
        assert colours(opened) == other


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_never_scrolls_sideways_but_wide_tables_do(page, width):
    opened = page(width)
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    wide = opened.locator("[id='report_bench:Thirty'] .scroll").first
    assert wide.evaluate("each => each.scrollWidth > each.clientWidth")
    wide.evaluate("each => { each.scrollLeft = 300 }")
    label, container = wide.locator("tbody th").first.bounding_box(), wide.bounding_box()
    assert label["x"] == pytest.approx(container["x"], abs=1)  # the first column stays
