"""The folder of a run: states, the lock, files that are written whole or not at all."""

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from small_runs import StopAfter, cell, outcome, run, start, until

from moonopt.errors import UserError
from moonopt.runs import checkpoint, store
from moonopt.runs.store import MetricsLog, RunFolder, State, read_json, what_differs, write_whole
from moonopt.runs.train import InterruptedRun


def test_a_cell_is_new_unfinished_done_or_of_other_settings(tmp_path):
    chosen = cell(train__epochs=1)
    folder = RunFolder(chosen.folder(tmp_path))
    assert folder.state(chosen) is State.NEW
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=StopAfter(1))
    assert folder.state(chosen) is State.UNFINISHED
    run(chosen, tmp_path, go_on=True)
    assert folder.state(chosen) is State.DONE
    config = json.loads((folder.path / "config.json").read_text())
    config["settings"]["optimizer.lr"] = 7
    (folder.path / "config.json").write_text(json.dumps(config))
    assert folder.state(chosen) is State.OTHER
    assert what_differs(chosen, config) == "optimizer.lr is 7 there and 0.02 here"


def test_an_unfinished_run_is_not_touched_without_being_asked(tmp_path):
    chosen = cell()
    with pytest.raises(InterruptedRun):
        run(chosen, tmp_path, stop=StopAfter(1))
    folder = chosen.folder(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    with pytest.raises(
        UserError, match=r"holds an unfinished run. Go on with `moonopt resume .*/seed0`, or begin anew with --over"
    ):
        run(chosen, tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before


def test_a_run_with_other_settings_is_not_touched_even_when_going_on(tmp_path):
    chosen = cell(train__epochs=1)
    folder = run(chosen, tmp_path)
    text = (folder / "config.json").read_text().replace('"train.batch_size": 8', '"train.batch_size": 9')
    (folder / "config.json").write_text(text)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    with pytest.raises(UserError, match=r"other settings \(train.batch_size is 9 there and 8 here\). Use --overwrite"):
        run(chosen, tmp_path, go_on=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before


def test_a_done_run_is_not_run_again_and_overwrite_runs_it_again(tmp_path):
    chosen = cell(train__epochs=1)
    folder = run(chosen, tmp_path)
    first = (folder / "result.json").stat().st_mtime_ns
    (folder / "stray.txt").write_text("of an older run")
    records = []
    run(chosen, tmp_path, tell=records.append)
    assert records == []
    assert (folder / "result.json").stat().st_mtime_ns == first
    run(chosen, tmp_path, overwrite=True)
    assert (folder / "result.json").stat().st_mtime_ns > first
    assert not (folder / "stray.txt").exists()


def test_the_second_of_two_concurrent_runs_says_that_the_first_is_running(tmp_path):
    chosen = cell(name="tiny_benchmarks:Slow")
    first = start(chosen, tmp_path)
    try:
        until((chosen.folder(tmp_path) / "metrics.jsonl").exists)
        before = (chosen.folder(tmp_path) / "config.json").read_bytes()
        for how in ({}, {"go_on": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=f"is in use: process {first.pid} is running it"):
                run(chosen, tmp_path, **how)
        assert first.is_alive()
        assert (chosen.folder(tmp_path) / "config.json").read_bytes() == before
    finally:
        first.kill()
        first.join()
    with pytest.raises(InterruptedRun):  # the system has let go of the lock
        run(chosen, tmp_path, go_on=True, stop=StopAfter(1))


def test_a_lock_is_free_for_the_next_and_leaves_no_folder_of_a_run_that_never_began(tmp_path):
    folder = RunFolder(tmp_path / "bench" / "method" / "seed0")
    with pytest.raises(ZeroDivisionError), folder.locked():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with folder.locked():
        pass


def test_files_are_written_whole_or_stay_as_they_were(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"Cannot write .*file: No space left on device. What was written before is whole"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("failing", ["checkpoint", "best", "metrics", "result", "events"])
def test_a_full_disk_anywhere_is_one_sentence_and_the_run_can_go_on(failing, tmp_path, monkeypatch):
    chosen = cell()
    expected = outcome(run(chosen, tmp_path / "whole"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        seen = []
        whole, line = store.write_whole, MetricsLog.write

        def write(path, content):
            seen.append(path.name)
            times = {"checkpoint": ("checkpoint.new.pt", 2), "best": ("best.pt", 1), "result": ("result.json", 1)}
            name, time = times.get(failing, ("", 0))
            if path.name == name and seen.count(name) == time:
                patch.setattr(os, "fsync", raise_full)
            whole(path, content)

        def raise_full(*arguments, **more):
            raise full

        def half_a_line(log, record):
            if record["step"] == 14 and failing == "metrics":
                with store.writing(Path(log._file.name)):
                    log._file.write('{"kind": "tr')
                    log._file.flush()
                    raise_full()
            if record["step"] == 14 and failing == "events":
                from torch.utils.tensorboard import SummaryWriter

                patch.setattr(SummaryWriter, "add_scalar", raise_full)
            line(log, record)

        patch.setattr(store, "write_whole", write)
        patch.setattr(checkpoint, "write_whole", write)
        patch.setattr(MetricsLog, "write", half_a_line)
        with pytest.raises(UserError, match=r"Cannot write .*: No space left on device"):
            run(chosen, tmp_path / "full")
    folder = chosen.folder(tmp_path / "full")
    assert not list(folder.glob("*.part"))
    assert not (folder / "error.txt").exists()
    assert outcome(run(chosen, tmp_path / "full", go_on=True)) == expected


LIMITED = cell("ls", train__epochs=2, train__steps_per_epoch=24, train__log_every=1)  # lines first, then a checkpoint


def _limited(root, size, answer):
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails with EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        run(LIMITED, root, go_on=True)
        answer.send("done")
    except UserError as error:
        answer.send(str(error))


@pytest.mark.parametrize(
    ("size", "name"), [(400, "config.json"), (3000, "seed0"), (9000, "seed0"), (20000, "checkpoint.new.pt")]
)
def test_a_file_system_that_takes_no_more_bytes_loses_nothing(size, name, tmp_path):
    expected = outcome(run(LIMITED, tmp_path / "whole"))
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_limited, args=(tmp_path / "full", size, theirs))
    process.start()
    theirs.close()
    text = ours.recv()
    process.join()
    assert process.exitcode == 0
    assert "Cannot write" in text
    assert name in text
    assert outcome(run(LIMITED, tmp_path / "full", go_on=True)) == expected


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"Cannot write .*file/.*: Not a directory"):
        run(cell(), tmp_path / "file")


def test_metrics_are_cut_back_to_their_length(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1})
    length = log.saved()
    log.write({"step": 2})
    log.close()
    log = MetricsLog(path, length)
    log.write({"step": 3})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


@pytest.mark.parametrize(
    ("content", "text"), [("{", "is damaged"), ("[]", "expected an object, found a list"), (None, "Cannot")]
)
def test_a_damaged_file_is_told(content, text, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=text):
        read_json(tmp_path / "config.json")


def test_a_line_that_a_full_disk_did_not_take_is_told_once(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    os.dup2(os.open("/dev/full", os.O_WRONLY), log._file.fileno())
    with pytest.raises(UserError, match="No space left on device"):
        log.write({"step": 1})
    log.close()
