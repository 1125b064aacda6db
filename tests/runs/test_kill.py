"""kill -9 at random moments and at every moment of a write, signals, damaged files: the run goes on bit for bit."""

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from small_runs import TINY, StopAfter, cell, kill_after, moonopt, outcome, run, start, until

from moonopt.errors import UserError
from moonopt.runs.store import MetricsLog
from moonopt.runs.train import InterruptedRun

#: Every method that remembers something, with settings under which it soon does.
STATEFUL = [
    ("moon", {"optimizer__beta": 0.1}),
    ("moon", {"optimizer__beta": "auto", "optimizer__loss": "log", "train__schedule": "plateau:0.7:1"}),
    ("muon", {"train__select": "last:2", "train__schedule": "step:1:0.5"}),
    ("dwa", {"balancer__window": 3}),
    ("uw", {"train__schedule": "linear"}),
    ("gradnorm", {}),
    ("nash-mtl", {"method__every": 3}),
    ("famo", {}),
    ("rlw", {}),
    ("pcgrad", {}),
    ("graddrop", {}),
    ("famo+muon", {"train__steps_per_epoch": 9}),
]
NAMES = [f"{method}-{number}" for number, (method, _) in enumerate(STATEFUL)]


def uninterrupted(chosen, root):
    """What comes out of a run that nobody disturbs, and its seconds."""
    began = time.monotonic()
    process = start(chosen, root)
    process.join()
    assert process.exitcode == 0
    return outcome(chosen.folder(root)), time.monotonic() - began


def finish(chosen, root, **how):
    process = start(chosen, root, **how)
    process.join()
    assert process.exitcode == 0
    return outcome(chosen.folder(root))


def kill_at_random(chosen, root, expected, seconds, kills, every):
    """Kill the run so many times, after a random part of the time it takes, and let it come to its end."""
    moments = random.Random()  # whatever they are, the outcome must be the same
    hits = 0
    while hits < kills:
        if kill_after(start(chosen, root, checkpoint_seconds=every), moments.uniform(0, seconds / 2)):
            hits += 1
        else:
            assert outcome(chosen.folder(root)) == expected
            shutil.rmtree(root)
    assert finish(chosen, root, checkpoint_seconds=every) == expected


@pytest.mark.parametrize(("method", "settings"), STATEFUL, ids=NAMES)
def test_a_killed_run_of_every_stateful_method_ends_as_if_it_had_not_been_killed(method, settings, tmp_path):
    chosen = cell(method, **settings)
    expected, seconds = uninterrupted(chosen, tmp_path / "whole")
    kill_at_random(chosen, tmp_path / "killed", expected, seconds, kills=1, every=0.02)


@pytest.mark.parametrize("every", [0.0, 0.05])
def test_a_run_that_is_killed_five_times_ends_as_if_it_had_not_been_killed(every, tmp_path):
    chosen = cell(optimizer__beta=0.1, train__epochs=8)
    expected, seconds = uninterrupted(chosen, tmp_path / "whole")
    kill_at_random(chosen, tmp_path / "killed", expected, seconds, kills=5, every=every)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), STATEFUL, ids=NAMES)
def test_a_run_that_is_killed_twenty_times_ends_as_if_it_had_not_been_killed(method, settings, tmp_path):
    chosen = cell(method, **settings, train__epochs=12)
    expected, seconds = uninterrupted(chosen, tmp_path / "whole")
    kill_at_random(chosen, tmp_path / "killed", expected, seconds, kills=20, every=random.choice([0.0, 0.05]))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("toy", "--set", "train.epochs=10"), (TINY, "--method", "famo")])
def test_the_command_line_killed_at_random_is_resumed_bit_for_bit(words, tmp_path):
    def command(*more):
        return ("run", *words, "--out", "runs", "--checkpoint-seconds", "0.05", *more)

    moments = random.Random()
    assert moonopt(*command("--out", "whole"), cwd=tmp_path).returncode == 0
    (whole,) = (found.parent for found in (tmp_path / "whole").rglob("result.json"))
    folder = tmp_path / "runs" / whole.relative_to(tmp_path / "whole")
    process = moonopt(*command(), cwd=tmp_path, wait=False)
    for _ in range(20):
        until(lambda: (folder / "config.json").exists() or process.poll() is not None)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.communicate()
        if (folder / "result.json").exists():
            assert outcome(folder) == outcome(whole)
            shutil.rmtree(tmp_path / "runs")
        goes_on = folder.exists()
        process = moonopt(*(("resume", folder) if goes_on else command()), cwd=tmp_path, wait=False)
    process.communicate()
    assert moonopt("resume", folder, cwd=tmp_path).returncode == 0
    assert outcome(folder) == outcome(whole)


class DieAt:
    """In the process that is to be killed: dies at the nth write, file operation or record, with half of it done."""

    def __init__(self, number):
        self._left = number

    def __call__(self):
        replace, unlink, fsync, log = Path.replace, Path.unlink, os.fsync, MetricsLog.write

        def half_fsync(descriptor):
            if self._now() and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            self._die()
            fsync(descriptor)

        def half_line(metrics, record):
            if self._now():
                metrics._file.write('{"kind": "train", "st')
                metrics._file.flush()
            self._die()
            log(metrics, record)

        def before(operation):
            def wrapped(*arguments, **more):
                self._now()
                self._die()
                return operation(*arguments, **more)

            return wrapped

        os.fsync, MetricsLog.write, Path.replace, Path.unlink = half_fsync, half_line, before(replace), before(unlink)

    def _now(self):
        self._left -= 1
        return self._left == 0

    def _die(self):
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_at_any_write_goes_on_bit_for_bit(tmp_path):
    chosen = cell("ls", train__epochs=2, train__log_every=3)
    expected, _ = uninterrupted(chosen, tmp_path / "whole")
    for number in itertools.count(1):
        root = tmp_path / str(number)
        process = start(chosen, root, DieAt(number))
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert finish(chosen, root) == expected, f"killed at write {number}"
    assert number > 20  # config, lines, two checkpoints with two generations, best, result
    assert outcome(chosen.folder(root)) == expected


def test_overwriting_that_is_killed_leaves_no_mixture_of_two_runs(tmp_path):
    chosen = cell("ls", train__epochs=1)
    expected, _ = uninterrupted(chosen, tmp_path)
    folder = chosen.folder(tmp_path)
    for number in range(2, 9):
        process = start(chosen, tmp_path, DieAt(number), overwrite=True)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        files = {path.name for path in folder.iterdir()}
        assert "config.json" not in files or "result.json" not in files or {"metrics.jsonl", "checkpoint.pt"} <= files
        assert finish(chosen, tmp_path) == expected


@pytest.mark.parametrize("method", ["moon", "famo", "cagrad", "imtl-g", "mgda+muon", "tiny_benchmarks:sgd"])
def test_a_run_that_is_stopped_again_and_again_ends_the_same(method, tmp_path):
    chosen = cell(method)
    expected = outcome(run(chosen, tmp_path / "whole"))
    done = 0
    for steps in (1, 5, 6, 7):  # after the first step, and around the end of an epoch
        with pytest.raises(InterruptedRun):
            run(chosen, tmp_path / "stopped", stop=StopAfter(steps), go_on=True)
        saved = torch.load(chosen.folder(tmp_path / "stopped") / "checkpoint.pt", weights_only=True)
        done += steps
        assert saved["progress"]["step"] == done
    assert outcome(run(chosen, tmp_path / "stopped", go_on=True)) == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_checkpoints_and_says_how_to_resume(number, code, tmp_path):
    words = ("run", "tiny_benchmarks:Slow", "--set", "train.epochs=4", "--method", "famo", "--out", "runs")
    process = moonopt(*words, cwd=tmp_path, wait=False)
    folder = tmp_path / "runs" / "tiny_benchmarks:Slow" / "famo,train.epochs=4" / "seed0"
    until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 1500)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    relative = folder.relative_to(tmp_path)
    assert errors == f"Stopped, with a checkpoint; go on with: moonopt resume {relative}\n"
    assert not (folder / "result.json").exists()
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    chosen = cell("famo", name="tiny_benchmarks:Slow", train__epochs=4)
    records = []
    run(chosen, tmp_path / "runs", go_on=True, tell=records.append)
    assert f'"step": {records[0]["step"]},' in last  # nothing after the checkpoint, nothing before it is missing
    assert outcome(folder) == outcome(run(chosen, tmp_path / "whole"))


def test_a_truncated_checkpoint_is_told_and_the_previous_one_used(tmp_path):
    chosen = cell()
    expected = outcome(run(chosen, tmp_path / "whole"))
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path / "cut", stop=StopAfter(15))
    path = chosen.folder(tmp_path / "cut") / "checkpoint.pt"
    os.truncate(path, path.stat().st_size * 2 // 3)
    records = []
    folder = run(chosen, tmp_path / "cut", go_on=True, tell=records.append)
    assert records[0]["kind"] == "note"
    assert records[0]["text"].startswith(f"{path} is damaged (")
    assert "using the one before it" in records[0]["text"]
    assert (records[1]["kind"], records[1]["step"]) == ("start", 12)
    assert outcome(folder) == expected


def test_where_no_checkpoint_can_be_used_nothing_is_thrown_away(tmp_path):
    chosen = cell()
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=StopAfter(15))
    folder = chosen.folder(tmp_path)
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).write_bytes(b"nothing")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=r"No checkpoint in .* can be used. Begin anew with --overwrite"):
        run(chosen, tmp_path, go_on=True)
    after = {path: path.read_bytes() for path in folder.iterdir()}
    lock = folder / ".lock"
    assert {**after, lock: b""} == {**before, lock: b""}
    assert "result.json" in {path.name for path in run(chosen, tmp_path, overwrite=True).iterdir()}


def test_metrics_that_end_in_the_middle_of_a_line_are_cut_back(tmp_path):
    chosen = cell()
    expected = outcome(run(chosen, tmp_path / "whole"))
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path / "cut", stop=StopAfter(9))
    with (chosen.folder(tmp_path / "cut") / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 10, "loss": {"a": 0.1}}\n{"kind": "tra')
    assert outcome(run(chosen, tmp_path / "cut", go_on=True)) == expected


def test_metrics_that_lost_lines_of_the_checkpoint_send_the_run_back_to_the_one_before(tmp_path):
    chosen = cell()
    expected = outcome(run(chosen, tmp_path / "whole"))
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path / "cut", stop=StopAfter(16))
    path = chosen.folder(tmp_path / "cut") / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    records = []
    folder = run(chosen, tmp_path / "cut", go_on=True, tell=records.append)
    assert "checkpoint.pt is newer than metrics.jsonl: using the one before it" in records[0]["text"]
    assert outcome(folder) == expected
