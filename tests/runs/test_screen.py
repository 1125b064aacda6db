"""What is shown of runs, in a terminal and in a file."""

import io
import re
from statistics import fmean

import pytest
from rich.console import Console
from small_runs import TINY, cell

from moonopt.bench.nyuv2 import NYUv2
from moonopt.runs.cell import make_cell
from moonopt.runs.engines import Outcome
from moonopt.runs.report.study import read_runs, studies
from moonopt.runs.report.tables import results_table
from moonopt.runs.screen import LiveScreen, PlainScreen, Progress, _duration, _most_telling, screen_for
from moonopt.runs.store import write_json


def train(step, **losses):
    return {"kind": "train", "step": step, "epoch": step / 6, "loss": losses or {"a": 1.0, "b": None, "c": 3.0}}


def evaluation(step, value=0.5):
    return {"kind": "evaluation", "step": step, "epoch": step // 6, "test": dict.fromkeys(("a", "b", "c", "mean"), value)}


START = {"kind": "start", "step": 0, "steps": 24, "epochs": 4}
METRICS = dict.fromkeys(("a", "b", "c", "mean"), 0.25)
RESULT = {"metrics": METRICS, "steps": 24, "epochs": 4}


def plain(cells):
    stream = io.StringIO()
    screen = PlainScreen(stream)
    screen.begin(cells)
    return screen, stream


def test_plain_lines_tell_begin_a_few_evaluations_and_end():
    chosen = cell()
    screen, stream = plain([chosen])
    screen.record(0, START)
    for step in range(1, 25):
        screen.record(0, train(step))
        screen.record(0, evaluation(step))
    screen.record(0, {"kind": "note", "text": "look here"})
    screen.end(0, Outcome(chosen, "done", RESULT))
    found = stream.getvalue().splitlines()
    assert found[0] == "moon seed 0: 24 steps"
    assert len(found) == 7
    assert re.fullmatch(r"moon seed 0: epoch 1 of 4  mean 0.5  \d+:\d\d left", found[1])
    assert found[-2:] == ["look here", "moon seed 0: done  mean 0.25"]


def test_plain_lines_tell_what_goes_on_was_done_and_failed():
    cells = [cell(seed=seed) for seed in range(3)]
    screen, stream = plain(cells)
    screen.record(0, {**START, "step": 7})
    screen.end(0, Outcome(cells[0], "killed", text="killed by the system"))
    screen.end(1, Outcome(cells[1], "done", RESULT))
    assert stream.getvalue().splitlines() == [
        "moon seed 0: goes on at step 7 of 24",
        "moon seed 0: killed by the system",
        "moon seed 1: was done already  mean 0.25",
    ]


def singles(seed=0, method="stl", **settings):
    return [cell(method, seed, balancer__task=task, **settings) for task in "abc"]


def scaled(factor):
    return {**RESULT, "metrics": {name: factor * value for name, value in METRICS.items()}}


@pytest.mark.parametrize("method", ["stl", "stl+muon"])
def test_delta_m_is_against_the_single_task_cells_of_the_seed_that_are_done(method):
    cells = [*singles(0, method), *singles(1, method), cell(), cell(seed=1)]
    screen, _ = plain(cells)
    for number in (6, 7):
        screen.rows[number].metrics = dict.fromkeys(("a", "b", "c", "mean"), 0.5)
    for number in range(3):
        assert "Δm" not in screen.shown_metrics(screen.rows[6])
        screen.end(number, Outcome(cells[number], "done", RESULT))
    assert screen.shown_metrics(screen.rows[6]) == "mean 0.5  Δm +100.00 %"
    assert screen.shown_metrics(screen.rows[7]) == "mean 0.5"  # the reference of its seed is still to come
    assert "Δm" not in screen.shown_metrics(screen.rows[0])
    for number in range(3, 6):
        screen.end(number, Outcome(cells[number], "failed", text="killed"))
    assert screen.shown_metrics(screen.rows[7]) == "mean 0.5  Δm +100.00 %"  # the mean over the seeds that there are


def test_plain_stl_is_the_reference_before_stl_with_another_optimizer():
    cells = [*singles(method="stl+muon"), *singles(), cell()]
    screen, _ = plain(cells)
    for number in range(6):
        screen.end(number, Outcome(cells[number], "done", RESULT if number >= 3 else scaled(0.1)))
    screen.end(6, Outcome(cells[6], "done", scaled(2)))
    assert screen.shown_metrics(screen.rows[6]) == "mean 0.5  Δm +100.00 %"


def test_the_screen_and_the_report_have_one_delta_m(tmp_path):
    cells = [*singles(0), *singles(1), *singles(3), cell(), cell(seed=1), cell(seed=2)]
    screen, _ = plain(cells)
    for number, each in enumerate(cells):
        result = scaled(1 + 0.1 * number) | {"format": 1, "tasks": ["a", "b", "c"]}
        screen.end(number, Outcome(each, "done", result))
        each.folder(tmp_path).mkdir(parents=True)
        write_json(each.folder(tmp_path) / "config.json", each.config)
        write_json(each.folder(tmp_path) / "result.json", result)
    (study,) = studies(read_runs([tmp_path]), ["moon"])
    table = results_table(study, "stl")
    assert table.rows[0].entries[-2].value == pytest.approx(fmean(screen._delta(row) for row in screen.rows[9:]))
    assert "against stl with the same seed, and with seed 2, which stl lacks, against its mean." in table.notes[-1]


def test_a_value_that_is_not_a_number_is_a_question_mark():
    cells = [*singles(), cell()]
    screen, _ = plain(cells)
    for number in range(3):
        screen.end(number, Outcome(cells[number], "done", {**RESULT, "metrics": {**METRICS, "b": None, "mean": None}}))
    screen.end(3, Outcome(cells[3], "done", {**RESULT, "metrics": dict.fromkeys(METRICS)}))
    assert [screen.shown_metrics(row) for row in screen.rows] == ["a 0.25", "b ?", "c 0.25", "mean ?"]


def test_the_bar_of_a_cell_that_was_done_is_full():
    cells = [cell(), cell("ls")]
    screen, console, _ = live(cells)
    with screen:
        screen.begin(cells)
        screen.end(0, Outcome(cells[0], "done", RESULT))
        with console.capture() as captured:
            console.print(screen._table())
    done = next(line for line in captured.get().splitlines() if line.startswith("moon"))
    waiting = next(line for line in captured.get().splitlines() if line.startswith("ls"))
    assert done.count("━") == 12
    assert waiting.count("━") == 0
    assert (screen.rows[0].step, screen.rows[0].steps) == (24, 24)


def test_a_reference_of_zero_gives_no_delta_m_and_no_error():
    cells = [*(cell("stl", balancer__task=task) for task in "abc"), cell()]
    screen, _ = plain(cells)
    for number in range(3):
        screen.end(number, Outcome(cells[number], "done", {**RESULT, "metrics": {**METRICS, "a": 0.0}}))
    screen.end(3, Outcome(cells[3], "done", RESULT))
    assert screen.shown_metrics(screen.rows[3]) == "mean 0.25"


def live(cells, height=24, width=160):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=height, color_system=None)
    screen = LiveScreen(console)
    return screen, console, stream


def test_the_live_table_has_method_seed_epoch_losses_metrics_and_time_left():
    cells = [cell(optimizer__lr=0.5), cell("ls", seed=1), cell("uw")]
    screen, console, stream = live(cells)
    with screen:
        screen.begin(cells)
        screen.record(0, START)
        screen.record(0, train(6))
        screen.record(0, evaluation(6))
        screen.end(1, Outcome(cells[1], "failed", text="KeyError: [red]left[/]"))
        with console.capture() as captured:
            console.print(screen._table())
    text = captured.get()
    row = next(line for line in text.splitlines() if "moon,optimizer.lr=0.5" in line)
    assert re.search(r"method +seed +epoch +losses +mean +time left", text)
    assert re.search(r"moon,optimizer.lr=0.5 +0 .* 1.0/4 +a 1  b \?  c 3 +0.5 +0:00", row)
    assert re.search(r"ls +1 .*failed", text)
    assert "waiting" in text
    assert "0 of 3 runs done" in text
    assert "KeyError: [red]left[/]" in stream.getvalue()  # no markup


def test_what_all_cells_share_is_said_once_and_a_narrow_terminal_leaves_losses_out():
    cells = [cell(method, seed=seed, train__epochs=3) for method in ("moon", "nash-mtl+muon") for seed in (0, 1)]
    screen, console, _ = live(cells, width=80)
    with screen:
        screen.begin(cells)
        for number in range(4):
            screen.record(number, START)
            screen.record(number, train(6))
            screen.record(number, evaluation(6))
        with console.capture() as captured:
            console.print(screen._table())
    text = captured.get()
    assert "losses" not in text
    assert re.search(r"nash-mtl\+muon +1 .* 1.0/4 +0.5 +0:00", text)
    assert "0 of 4 runs done; all with train.epochs=3" in text


def test_a_small_terminal_shows_running_cells_first():
    statuses = ("done", "waiting", "running", "failed", "done", "running")
    rows = [Progress(cell(seed=seed), status) for seed, status in enumerate(statuses)]
    assert [row.cell.seed for row in _most_telling(rows, 3)] == [2, 3, 5]
    assert _most_telling(rows, 10) == rows


def test_many_losses_are_shown_as_their_mean():
    row = Progress(cell())
    row.take(train(1, **{f"t{i}": float(i) for i in range(5)}, none=None))
    assert row.shown_losses() == "mean of 5: 2"


def test_a_file_gets_plain_lines_and_a_terminal_a_table(monkeypatch):
    with screen_for(io.StringIO()) as screen:
        assert isinstance(screen, PlainScreen)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with screen_for(Terminal()) as screen:
        assert isinstance(screen, LiveScreen)
        screen.begin([cell(name=TINY)])


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert _duration(seconds) == text


@pytest.mark.parametrize("made_up", [False, True])
def test_what_is_published_is_no_reference_for_made_up_data(made_up, tmp_path):
    chosen = make_cell("nyuv2", "ls", 0, [])
    metrics = NYUv2.published.rows["ls"] | {NYUv2.headline: 1.0}
    screen, _ = plain([chosen])
    screen.record(0, START | {"made_up": made_up})
    screen.rows[0].metrics = metrics
    assert ("Δm" in screen.shown_metrics(screen.rows[0])) != made_up
    result = RESULT | {"metrics": metrics, "format": 1, "tasks": list(NYUv2.tasks)} | {"made_up_data": made_up}
    screen.end(0, Outcome(chosen, "done", result))
    assert ("Δm" in screen.shown_metrics(screen.rows[0])) != made_up
    chosen.folder(tmp_path).mkdir(parents=True)
    write_json(chosen.folder(tmp_path) / "config.json", chosen.config)
    write_json(chosen.folder(tmp_path) / "result.json", result)
    (study,) = studies(read_runs([tmp_path]), ["ls"])
    headings = [column.heading for column in results_table(study).columns]
    assert ("Δm (%) ↓" in headings) != made_up
    told = " ".join(results_table(study, "published").notes)
    assert ("No Δm: made-up data cannot be set beside what is published." in told) == made_up
