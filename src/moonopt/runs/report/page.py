"""The report: one page that needs nothing beside it, and the tables and figures of every benchmark as files."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moonopt.errors import UserError
from moonopt.runs.cell import safe
from moonopt.runs.report import drawing
from moonopt.runs.report.costs import cost_table
from moonopt.runs.report.drawing import Plot
from moonopt.runs.report.examples import Shown, examples_of
from moonopt.runs.report.figures import plots
from moonopt.runs.report.layout import Table, to_csv, to_latex, to_markdown
from moonopt.runs.report.repeat import Recipe, Settings, recipe, settings_of
from moonopt.runs.report.statistics import comparison_table
from moonopt.runs.report.study import Run, Study, studies
from moonopt.runs.report.tables import results_table
from moonopt.runs.store import write_whole, writing

INDEX = "index.html"
FORMS = {".csv": to_csv, ".md": to_markdown, ".tex": to_latex}
NAMES = {".csv": ("CSV", "text/csv"), ".md": ("Markdown", "text/markdown"), ".tex": ("LaTeX", "application/x-tex")}


@dataclass(frozen=True)
class Section:
    """What the page says about one benchmark.

    ``figures`` has the panels of a plot as SVG elements; ``files`` the table in other forms, each as the name of a file and its
    content in an address, so that a page that is sent alone has them.
    """

    name: str
    title: str
    folder: str
    summary: str
    results: Table
    files: Mapping[str, tuple[str, str]]
    comparisons: Table
    costs: Table
    settings: Settings
    figures: Sequence[tuple[Plot, Sequence[str]]]
    examples: Sequence[Shown]
    recipes: Sequence[Recipe]


def write_report(runs: Sequence[Run], out: Path, reference: str | None = None, order: Sequence[str] | None = None) -> Path:
    """Write OUT/index.html, OUT/BENCH/table.csv, .md and .tex, and OUT/BENCH/figures/*.svg and *.png.

    Args:
        runs: of any number of benchmarks.
        out: a folder; what is not part of the report stays as it is.
        reference: what Δm refers to, see ``results_table``.
        order: methods or labels that come first; the first of all is what the others are tested against.

    Returns:
        The page.

    """
    if not runs:
        raise UserError("There are no runs to report.")
    out = Path(out)
    sections, contents = [], {}
    for study in studies(runs, order):
        section, files = _section(study, safe(study.name), reference)
        sections.append(section)
        contents.update(files)
    contents[INDEX] = _page(sections).encode()  # last, so that a page that is there has its files
    for name, content in contents.items():
        path = out / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return out / INDEX


def _section(study: Study, folder: str, reference: str | None) -> tuple[Section, dict[str, bytes]]:
    results, drawn = results_table(study, reference), plots(study)
    tables = {suffix: form(results).encode() for suffix, form in FORMS.items()}
    files = {f"{folder}/table{suffix}": content for suffix, content in tables.items()}
    for plot in drawn:
        files |= {f"{folder}/figures/{plot.name}{suffix}": content for suffix, content in drawing.files(plot).items()}
    section = Section(
        name=study.name,
        title=study.benchmark.title,
        folder=folder,
        summary=_summary(study, results),
        results=results,
        files={NAMES[suffix][0]: (f"{folder}{suffix}", _address(suffix, content)) for suffix, content in tables.items()},
        comparisons=comparison_table(study),
        costs=cost_table(study),
        settings=settings_of(study),
        figures=[(plot, drawing.inline(plot, f"{folder}-{plot.name}")) for plot in drawn],
        examples=examples_of(study),
        recipes=[recipe(row) for row in study.rows],
    )
    return section, files


def _summary(study: Study, results: Table) -> str:
    """The finding in a sentence."""
    if not study.rows:
        return "No run is finished."
    column = [column.heading for column in results.columns].index(study.headline.heading)
    best = [row for row in results.rows if row.entries[column].best]
    runs = sum(len(outcome.runs) for row in study.rows for outcome in row.outcomes)
    told = f"{_count(len(study.rows), 'method')}, {_count(runs, 'finished run')}"
    told += f", all with {', '.join(study.shared)}." if study.shared else "."
    if not best:
        return told
    named = " and ".join(row.label for row in best)
    return f"Best {study.headline.name}: {named}, {best[0].entries[column].text}. {told}"


def _address(suffix: str, content: bytes) -> str:
    """An address that has the content in it."""
    return f"data:{NAMES[suffix][1]};charset=utf-8;base64,{base64.b64encode(content).decode()}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _page(sections: Sequence[Section]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # of the extra "bench"

    templates = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(sections=sections)
