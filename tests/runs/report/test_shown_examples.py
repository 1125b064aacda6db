"""Examples of evaluations: what several methods made of one thing stands in one table."""

from dataclasses import replace

from moonopt.runs.report.examples import examples_of
from moonopt.runs.report.study import read_runs, studies


def with_examples(run, *examples):
    """The run with examples in its last evaluation, and others in all earlier ones."""
    *earlier, last = run.evaluation
    stale = [{**line, "examples": [{"given": {"question": "old"}, "made": {}}]} for line in earlier]
    named = [{"given": {"question": question}, "made": made} for question, made in examples]
    return replace(run, evaluation=[*stale, {**last, "examples": named}])


def test_rows_that_were_given_the_same_are_in_one_table(make_run, toy_metrics):
    for method in ("moon", "ls", "famo"):
        make_run(method, 0, toy_metrics(method, 0))
    by_method = {run.method: run for run in read_runs([make_run.args[0]])}
    runs = [
        with_examples(by_method["moon"], ("1 + 1", {"response": "2", "tokens": "1"}), ("2 + 2", {"response": "4"})),
        with_examples(by_method["ls"], ("1 + 1", {"response": "3", "why": "so"}), ("3 + 3", {"response": "6"})),
        by_method["famo"],
    ]
    (study,) = studies(runs)
    first, *others = examples_of(study)
    assert first.given == {"question": "1 + 1"}
    assert [column.heading for column in first.made.columns] == ["response", "tokens", "why"]
    texts = {row.label: [entry.text for entry in row.entries] for row in first.made.rows}
    assert texts == {"moon": ["2", "1", "–"], "ls": ["3", "–", "so"]}  # noqa: RUF001 - as the table has it
    assert [(each.given["question"], [row.label for row in each.made.rows]) for each in others] == [
        ("2 + 2", ["moon"]),
        ("3 + 3", ["ls"]),
    ]


def test_runs_without_evaluations_have_none(make_run, toy_metrics):
    make_run("moon", 0, toy_metrics("moon", 0), steps=5)
    (study,) = studies(read_runs([make_run.args[0]]))
    assert examples_of(study) == []
