"""Sampling responses from a causal language model of transformers, in batches, with a key-value cache.

All randomness comes from one generator: a token is the largest of its logits plus Gumbel noise. The same generator, model and
prompts give the same responses, so that a resumed run goes on as if it had not stopped.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moonopt.bench.text.decoding import NextLogits, decoder_for
from moonopt.bench.text.policy import Samples, positions
from moonopt.errors import UserError
from moonopt.tasks.modes import eval_mode

#: Tokens between two looks at whether all responses have ended, for which the host waits for the device.
LOOK_EVERY = 8


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts as tokens (n, p) that end together, and a mask that is True where they are no padding.

    >>> left_padded([[5, 6, 7], [8]], pad=0)[0]
    tensor([[5, 6, 7],
            [0, 0, 8]])
    """
    if not all(prompts):
        raise ValueError("A prompt needs at least one token.")
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return tokens, torch.arange(longest) >= longest - lengths[:, None]


@torch.no_grad()
def sample(
    model: Any,
    prompt: Tensor,
    prompt_mask: Tensor,
    generator: torch.Generator,
    *,
    length: int,
    end: Sequence[int],
    pad: int,
    temperature: float = 1.0,
    decoder: Callable[[Any, torch.device, int], NextLogits] = decoder_for,
) -> Samples:
    """A response to every prompt, from the model in eval mode.

    Args:
        model: a causal language model, on the device of the prompts.
        prompt: tokens (n, p), padded on the left.
        prompt_mask: True where they are no padding.
        generator: the only source of randomness, on whatever device.
        length: the most tokens of a response.
        end: tokens that end a response, and belong to it.
        pad: the token behind the end.
        temperature: by which logits are divided; at 0 the likeliest token is taken, and nothing is random.
        decoder: what computes logits for a model, a device and the most tokens of a prompt with its response.

    """
    _check(model, prompt.shape[1], length, temperature)
    noise = _generator_like(generator, prompt.device)
    ends = torch.tensor(list(end), device=prompt.device)
    tokens, mask, finished = [], prompt_mask, torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    masks: list[Tensor] = []
    with eval_mode(model):  # no dropout; and with gradient checkpointing, models have a cache only then
        logits_of = decoder(model, prompt.device, prompt.shape[1] + length)
        step, places = prompt, positions(prompt_mask)
        for number in range(length):
            chosen = _choose(logits_of(step, mask, places), noise, temperature)
            chosen = torch.where(finished, pad, chosen)
            tokens.append(chosen)
            masks.append(~finished)
            finished = finished | torch.isin(chosen, ends)
            if (number + 1) % LOOK_EVERY == 0 and bool(finished.all()):
                break
            mask = torch.cat([mask, masks[-1][:, None]], 1)
            step, places = chosen[:, None], places[:, -1:] + 1
    response, response_mask = torch.stack(tokens, 1), torch.stack(masks, 1)
    longest = int(response_mask.sum(1).max())
    return Samples(prompt, prompt_mask, response[:, :longest], response_mask[:, :longest])


def _choose(logits: Tensor, noise: torch.Generator, temperature: float) -> Tensor:
    if temperature == 0:
        return logits.argmax(1)
    gumbel = -torch.empty_like(logits).exponential_(generator=noise).log()
    return (logits / temperature + gumbel).argmax(1)


def _generator_like(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator for a device, seeded by the one that was given."""
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


def _check(model: Any, prompt: int, length: int, temperature: float) -> None:
    if length < 1 or temperature < 0:
        raise UserError(
            f"Responses need a length of at least 1 and a temperature of at least 0, found {length}, {temperature}."
        )
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and prompt + length > context:
        raise UserError(
            f"A prompt of {prompt} tokens and a response of up to {length} are more than the model's context of {context}: "
            "shorten the response, or leave long problems out."
        )
