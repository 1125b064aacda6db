"""A step of reinforcement fine-tuning with 1.7 billion parameters: ``python -m moonopt.speed.language [--json] [--small]``.

Qwen3-1.7B's configuration with random weights, in bfloat16 and in float32 under autocast, 8 sequences of 1024 tokens, three
losses of REINFORCE on the same tokens, checkpointed layers and logits in float32, a chunk at a time. Each method alone: time of
a step without sampling, peak memory, and the memory of the optimizer's state.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moonopt.balance import LS, Balanced
from moonopt.bench.text.models import checkpoint_layers
from moonopt.bench.text.policy import Samples, less_others, response_log_probs, shortfall_losses
from moonopt.bench.text.rewards import REWARDS
from moonopt.optim.moon import MOON
from moonopt.optim.muon import Muon
from moonopt.speed.measure import autocast, command_line, interleaved, show, small_or_gpu, timing
from moonopt.tasks.verbs import TaskOptimizer

REFERENCE = "ls+adamw"
#: Of the parameters. Whatever they are, products are in bfloat16.
DTYPES = ("bfloat16", "float32")


class Size(NamedTuple):
    """A language model, and the tokens of a step, of which a quarter are prompts."""

    layers: int
    width: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_width: int
    vocabulary: int
    batch: int
    length: int


#: Qwen3-1.7B, and one that a CPU takes no time for.
LARGE = Size(28, 2048, 6144, 16, 8, 128, 151_936, batch=8, length=1024)
SMALL = Size(2, 64, 96, 4, 2, 16, 512, batch=2, length=32)

METHODS: dict[str, Callable[[nn.Module], TaskOptimizer]] = {
    REFERENCE: lambda model: Balanced(LS(REWARDS), torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True), module=model),
    "muon": lambda model: Muon(model, lr=1e-5, vector_lr=1e-6),
    "moon": lambda model: MOON(model, tasks=REWARDS, lr=1e-5, vector_lr=1e-6, beta="auto"),
}


def measure(rounds: int = 5, device: str = "cuda", size: Size = LARGE, dtype: str = DTYPES[0]) -> dict[str, Any]:
    """For every method milliseconds of a step, and on a GPU gibibytes at its highest point."""
    gc.collect()  # what was measured before
    torch.manual_seed(0)
    model = _model(size, device, dtype)
    losses = _losses(model, size, device)
    times: dict[str, dict[str, float]] = {}
    peaks, states = {}, {}
    for name, build in METHODS.items():
        optimizer = build(model)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        times |= interleaved({name: partial(optimizer.minimize, losses)}, rounds, warmup=2)
        peaks[name] = None if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        states[name] = _bytes_of(optimizer) / 2**30
        optimizer.zero_grad()
        del optimizer
        gc.collect()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": dtype,
        **{name: value for name, value in size._asdict().items() if name in ("batch", "length")},
        "rounds": rounds,
        "times": times,
        "peaks_gib": peaks,
        "states_gib": states,
        "ratios": {name: found["ms"] / times[REFERENCE]["ms"] for name, found in times.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = small_or_gpu(command_line("language", __doc__, rounds=5), "1.7 billion parameters", arguments)
    size = SMALL if options.small else LARGE
    show(options, [measure(options.rounds, options.device, size, dtype) for dtype in DTYPES], _lines)


def _lines(result: dict[str, Any]) -> list[str]:
    title = (
        f"Qwen3 with {result['parameters']:,} parameters in {result['dtype']}, {result['batch']} x {result['length']} tokens"
    )
    lines = [f"{title}, median of {result['rounds']} steps; and how many times as long as {REFERENCE}"]
    for who, found in result["times"].items():
        peak = result["peaks_gib"][who]
        memory = f"state {result['states_gib'][who]:6.2f} GiB" + ("" if peak is None else f", peak {peak:6.2f} GiB")
        lines.append(f"  {who:10} {timing(found)}  {result['ratios'][who]:5.2f}x  {memory}")
    return lines


def random_model(family: str, size: Size, dtype: torch.dtype, device: str, **settings: Any) -> Any:
    """A causal language model of transformers with random weights, in eval mode."""
    import transformers

    automatic: Any = transformers.AutoModelForCausalLM  # untyped in some versions
    config = getattr(transformers, f"{family}Config")(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        head_dim=size.head_width,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        **settings,
    )
    with torch.device(device):
        return automatic.from_config(config, dtype=dtype).eval()


def _model(size: Size, device: str, dtype: str = DTYPES[0]) -> Any:
    model = random_model("Qwen3", size, getattr(torch, dtype), device)
    checkpoint_layers(model)
    return model


def _losses(model: Any, size: Size, device: str) -> Callable[[], Tensor]:
    """The three losses of responses that nobody sampled, with rewards by chance."""
    tokens = torch.randint(size.vocabulary, (size.batch, size.length), device=device)
    mask, prompt = torch.ones_like(tokens, dtype=torch.bool), size.length // 4
    samples = Samples(tokens[:, :prompt], mask[:, :prompt], tokens[:, prompt:], mask[:, prompt:])
    rewards = torch.rand(size.batch, len(REWARDS), device=device).round()
    products = "bfloat16" if model.dtype == torch.float32 else "as they are"
    with torch.no_grad(), autocast(products, device):
        before = response_log_probs(model, samples)

    def losses() -> Tensor:
        with autocast(products, device):
            log_probs = response_log_probs(model, samples)
        return shortfall_losses(log_probs, before, samples.response_mask, rewards, less_others(rewards))

    return losses


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Of all tensors in an optimizer's state."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return sum(each.numel() * each.element_size() for each in tensors)


if __name__ == "__main__":
    main()
