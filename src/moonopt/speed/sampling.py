"""Responses of a language model: ``python -m moonopt.speed.sampling [--json] [--small]``.

SmolLM2-135M's configuration with random weights, in float32 under bfloat16 autocast, 64 prompts of 220 tokens, 64 tokens of
each response at temperature 0.7: by ``generate`` of transformers, and by our sampler with a cache that grows, with one of fixed
size, and, on a GPU, with captured steps, as ``math-rl`` samples there. One interleaved run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from moonopt.bench.text.decoding import FixedDecoder, GrowingDecoder, NextLogits
from moonopt.bench.text.policy import Samples
from moonopt.bench.text.sampling import sample
from moonopt.speed.language import Size, random_model
from moonopt.speed.measure import command_line, interleaved, show, small_or_gpu, timing
from moonopt.tasks.modes import multiplying

REFERENCE = "transformers"
TEMPERATURE = 0.7


class Task(NamedTuple):
    """A Llama with a batch of prompts, and how many of the tokens are the response."""

    model: Size
    response: int

    @property
    def prompt(self) -> int:
        return self.model.length - self.response


#: SmolLM2-135M, and one that a CPU takes no time for.
LARGE = Task(Size(30, 576, 1536, 9, 3, 64, 49_152, batch=64, length=284), response=64)
SMALL = Task(Size(2, 32, 48, 4, 2, 8, 128, batch=3, length=13), response=8)


def measure(rounds: int = 3, device: str = "cuda", task: Task = LARGE) -> dict[str, Any]:
    """For every way milliseconds of all responses, and tokens a second."""
    torch.manual_seed(0)
    size, prompts = task.model, task.model.batch
    model = _model(size, device)
    decoders: dict[str, Callable[[Any, int], NextLogits]] = {"growing cache": lambda model, _: GrowingDecoder(model)}
    decoders["fixed cache"] = lambda model, most: FixedDecoder(model, most, captured=False)
    if torch.device(device).type == "cuda":
        decoders["captured"] = lambda model, most: FixedDecoder(model, most, captured=True)
    prompt = torch.randint(size.vocabulary, (prompts, task.prompt), device=device)
    contestants: dict[str, Callable[[], object]] = {REFERENCE: lambda: _generate(model, prompt, task)}
    contestants |= {name: partial(_sample, model, prompt, task, build) for name, build in decoders.items()}
    with multiplying(tf32=True):
        times = interleaved(contestants, rounds, warmup=1)
    tokens = prompts * task.response
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompts": prompts,
        "prompt": task.prompt,
        "response": task.response,
        "rounds": rounds,
        "times": times,
        "tokens_per_second": {name: 1e3 * tokens / found["ms"] for name, found in times.items()},
        "ratios": {name: times[REFERENCE]["ms"] / found["ms"] for name, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = small_or_gpu(command_line("sampling", __doc__, rounds=3), "135 million parameters", arguments)
    show(options, [measure(options.rounds, options.device, SMALL if options.small else LARGE)], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    title = f"Llama with {result['parameters']:,} parameters, {result['prompts']} responses of {result['response']} tokens"
    lines = [f"{title}, median of {result['rounds']} rounds; times as fast as {REFERENCE}"]
    for who, found in result["times"].items():
        lines.append(
            f"  {who:13} {timing(found)}  {result['ratios'][who]:6.2f}x  {result['tokens_per_second'][who]:9,.0f} tokens/s"
        )
    return lines


def _model(size: Size, device: str) -> Any:
    return random_model("Llama", size, torch.float32, device, bos_token_id=None, eos_token_id=None, pad_token_id=0)


def _autocast(model: Any) -> torch.autocast:
    return torch.autocast(model.device.type, torch.bfloat16)


def _sample(model: Any, prompt: torch.Tensor, task: Task, build: Callable[[Any, int], NextLogits]) -> Samples:
    with _autocast(model):
        return sample(
            model,
            prompt,
            torch.ones_like(prompt, dtype=torch.bool),
            torch.Generator().manual_seed(0),
            length=task.response,
            end=[task.model.vocabulary],
            pad=0,
            temperature=TEMPERATURE,
            decoder=lambda model, _, most: build(model, most),
        )


@torch.no_grad()
def _generate(model: Any, prompt: torch.Tensor, task: Task) -> torch.Tensor:
    with _autocast(model):
        return model.generate(  # type: ignore[no-any-return]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            min_new_tokens=task.response,
            max_new_tokens=task.response,
        )


if __name__ == "__main__":
    main()
