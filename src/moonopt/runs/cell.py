"""A cell of a comparison: one method, with its settings, on one benchmark with one seed; and the folder it lives in."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moonopt.bench import find
from moonopt.bench.registry import code_of
from moonopt.errors import UserError
from moonopt.runs.settings import Layer, resolve

FORMAT = 1  # of config.json, result.json and checkpoints


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes."""

    device: str = "cpu"
    amp: bool = False
    compile: bool = False
    tf32: bool = False

    @property
    def words(self) -> list[str]:
        """As the command line has it.

        >>> Machine("cuda", amp=True).words
        ['--device', 'cuda', '--amp']
        """
        named = [] if self.device == "cpu" else ["--device", self.device]
        return [*named, *(f"--{each.name}" for each in fields(self) if getattr(self, each.name) is True)]


CPU = Machine()


@dataclass(frozen=True)
class Cell:
    """Everything needed to repeat a run. ``overrides`` are the settings that differ from what the benchmark would choose."""

    benchmark: str
    method: str
    seed: int
    settings: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    machine: Machine = CPU

    @property
    def config(self) -> dict[str, Any]:
        """As ``config.json`` has it."""
        return {
            "format": FORMAT,
            "benchmark": self.benchmark,
            "method": self.method,
            "seed": self.seed,
            "overrides": dict(self.overrides),
            "settings": dict(self.settings),
            "device": self.machine.device,
            "amp": self.machine.amp,
            "compile": self.machine.compile,
            **({"tf32": True} if self.machine.tf32 else {}),  # younger than the format, so that older runs go on
            **({"code": self._code} if self._code else {}),  # as is this
        }

    @property
    def _code(self) -> dict[str, str]:
        """Checksums of a benchmark and of a method that are a user's own."""
        own = [name for name in (self.benchmark, self.method) if ":" in name]
        return {name: code for name in own if (code := code_of(name)) is not None}

    @property
    def label(self) -> str:
        """The method with its overrides, sorted: "moon,optimizer.lr=0.01"."""
        return ",".join([self.method, *self.words])

    @property
    def words(self) -> list[str]:
        """The overrides, sorted: "optimizer.lr=0.01"."""
        return [f"{key}={word(value)}" for key, value in sorted(self.overrides.items())]

    @property
    def name(self) -> str:
        """For people: "moon,optimizer.lr=0.01 seed 0"."""
        return f"{self.label} {seeds_text([self.seed])}"

    def folder(self, root: Path) -> Path:
        """RUNS/BENCH/METHOD[,key=value...]/seedS."""
        return root / safe(self.benchmark) / safe(self.label) / f"seed{self.seed}"

    @property
    def command(self) -> str:
        """What repeats the run."""
        words = ["moonopt", "run", self.benchmark, "--method", self.method, "--seed", str(self.seed)]
        for each in self.words:
            words += ["--set", each]
        return shlex.join(words + self.machine.words)


def seeds_text(seeds: Sequence[int]) -> str:
    """For people.

    >>> seeds_text([0]), seeds_text([0, 2])
    ('seed 0', 'seeds 0, 2')
    """
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def make_cell(benchmark: str, method: str, seed: int, layers: Sequence[Layer] = (), machine: Machine = CPU) -> Cell:
    """The cell of names and settings, all checked."""
    if not 0 <= seed < 2**63:
        raise UserError(f"A seed must be a whole number of at least 0, found {seed}.")
    bench = find(benchmark)
    settings = {key: each.value for key, each in resolve(bench, method, layers).items()}
    plain = {key: each.value for key, each in resolve(bench, method).items()}
    protocol = settings.get("method.protocol")
    changed = {key: value for key, value in settings.items() if value != plain.get(key)}
    if protocol is not None and "method.protocol" in changed:  # what the protocol brings along needs no naming
        brought = resolve(bench, method, [("protocol", {"method.protocol": protocol})])
        changed = {key: value for key, value in changed.items() if key == "method.protocol" or value != brought[key].value}
    return Cell(benchmark, method, seed, settings, changed, machine)


def cell_of(config: Mapping[str, Any], source: Path) -> Cell:
    """The cell of a ``config.json``."""
    if config.get("format") != FORMAT:
        raise UserError(
            f"{source} is of format {config.get('format')!r}, expected {FORMAT}: another version of moonopt made it."
        )
    absent = [key for key in Cell("", "", 0, {}).config if key not in config]
    if absent:
        raise UserError(f"{source} is damaged: it lacks {', '.join(absent)}.")
    machine = Machine(**{each.name: config[each.name] for each in fields(Machine) if each.name in config})
    return Cell(config["benchmark"], config["method"], config["seed"], config["settings"], config["overrides"], machine)


def word(value: Any) -> str:
    """A value as ``--set`` reads it."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def in_all(several: Sequence[Sequence[str]]) -> list[str]:
    """What stands in all of them, in the order of the first.

    >>> in_all([["a", "b", "c"], ["c", "a"]])
    ['a', 'c']
    """
    return [each for each in several[0] if all(each in other for other in several)]


#: File systems allow 255 bytes for a name.
LONGEST = 200


def safe(name: str) -> str:
    """A name as one part of a path; of a very long one the end is replaced by a digest."""
    quoted = quote(name, safe=' ,=:+.[]{}"')
    if len(quoted) <= LONGEST:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{quoted[: LONGEST - len(digest) - 1]}~{digest}"
