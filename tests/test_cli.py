"""The command line: what it prints, what it refuses with one sentence and exit code 2, and what it survives."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent / "runs"))
from small_runs import StopAfter, cell, moonopt, outcome, run, until

from moonopt import cli
from moonopt.bench.registry import code_of
from moonopt.runs.run import RunFailedError
from moonopt.runs.store import LOCK
from moonopt.runs.train import InterruptedRun

TINY, SLOW, VANISHING = (f"tiny_benchmarks:{name}" for name in ("Tiny", "Slow", "Vanishing"))
SHORT = ("--set", "train.epochs=1", "--set", "train.conflict=false")


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Calls the command line in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOONOPT_DATA", raising=False)

    def called(*words):
        monkeypatch.setattr(sys, "argv", ["moonopt", *map(str, words)])
        code = None
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return 0 if code is None else code, captured.out, captured.err

    return called


def everything(folder):
    """Every file but the locks, with its content and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def refused(call, *words, changes=False):
    """What is said to words that are refused with exit code 2, in one line, with nothing written."""
    before = everything(Path())
    code, output, errors = call(*words)
    assert code == 2, errors
    assert output == ""
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1
    if not changes:
        assert everything(Path()) == before
    return errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("run", "toi"),
            "Unknown benchmark 'toi': expected one of toy, .* Did you mean 'toy'? Your own is given as module:Class.",
        ),
        (("show", "toi"), "Did you mean 'toy'?"),
        (("compare", "toi"), "Did you mean 'toy'?"),
        (("tune", "toi", "--grid", "optimizer.lr=0.1"), "Did you mean 'toy'?"),
        (("inspect", "toi"), "Did you mean 'toy'?"),
        (("data", "verify", "toi"), "Did you mean 'toy'?"),
        (("run", "nowhere:Toy"), "No module 'nowhere' for benchmark nowhere:Toy, on the Python path or in this folder."),
        (("run", "tiny_benchmarks:Tine"), "Unknown name in module tiny_benchmarks 'Tine'.* Did you mean 'Tiny'?"),
        (("run", "tiny_benchmarks:sgd"), "must be a subclass of moonopt.bench.Benchmark"),
        (("run", "tiny_benchmarks:Nameless"), "lacks name, metrics, headline, evaluate, load, losses, model, tasks."),
        (("run", "tiny_benchmarks:Headless"), "Unknown metric as headline 'meen': .* Did you mean 'mean'?"),
        (("run", ":Toy"), "cannot be imported"),
        (("run", "..:Toy"), "cannot be imported"),
        (("run", "toy", "--method", "mooon"), "Unknown method 'mooon'. Did you mean 'moon'? Your own is given as module:name."),
        (
            ("run", "multidigits", "--method", "stl"),
            "stl trains one task: say which of left, right by --set balancer.task=left, or have all of them with",
        ),
        (
            ("run", "multidigits", "--method", "stl", "--set", "balancer.task=lefd"),
            "Unknown task 'lefd': expected one of left, right. Did you mean 'left'?",
        ),
        (("compare", "toy", "--methods", "ls,nash"), "Unknown method 'nash'. Did you mean 'nash-mtl'?"),
        (("compare", "toy", "--methods", ","), "Give at least one method, separated by commas; found ','."),
        (("compare", "toy", "--methods", "ls,ls"), "Every method can be in a comparison once"),
        (
            ("run", "toy", "--set", "optimiser.lr=1"),
            "Unknown setting of moon on toy 'optimiser.lr'. Did you mean 'optimizer.lr'?",
        ),
        (("run", "toy", "--set", "optimizer.lr"), "A setting is written key=value"),
        (("run", "toy", "--set", "optimizer.lr=fast"), "optimizer.lr must be a number.*, found 'fast' in --set."),
        (("run", "toy", "--set", "optimizer.lr=-1"), "moon: .*-1"),
        (("run", "toy", "--set", "data.size=-1"), "toy cannot be made with these settings: RuntimeError: .*negative dimension"),
        (("run", "toy", "--set", "train.epochs=0"), "train.epochs must be at least 1, found 0."),
        (("run", "toy", "--set", "train.schedule=cosin"), "Did you mean 'cosine'?"),
        (("run", "toy", "--set", "train.select=best"), "train.select=best needs validation data, and this benchmark has none"),
        (("compare", "toy", "--set", "train.select=beast"), "train.select must be last, best or last:10"),
        (("run", "toy", "--config", "absent.json"), "Cannot read absent.json: No such file or directory."),
        (("run", "toy", "--tuned", "absent.json"), "Cannot read absent.json: No such file or directory."),
        (("run", "toy", "--device", "cuda:77"), "Device 'cuda:77' is not there: "),
        (("run", "toy", "--device", "quantum"), "Device 'quantum' is not there: "),
        (("run", "toy", "--data", "absent"), "There is no folder absent, which --data names for data."),
        (("compare", "toy", "--data", "absent"), "There is no folder absent, which --data names for data."),
        (("run", "tiny_benchmarks:Absent"), "The data of absent are not in .*: put absent.csv there."),
        (("compare", "tiny_benchmarks:Absent"), "put absent.csv there."),
        (("data", "fetch", "toy"), "There is nothing to fetch for toy: its data are made on the fly."),
        (("data", "make", "toy"), "There is nothing to make up for toy"),
        (("data", "make", "nyuv2", "--size", "288"), "--size is written HEIGHTxWIDTH, as 288x384, found '288'."),
        (("data", "make", "mnist", "--size", "28x28"), "--size is for scenes: the images of mnist have one size."),
        (("data", "verify", "mnits"), "Unknown benchmark or data set 'mnits': .*, mnist, .*Did you mean 'mnist'?"),
        (("data", "verify", "mnist", "--data", "absent"), "There is no folder absent, which --data names for data."),
        (
            ("data", "fetch", "mnist", "--data", __file__),
            f"There is no folder {re.escape(__file__)}, which --data names for data.",
        ),
        (
            ("run", "multimnist", "--data", "."),
            "Not in mnist: train-images-idx3-ubyte, .* `moonopt data fetch mnist`",
        ),
        (("resume", "absent"), "There is no folder absent."),
        (("resume", "."), "is not the folder of a run: it has no config.json."),
        (("report", "absent"), "There is no absent: expected a folder of runs"),
        (("run", "toy", "--seed", "-1"), "A seed must be a whole number of at least 0, found -1."),
        (("compare", "toy", "--seeds", "0"), "--seeds takes how many (3) or which (0,5,7), found '0'."),
        (("compare", "toy", "--seeds", "two"), "--seeds takes how many (3) or which (0,5,7), found 'two'."),
        (("compare", "toy", "--seeds", "1,-2"), "--seeds takes how many (3) or which (0,5,7), found '1,-2'."),
        (("compare", "toy", "--seeds", "1,1"), "Every seed can be in a comparison once, found 1, 1."),
        (("compare", "toy", "--engine", "locl"), "Unknown engine 'locl': expected one of local. Did you mean 'local'?"),
        (("speed", "polr"), "Unknown measurement 'polr': expected one of polar, .* Did you mean 'polar'?"),
        (("tune", "toy", "--methods", "ls", "--grid", "optimizer.l=1"), "Did you mean 'optimizer.lr'?"),
        (("tune", "toy", "--methods", "ls,uw", "--grid", "ls/optimizer.lr=1"), "the same number of trials"),
        (("tune", "tiny_benchmarks:TestOnly", "--methods", "ls", "--grid", "optimizer.lr=1"), "does not tune on test data"),
        (("inspect", "tiny_benchmarks:NUMBER"), "tiny_benchmarks:NUMBER must be a benchmark or make a model, found 3."),
        (
            ("inspect", "tiny_benchmarks:Refusing"),
            "tiny_benchmarks:Refusing cannot be made: UserError: model.width must be even",
        ),
        (("inspect", "os:getcwd"), "os:getcwd must be a benchmark or make a model, found '.*'."),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_one_clear_sentence_and_exit_code_2(words, text, call):
    assert re.search(re.sub(r"([()?])", r"\\\1", text), refused(call, *words))


@pytest.mark.parametrize(
    "words", [("run",), ("run", "toy", "--seed", "x"), ("run", "toy", "--jobs"), ("fly",), ("compare", "toy", "--jobs", "0")]
)
def test_what_is_no_command_is_exit_code_2(words, call):
    code, output, errors = call(*words)
    assert (code, output) == (2, "")
    assert "Usage" in errors


def test_a_run_prints_its_table_and_where_its_result_is(call):
    code, output, errors = call("run", TINY, "--method", "famo", *SHORT)
    assert (code, errors) == (0, "")
    folder = Path("runs") / TINY / "famo,train.conflict=false,train.epochs=1" / "seed0"
    assert f"Result: {folder}/result.json" in output
    assert re.search(r"method +a ↓ +b ↓ +c ↓ +mean ↓", output)
    before = everything(Path())
    code, output, _ = call("run", TINY, "--method", "famo", *SHORT)
    assert code == 0
    assert "Was done already" in output
    assert everything(Path()) == before
    code, output, _ = call("run", TINY, "--method", "famo", *SHORT, "--overwrite")
    assert "Result: " in output
    assert everything(Path()) != before


def test_the_command_of_a_result_repeats_it(call):
    call("run", TINY, *SHORT, "--set", "optimizer.lr=0.5", "--seed", "3")
    (folder,) = (path.parent for path in Path("runs").rglob("result.json"))
    words = json.loads((folder / "result.json").read_text())["command"].split()
    assert words[0] == f"OMP_NUM_THREADS={torch.get_num_threads()}"
    call(*words[2:], "--out", "again")
    assert outcome(folder) == outcome("again" / folder.relative_to("runs"))


def test_an_unfinished_run_needs_resume_or_overwrite(call):
    with pytest.raises(InterruptedRun):
        run(cell("ls"), Path("runs"), stop=StopAfter(9))
    folder = cell("ls").folder(Path("runs"))
    text = refused(call, "run", TINY, "--method", "ls")
    assert f"{folder} holds an unfinished run. Go on with `moonopt resume {folder}`, or begin anew with --overwrite." in text
    code, output, _ = call("resume", folder)
    assert code == 0
    assert "ls seed 0: goes on at step 9 of 24" in output
    run(cell("ls"), Path("whole"))
    assert outcome(folder) == outcome(cell("ls").folder(Path("whole")))
    assert "Was done already" in call("resume", folder)[1]


@pytest.mark.parametrize("where", ["..", "other"])
def test_resume_takes_any_way_to_the_folder(where, call, monkeypatch):
    with pytest.raises(InterruptedRun):
        run(cell("ls"), Path("runs"), stop=StopAfter(9))
    folder = cell("ls").folder(Path("runs"))
    Path(folder, "other").mkdir()
    monkeypatch.chdir(folder if where == ".." else folder / "other")
    assert call("resume", "../seed0" if where == ".." else "..")[0] == 0
    assert Path("result.json" if where == ".." else "../result.json").exists()


def test_a_run_folder_that_was_moved_is_refused(call, tmp_path):
    folder = run(cell("ls", train__epochs=1), Path("runs"))
    folder.rename("moved")
    text = refused(call, "resume", "moved")
    assert "is not where its run belongs: expected it to end in tiny_benchmarks:Tiny/ls,train.epochs=1/seed0" in text
    text = refused(call, "resume", tmp_path / "moved")
    assert "is not where its run belongs" in text


def test_a_run_folder_right_under_the_root_is_refused(call, monkeypatch):
    folder = run(cell("ls", train__epochs=1), Path("runs"))
    config = (folder / "config.json").read_text()
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self, *rest: config)
    monkeypatch.setattr(cli, "_run_one", None)
    with pytest.raises(cli.UserError, match="is not where its run belongs"):
        cli.resume(Path("/seed0"))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "config.json is damaged"),
        ('{"format": 0}', "is of format 0, expected 1: another version of moonopt made it"),
        ('{"format": 1}', "is damaged: it lacks benchmark"),
    ],
)
def test_a_damaged_config_is_told(content, text, call):
    folder = run(cell("ls", train__epochs=1), Path("runs"))
    (folder / "config.json").write_text(content)
    assert text in refused(call, "resume", folder)


def test_a_run_of_other_settings_is_not_overwritten(call):
    folder = run(cell("ls", train__epochs=1), Path("runs"))
    text = (folder / "config.json").read_text().replace('"train.batch_size": 8', '"train.batch_size": 9')
    (folder / "config.json").write_text(text)
    for command in (("run", TINY, "--method", "ls"), ("compare", TINY, "--methods", "ls,uw", "--seeds", "1")):
        text = refused(call, *command, "--set", "train.epochs=1")
        assert "holds a run with other settings (train.batch_size is 9 there and 8 here). Use --overwrite" in text
    text = refused(call, "run", TINY, "--method", "ls", "--set", "train.epochs=1", "--device", "gpu")
    assert "Device 'gpu' is not there: expected cpu, cuda, or cuda:1 for the second GPU." in text


@pytest.mark.parametrize("command", [("run", TINY), ("run", TINY, "--overwrite")])
def test_an_output_folder_that_cannot_be_written_is_told(command, call):
    Path("file").write_text("no folder")
    assert "Cannot write file/" in refused(call, *command, *SHORT, "--out", "file")


def test_a_comparison_into_a_folder_that_cannot_be_written_is_told(call):
    Path("file").write_text("no folder")
    code, _, errors = call("compare", TINY, "--methods", "ls", "--seeds", "1", *SHORT, "--out", "file")
    assert code == 1
    assert "failed: Cannot write file/" in errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_a_folder_without_permission_is_told(mode, call):
    Path("mine").mkdir(mode=mode)
    assert "Permission denied" in refused(call, "run", TINY, *SHORT, "--out", "mine")


@pytest.mark.parametrize("command", [("run",), ("compare", "--seeds", "1", "--methods", "ls")])
def test_data_that_the_system_does_not_give_are_told_without_a_place_in_code(command, call):
    code, _, errors = call(*command, "tiny_benchmarks:Unreadable", "--data", ".")
    assert code == (2 if command == ("run",) else 1)
    assert re.search(r": tiny_benchmarks:Unreadable cannot read or write \S+: Is a directory\.", errors)
    assert "settings" not in errors
    assert ", line" not in errors


def test_what_the_system_refuses_elsewhere_is_told(call, monkeypatch):
    def forbidden(cells, plan, stop, screen):
        raise PermissionError(13, "Permission denied", "runs")

    monkeypatch.setattr(cli, "compare_cells", forbidden)
    assert "Permission denied: 'runs'" in refused(call, "compare", TINY)


def test_a_run_that_breaks_is_exit_code_1_and_one_sentence(call):
    code, _, errors = call("run", VANISHING, "--method", "uw")
    assert code == 1
    assert re.fullmatch(
        r"Failed: KeyError: 'left' \(.*tiny_benchmarks.py, line \d+\). The traceback is in .*error.txt.\n", errors
    )


@pytest.mark.parametrize(("method", "key"), [("dwa", "method.nonfinite"), ("moon", "optimizer.nonfinite")])
def test_a_run_that_breaks_on_a_nan_tells_the_setting(method, key, call):
    code, _, errors = call("run", VANISHING, "--method", method, "--set", "model.end=nan")
    assert code == 1
    assert "the loss of task 'b' is NaN" in errors
    assert f" Here that is --set {key}=skip. The traceback is in" in errors


def test_show_turns_no_setting_into_a_picture(call):
    code, output, _ = call("show", "nyuv2")
    assert code == 0
    assert " step:100:0.5 " in output


def test_settings_have_their_sources_shown(call):
    Path("settings.json").write_text('{"train.epochs": 7}')
    code, output, _ = call("show", TINY, "--method", "famo", "--config", "settings.json", "--set", "balancer.gamma=0.5")
    assert code == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in output.splitlines() if line.strip()}
    assert rows["train.epochs"] == "7 --config settings.json"
    assert rows["balancer.gamma"] == "0.5 --set"
    assert rows["optimizer.lr"] == "0.02 tiny's choice for *"
    assert rows["train.batch_size"] == "8 tiny"
    assert rows["train.schedule"] == "cosine training loop"
    assert rows["optimizer.betas"] == "[0.9,0.999] famo's default"


def test_benchmarks_and_methods_come_from_the_current_folder(call):
    Path("mine.py").write_text("from tiny_benchmarks import Tiny as Own, sgd as descent\n")
    code, output, errors = call("compare", "mine:Own", "--methods", "mine:descent,ls", "--seeds", "1", *SHORT)
    assert (code, errors) == (0, "")
    assert re.search(r"mine:descent,.* +\d\.\d+", output)
    Path("broken.py").write_text("import nothing_of_the_kind\n")
    assert "needs the package 'nothing_of_the_kind', which is not installed" in refused(call, "run", "broken:Own", changes=True)
    Path("wrong.py").write_text("1 +\n")
    assert "cannot be imported: SyntaxError: " in refused(call, "run", "wrong:Own", changes=True)
    sys.path.remove(str(Path.cwd()))


def test_a_comparison_skips_what_is_done_and_prints_its_table(call):
    words = ("compare", TINY, "--methods", "ls,stl", "--seeds", "2", *SHORT)
    code, output, errors = call(*words)
    assert (code, errors) == (0, "")
    assert output.count(": 6 steps") == 8  # stl is one cell per task
    assert re.search(r"Δm \(%\) ↓", output)
    before = everything(Path())
    code, output, _ = call(*words)
    assert code == 0
    assert output.count("was done already") == 8
    assert everything(Path()) == before
    code, output, _ = call("compare", TINY, "--methods", "ls", "--seeds", "1", *SHORT, "--overwrite")
    assert output.count(": 6 steps") == 1


def test_a_comparison_goes_on_after_failures_and_tells_them_at_the_end(call):
    code, output, errors = call("compare", VANISHING, "--methods", "famo,uw,dwa,ls", "--seeds", "1", "--report", "page")
    assert code == 1
    assert re.search(r" ls +\d\.\d+", output)
    told = errors.splitlines()
    assert told[0].startswith("famo seed 0 failed: killed by the system (SIGKILL), which it does when memory runs out (runs/")
    assert told[1].startswith("uw seed 0 failed: KeyError: 'left'")
    assert told[2].startswith("dwa seed 0 failed: ")
    assert "'b'" in told[2]
    assert len(told) == 3
    assert list(Path("page").glob("*.html"))


def test_the_same_failure_of_several_seeds_is_one_line_without_a_place_in_our_code(call):
    code, output, errors = call("compare", TINY, "--methods", "moon", "--seeds", "2", *SHORT, "--set", "optimizer.lr=3e38")
    assert code == 1
    assert re.fullmatch(
        r"moon,\S+ seeds 0, 1 failed: FloatingPointError: At step \d+, .*NaN or infinite\. .*"
        r"Here that is --set optimizer\.nonfinite=skip\. \(runs/\S+\)\n",
        errors,
    )
    assert ", line" not in errors
    assert re.search(r"Not in the table: moon\S*, .*seeds 0, 1: failed \(FloatingPointError: [^.]*NaN or infinite\)\.", output)


def test_a_comparison_in_which_everything_fails_is_exit_code_1(call):
    for name, methods in (("tiny_benchmarks:Broken", "ls"), (VANISHING, "uw")):
        code, _, errors = call("compare", name, "--methods", methods, "--seeds", "1", "--report", "page")
        assert code == 1
        assert "seed 0 failed: " in errors


def test_what_was_tuned_is_used_by_compare(call):
    name = "tiny_benchmarks:Disagreeing"
    words = ("--methods", "ls,famo", "--grid", "model.width=4,6", "--grid", "famo/model.width=3,5")
    code, output, errors = call("tune", name, *words)
    assert (code, errors) == (0, "")
    path = Path("runs") / "tune" / name / "tuned.json"
    tuned = json.loads(path.read_text())
    assert tuned["chosen"] == {"ls": {"model.width": 6}, "famo": {"model.width": 5}}
    assert len(tuned["trials"]) == 4
    assert tuned["command"].startswith(f"moonopt tune {name} --methods ls,famo")
    assert f"moonopt compare {name} --methods ls,famo --tuned {path}" in output
    code, output, _ = call("compare", name, "--methods", "ls,famo", "--seeds", "1", "--tuned", path, "--out", "runs/tune")
    assert code == 0
    assert output.count("was done already") == 2  # its cells are those of the trials
    code, output, _ = call("show", name, "--method", "famo", "--tuned", path)
    assert re.search(rf"model.width +5 +--tuned {path}", output)
    assert "has nothing for moon: it has ls, famo" in refused(call, "compare", name, "--methods", "moon", "--tuned", path)


def test_trials_are_judged_by_a_metric(call):
    code, output, errors = call(
        "tune", "tiny_benchmarks:Disagreeing", "--methods", "ls", "--grid", "model.width=4,6", "--metric", "c"
    )
    assert (code, errors) == (0, "")
    assert re.search(r"c on validation data", output)
    assert re.search(r"ls +4 +4 \*", output)


@pytest.mark.parametrize(
    ("grids", "told"),
    [
        (["model.width=4,6"], ["ls,famo --tuned {} --config own.json --set optimizer.lr=0.5 --set train.select=last"]),
        (["optimizer.lr=0.1,0.2"], ["ls,famo --tuned {} --config own.json --set train.select=last"]),
        (
            ["train.log_every=1,2"],
            ["ls,famo --tuned {} --set train.epochs=1 --set optimizer.lr=0.5 --set train.select=last"],
        ),
        (
            ["ls/optimizer.lr=0.1,0.2", "famo/model.width=4,6"],
            [
                "ls --tuned {} --config own.json --set train.select=last",
                "famo --tuned {} --config own.json --set optimizer.lr=0.5 --set train.select=last",
            ],
        ),
    ],
)
def test_the_use_of_what_was_tuned_repeats_what_was_set_beside_the_grid(grids, told, call):
    name, path = "tiny_benchmarks:Disagreeing", "its file.json"
    Path("own.json").write_text('{"train.epochs": 1, "train.log_every": 3}')
    own = ("--config", "own.json", "--set", "optimizer.lr=0.5", "--set", "train.select=last")
    words = [word for grid in grids for word in ("--grid", grid)]
    code, output, errors = call("tune", name, "--methods", "ls,famo", *words, *own, "--file", path)
    assert (code, errors) == (0, "")
    used = re.findall("Use it with: (.*)", output)
    assert used == [f"moonopt compare {name} --methods " + each.format(f"'{path}'") for each in told]
    for command in used:
        code, output, errors = call(*shlex.split(command)[1:], "--seeds", "1", "--out", "runs/tune")
        assert (code, errors) == (0, "")
        assert output.count("was done already") == command.count(",") + 1  # its cells are those of the trials


def test_lists_and_inspection_say_what_there_is(call):
    code, output, _ = call("list")
    assert code == 0
    assert re.search(r"toy +2 +here", output)
    assert "nash-mtl" in output
    assert f"torch {torch.__version__}" in call("--version")[1]
    assert "first.weight" in call("inspect", TINY)[1]
    assert "here" in call("data", "list")[1]
    assert call("data", "verify", "toy")[0] == 0


def test_data_come_from_the_option_then_the_environment(call, monkeypatch):
    Path("given").mkdir()
    monkeypatch.setenv("MOONOPT_DATA", "nowhere")
    assert "There is no folder nowhere, which $MOONOPT_DATA names" in refused(call, "run", "tiny_benchmarks:Absent")
    assert "are not in given: put" in refused(call, "run", "tiny_benchmarks:Absent", "--data", "given")
    monkeypatch.setenv("MOONOPT_DATA", "given")
    assert "are not in given: put" in refused(call, "run", "tiny_benchmarks:Absent")


def test_made_up_data_can_be_trained_on_and_are_not_replaced(call):
    assert call("data", "make", "mnist", "--data", "digits") == (0, "Made-up data of mnist are in digits.\n", "")
    few = [word for split in ("train", "valid", "test") for word in ("--set", f"data.{split}_pairs=32")]
    words = ("run", "multimnist", "--data", "digits", *few, *SHORT, "--set", "train.batch_size=16", "--set", "model.depth=1")
    code, output, errors = call(*words)
    assert (code, errors) == (0, "")
    assert re.search(r" moon,.* +\d+\.\d\d", output)
    assert "no number here can be set beside a published one" in " ".join(output.split())
    assert "(paper)" not in output
    assert re.search(r"multimnist +2 +made up", call("list", "--data", "digits")[1])
    assert re.search(r"multimnist +made up", call("data", "list", "--data", "digits")[1])
    assert "digits/mnist has files already" in refused(call, "data", "make", "mnist", "--data", "digits")


def test_two_concurrent_runs_of_one_cell(call):
    first = moonopt("run", SLOW, "--method", "ls", cwd=Path.cwd(), wait=False)
    folder = Path("runs") / SLOW / "ls" / "seed0"
    try:
        until((folder / "metrics.jsonl").exists)
        for words in (("run", SLOW, "--method", "ls"), ("run", SLOW, "--method", "ls", "--overwrite"), ("resume", folder)):
            code, _, errors = call(*words)
            assert code == 2
            assert f"{folder} is in use: process {first.pid} is running it." in errors.replace(f"{Path.cwd()}/", "")
        code, _, errors = call("compare", SLOW, "--methods", "ls", "--seeds", "1")
        assert code == 1
        assert f"is in use: process {first.pid} is running it." in errors
        assert first.poll() is None
    finally:
        os.kill(first.pid, signal.SIGINT)
    assert first.communicate(timeout=30)[1].startswith("Stopped, with a checkpoint")


@pytest.fixture
def comparing(tmp_path):
    """A comparison in a process and group of its own, with two cells at work."""
    words = ("compare", SLOW, "--methods", "ls,uw,famo", "--seeds", "1", "--jobs", "2", "--set", "train.epochs=20")
    process = moonopt(*words, cwd=tmp_path, wait=False)
    folders = [tmp_path / "runs" / SLOW / f"{method},train.epochs=20" / "seed0" for method in ("ls", "uw", "famo")]
    until(lambda: all((folder / "metrics.jsonl").exists() and len(_steps(folder)) > 3 for folder in folders[:2]))
    yield process, words, folders
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _steps(folder):
    return re.findall(r'"step": (\d+)', (folder / "metrics.jsonl").read_text())


def _gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_checkpoints_and_the_same_command_goes_on(number, comparing, call):
    process, words, folders = comparing
    os.killpg(process.pid, number)  # as a terminal does, or a system that shuts down
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert errors == "Stopped, with a checkpoint; the same command goes on\n"
    assert output.count("stopped, with a checkpoint") == 2
    steps = [torch.load(folder / "checkpoint.pt", weights_only=True)["progress"]["step"] for folder in folders[:2]]
    assert [str(step) for step in steps] == [_steps(folder)[-1] for folder in folders[:2]]  # of the last step, not an epoch
    assert not folders[2].exists()
    code, output, _ = call(*words)
    assert code == 0
    assert [f"goes on at step {step} of 120" in output for step in steps] == [True, True]
    assert "famo,train.epochs=20 seed 0: 120 steps" in output


def test_processes_of_a_comparison_that_was_killed_do_not_run_on(comparing):
    process, _, folders = comparing
    workers = [int((folder / LOCK).read_text()) for folder in folders[:2]]
    assert not any(map(_gone, workers))
    process.kill()
    process.wait()
    until(lambda: all(map(_gone, workers)), 10)
    assert all((folder / "checkpoint.pt").exists() for folder in folders[:2])
    assert not any((folder / "result.json").exists() for folder in folders)


def test_a_process_that_is_killed_does_not_end_the_comparison(comparing):
    process, _, folders = comparing
    os.kill(int((folders[0] / LOCK).read_text()), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(
        "ls,train.epochs=20 seed 0 failed: killed by the system (SIGKILL), which it does when memory runs out"
    )
    assert all((folder / "result.json").exists() for folder in folders[1:])
    assert re.search(r" famo +\d", output)


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m moonopt list | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_scenes_are_made_in_the_size_that_is_asked_for(call):
    assert call("data", "make", "nyuv2", "--out", "rooms", "--count", "1", "--size", "32x64")[0] == 0
    assert np.load("rooms/nyuv2/train/depth/0.npy").shape == (32, 64, 1)


def test_a_result_of_other_code_of_ones_own_is_not_taken_for_done(call, monkeypatch):
    path, words = Path("own.py"), ("run", "own:Own", "--method", "ls", "--set", "train.epochs=1")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    text = "from tiny_benchmarks import Tiny\nclass Own(Tiny):\n    title = 'mine'\n"
    for code, wanted in ((text, 0), (text + "# a comment\n\n", 0), (text.replace("mine", "another"), 2)):
        path.write_text(code)
        code_of.cache_clear()
        found, _, errors = call(*words)
        assert found == wanted, errors
    assert "holds a run with other settings (code is {'own:Own': '" in errors
    assert "Use --overwrite to replace it" in errors
    sys.modules.pop("own")


def test_the_checksum_of_ones_own_code_is_the_same_for_all_versions_of_python(tmp_path, monkeypatch):
    (tmp_path / "checksummed.py").write_text(
        "def f(x=None, *, y):\n    return [x, None, f'{y}!']  # what ast.dump tells is not\n"
    )
    monkeypatch.chdir(tmp_path)
    code_of.cache_clear()
    assert code_of("checksummed:f") == "7f6e1e426d75"
    (tmp_path / "long.py").write_text("x = " + " + ".join(["1"] * 900) + "\n")
    assert len(code_of("long:x")) == 12
    sys.path.remove(str(tmp_path))


def test_a_failed_run_has_its_traceback_where_it_is_asked_for(call, monkeypatch):
    monkeypatch.setenv("MOONOPT_DEBUG", "1")
    with pytest.raises(RunFailedError):
        call("run", VANISHING, "--method", "uw")


def test_where_only_ascii_can_be_written_an_arrow_is_a_question_mark(tmp_path):
    words = [sys.executable, "-m", "moonopt", "run", TINY, "--method", "ls", "--set", "train.epochs=1"]
    paths = os.pathsep.join([str(Path(__file__).parent / "runs"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": paths}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
