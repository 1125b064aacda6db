"""What is shown of runs, in a terminal and in a file."""

import io
import re

import pytest
from rich.console import Console
from small_runs import TINY, cell

from moonopt.runs.engines import Outcome
from moonopt.runs.screen import LiveScreen, PlainScreen, Progress, _duration, _most_telling, screen_for


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


def test_delta_m_is_against_the_stl_cells_of_the_seed_that_are_done():
    tasks = [cell("stl", balancer__task=task) for task in "abc"]
    cells = [*tasks, cell(), cell(seed=1)]
    screen, _ = plain(cells)
    for number in (3, 4):
        screen.rows[number].metrics = dict.fromkeys(("a", "b", "c", "mean"), 0.5)
    for number in range(3):
        assert "Δm" not in screen.shown_metrics(screen.rows[3])
        screen.end(number, Outcome(cells[number], "done", RESULT))
    assert screen.shown_metrics(screen.rows[3]) == "mean 0.5  Δm +100.00 %"
    assert screen.shown_metrics(screen.rows[4]) == "mean 0.5"  # of another seed
    assert "Δm" not in screen.shown_metrics(screen.rows[0])


def test_a_reference_of_zero_gives_no_delta_m_and_no_error():
    cells = [*(cell("stl", balancer__task=task) for task in "abc"), cell()]
    screen, _ = plain(cells)
    for number in range(3):
        screen.end(number, Outcome(cells[number], "done", {**RESULT, "metrics": {**METRICS, "a": 0.0}}))
    screen.end(3, Outcome(cells[3], "done", RESULT))
    assert screen.shown_metrics(screen.rows[3]) == "mean 0.25"


def live(cells, height=24):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=160, height=height, color_system=None)
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
    assert re.search(r"moon,optimizer.lr=0.5 +0 .* 1.0/4 +a 1  b \?  c 3 +mean 0.5 +0:00", row)
    assert re.search(r"ls +1 .*failed", text)
    assert "waiting" in text
    assert "0 of 3 cells done" in text
    assert "KeyError: [red]left[/]" in stream.getvalue()  # no markup


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
