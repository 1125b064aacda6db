"""A language in which a random model solves problems, is clear and is brief now and then; and runs of math-rl with it."""

import json

import tiny_language_models as tiny
import torch

from moonopt.bench.math_rl import MathRL
from moonopt.runs.cell import make_cell
from moonopt.runs.interrupt import Stop
from moonopt.runs.run import run_cell

PAD, END = 0, 1
WORDS = ["<pad>", "<end>", r"\boxed{3}", r"\boxed{4}", r"\boxed{}", "Step 1:", "Step 2:", "so", "x", "Solution:", r"\boxed{"]
SETTINGS = {
    "data.prompt": "{question}",
    "data.temperature": 1.0,
    "data.train_problems": 12,
    "data.valid_problems": 4,
    "data.test_problems": 4,
    "data.samples": 3,
    "data.length": 8,
    "data.chunk": 5,
    "model.folder": "tiny",
    "train.epochs": 2,
    "train.steps_per_epoch": 2,
    "train.batch_size": 4,
}


def tokenizer(**special):
    """One token for each word; all other words are x."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="x"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def write(folder, *, count=20, special=None, **changes):
    """A folder with problems and a tiny Qwen3."""
    (folder / "math500").mkdir(parents=True)
    problems = [{"problem": "x " * (1 + n % 3) + str(n), "answer": str(3 + n % 2)} for n in range(count)]
    (folder / "math500" / "test.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    tiny.qwen3(vocab_size=len(WORDS), **changes).save_pretrained(folder / "tiny")
    tokenizer(**(special or {"pad_token": "<pad>", "eos_token": "<end>"})).save_pretrained(folder / "tiny")
    return folder


def bench(folder, seed=0, **settings):
    """The benchmark with its splits and its model; settings are written ``data__kl=0.1``."""
    made = MathRL(SETTINGS | dotted(settings))
    return made, made.load(folder, seed), made.model()


def rollout(made, splits, model, seed=0, indices=(0, 1, 2, 3)):
    """What is prepared of some problems."""
    generator = torch.Generator().manual_seed(seed)
    return made.prepare(model, splits.train.batch(torch.tensor(indices), generator), generator)


def cell(method="moon", **settings):
    return make_cell("math-rl", method, 0, [("the test", SETTINGS | {"optimizer.lr": 0.01} | dotted(settings))])


def run(chosen, root, folder, *, stop=None, **how):
    """Run a cell here; gives its folder."""
    run_cell(chosen, root, folder, stop=stop or Stop(), tell=lambda record: None, **how)
    return chosen.folder(root)


def lines(folder, kind):
    """What metrics.jsonl has of one kind, without what depends on time."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "memory_mb")
    return [{key: value for key, value in line.items() if key not in timed} for line in found if line["kind"] == kind]


def dotted(settings):
    return {key.replace("__", "."): value for key, value in settings.items()}
