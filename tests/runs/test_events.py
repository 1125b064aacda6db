"""TensorBoard event files: readable after kills and resumes, every step once, none missing."""

import pytest
from small_runs import StopAfter, cell, kill_after, lines, run, start

from moonopt.runs import checkpoint
from moonopt.runs.run import RunFailedError
from moonopt.runs.train import InterruptedRun

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder):
    """Steps and values by tag."""
    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {tag: [(each.step, each.value) for each in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def check(folder):
    found, written = scalars(folder), lines(folder)
    for tag, kind in (("loss/a", "train"), ("weight/b", "train"), ("test/mean", "evaluation"), ("valid/c", "evaluation")):
        section, name = tag.split("/")
        expected = [(line["step"], line[section][name]) for line in written if line["kind"] == kind]
        assert [step for step, _ in found[tag]] == [step for step, _ in expected]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in expected], rel=1e-6)
    assert [step for step, _ in found["lr"]] == [line["step"] for line in written if line["kind"] == "train"]


@pytest.fixture(autouse=True)
def one_file_after_the_other(monkeypatch, tmp_path):
    """TensorBoard reads files in the order of the second in their names: here many are made within one."""
    from tensorboard.summary.writer import event_file_writer

    real = event_file_writer.time.time

    class Later:
        time = staticmethod(lambda: real() + 100 * len(list(tmp_path.rglob("events.*"))))

    monkeypatch.setattr(event_file_writer, "time", Later)


def test_a_run_writes_what_metrics_has(tmp_path):
    check(run(cell(), tmp_path))


def test_a_run_that_is_stopped_has_every_step_once(tmp_path):
    chosen = cell()
    for steps in (3, 3, 9):  # 6 is the end of an epoch
        with pytest.raises(InterruptedRun):
            run(chosen, tmp_path, stop=StopAfter(steps), go_on=True)
    check(run(chosen, tmp_path, go_on=True))


@pytest.mark.parametrize(("every", "epochs"), [(0.0, 3), (1000.0, 1)])
def test_a_run_that_is_killed_has_every_step_once(every, epochs, tmp_path):
    chosen = cell(name="tiny_benchmarks:Slow", train__epochs=epochs, train__steps_per_epoch=20)
    assert kill_after(start(chosen, tmp_path, checkpoint_seconds=every), 0.4)  # with and without a checkpoint
    assert kill_after(start(chosen, tmp_path, checkpoint_seconds=every), 0.3)
    check(run(chosen, tmp_path, go_on=True))


def test_a_run_that_ends_between_an_evaluation_and_its_checkpoint_has_every_step_once(tmp_path, monkeypatch):
    chosen, save = cell(), checkpoint.save

    def broken(folder, content):
        if content["progress"]["epoch"] == 2 and content["progress"]["batch"] == 0:
            raise RuntimeError("the power is gone")
        save(folder, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", broken)
        with pytest.raises(RunFailedError, match="the power is gone"):
            run(chosen, tmp_path, checkpoint_seconds=0.0)
    check(run(chosen, tmp_path, go_on=True))
