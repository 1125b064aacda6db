"""The local engine: processes that end in every way, and a parent that is asked to stop or is killed."""

import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_runs import FORK, cell, outcome, run, until

from moonopt.runs import engines
from moonopt.runs.cell import Machine
from moonopt.runs.engines import Job, Outcome, _Worker, local
from moonopt.runs.interrupt import Stop
from moonopt.runs.store import LOCK


def outcomes(cells, root, at_once=1, stop=None, tell=None, **how):
    jobs = [Job(chosen, root, root, **how) for chosen in cells]
    found = dict(local(jobs, at_once, stop or Stop(), tell or (lambda number, record: None)))
    return [found.get(number) for number in range(len(cells))]


def ending(end, method="ls"):
    return cell(method, name="tiny_benchmarks:Vanishing", model__end=end)


def test_a_process_has_the_result_of_a_run_here_and_sends_its_records(tmp_path):
    chosen, records = cell(train__epochs=2), []
    (found,) = outcomes([chosen], tmp_path / "there", tell=lambda number, record: records.append((number, record["kind"])))
    assert found.status == "done"
    assert outcome(chosen.folder(tmp_path / "there")) == outcome(run(chosen, tmp_path / "here"))
    assert records[0] == (0, "start")
    assert records.count((0, "evaluation")) == 2


def test_what_ends_one_process_does_not_end_the_others(tmp_path):
    cells = [ending("kill"), ending("raise"), ending("nan"), ending(""), cell(name="tiny_benchmarks:Broken")]
    found = outcomes(cells, tmp_path, at_once=2)
    assert [each.status for each in found] == ["killed", "failed", "failed", "done", "failed"]
    assert found[0].text == "killed by the system (SIGKILL), which it does when memory runs out"
    assert found[1].text.startswith("KeyError: 'left'")
    assert "'b'" in found[2].text
    assert "OSError: the reader is broken" in found[4].text
    assert all("\n" not in each.text for each in found)


def test_a_process_that_dies_in_the_middle_of_a_message_is_killed_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("moonopt.runs.engines._work", _half_a_message)
    (found,) = outcomes([cell()], tmp_path)
    assert (found.status, "SIGKILL" in found.text) == ("killed", True)


def _half_a_message(job, threads, connection, gpu):
    os.write(connection.fileno(), b"\x00\x00\x10\x00half")
    os.kill(os.getpid(), signal.SIGKILL)


def _names_its_gpu(job, threads, connection, gpu):
    connection.send(Outcome(job.cell, "done", {"gpu": gpu}))
    time.sleep(1.0 if job.cell.seed == 0 else 0.2)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", ["3", "5", "5"]), ("cuda:1", [None] * 3), ("cpu", [None] * 3)])
def test_processes_share_the_gpus_evenly_where_the_cell_names_none(device, gpus, tmp_path, monkeypatch):
    """The first process goes on while two others come one after the other."""
    monkeypatch.setattr("moonopt.runs.engines._work", _names_its_gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    cells = [replace(cell(), machine=Machine(device), seed=seed) for seed in range(3)]
    assert [found.result["gpu"] for found in outcomes(cells, tmp_path, at_once=2)] == gpus


@pytest.mark.parametrize(("count", "gpu"), [(0, None), (1, None), (3, "0")])
def test_one_gpu_is_left_to_the_cell_and_of_several_a_process_sees_one(count, gpu, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr("moonopt.runs.engines._work", _names_its_gpu)
    (found,) = outcomes([replace(cell(), machine=Machine("cuda"))], tmp_path)
    assert found.result["gpu"] == gpu


def test_a_process_sees_the_gpu_that_it_was_given(tmp_path, monkeypatch):
    sent, handler = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(engines, "run_cell", lambda *args, **how: {"seen": os.environ["CUDA_VISIBLE_DEVICES"]})
    try:
        engines._work(Job(cell(), tmp_path, tmp_path), torch.get_num_threads(), SimpleNamespace(send=sent.append), "1")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [each.result for each in sent] == [{"seen": "1"}]


def test_a_warning_of_a_run_is_a_note(tmp_path):
    notes = []
    outcomes([cell("ls", name="tiny_benchmarks:Warning")], tmp_path, tell=lambda number, record: notes.append(record))
    assert notes[0] == {"kind": "note", "text": "ls seed 0: tiny is not worth training"}


def test_a_stop_lets_processes_write_checkpoints_and_starts_no_more(tmp_path):
    cells, stop = [cell(seed=seed, name="tiny_benchmarks:Slow") for seed in (0, 1, 2)], Stop()

    def tell(number, record):
        if record["kind"] == "train" and record["step"] > 3:
            stop.signal = signal.SIGINT

    found = outcomes(cells, tmp_path, at_once=2, stop=stop, tell=tell)
    assert [each and each.status for each in found] == ["stopped", "stopped", None]
    assert all((chosen.folder(tmp_path) / "checkpoint.pt").exists() for chosen in cells[:2])
    assert not cells[2].folder(tmp_path).exists()


def test_a_process_that_is_told_twice_still_writes_its_checkpoint(tmp_path):
    chosen, stop = cell(name="tiny_benchmarks:Slow"), Stop()
    folder = chosen.folder(tmp_path)

    def both():  # whoever stops all processes of a group, and then the parent
        until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > 500)
        worker = int((folder / LOCK).read_text())
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.004)  # in the same step; two at once would be one
        os.kill(worker, signal.SIGTERM)
        stop.signal = signal.SIGTERM

    thread = threading.Thread(target=both)
    thread.start()
    (found,) = outcomes([chosen], tmp_path, stop=stop)
    thread.join()
    assert (found.status, found.text) == ("stopped", "stopped, with a checkpoint")
    assert (folder / "checkpoint.pt").exists()


def test_a_process_that_was_stopped_before_it_could_listen_is_stopped_and_not_killed(tmp_path):
    for asked, status in ((True, "stopped"), (False, "killed")):
        process = FORK.Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        worker = _Worker(0, Job(cell(), tmp_path, tmp_path), process, asked=asked)
        assert worker.outcome().status == status


def test_two_at_once_are_two_at_once(tmp_path):
    events = []
    cells = [cell(seed=seed, name="tiny_benchmarks:Slow", train__epochs=2) for seed in (0, 1)]
    began = time.monotonic()
    outcomes(cells, tmp_path, at_once=2, tell=lambda number, record: events.append((record["kind"], number, time.monotonic())))
    starts = [moment for kind, _, moment in events if kind == "start"]
    ends = [moment for kind, _, moment in events if kind == "evaluation"]
    assert len(starts) == 2
    assert max(starts) < max(ends)
    assert time.monotonic() - began < 30
