r"""REINFORCE with several rewards: one surrogate loss for each, over the same samples.

    L_k = -1/n sum_j (r_jk - b_k) sum_t log pi(y_jt | x_j, y_j<t),        grad L_k = -(estimate of) grad E[r_k]

The value of such a loss has no meaning, and may be negative; its gradient has, and its change along a step on the same samples.
Log-probabilities are taken from the last hidden states in chunks of tokens, each of which is computed again in the backward
pass, so that logits (tokens, vocabulary) are never there for more than one chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

#: Logits that exist at a time: 256 MiB of them in float32.
LOGITS_AT_ONCE = 1 << 26


class Samples(NamedTuple):
    """Prompts, padded on the left, and what was sampled behind them, padded on the right.

    Attributes:
        prompt: tokens (n, p).
        prompt_mask: True where they are no padding.
        response: tokens (n, r), the end token included.
        response_mask: True where they were sampled.

    """

    prompt: Tensor
    prompt_mask: Tensor
    response: Tensor
    response_mask: Tensor

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.response], 1)

    @property
    def mask(self) -> Tensor:
        return torch.cat([self.prompt_mask, self.response_mask], 1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of every response (n)."""
        return self.response_mask.sum(1)


def response_log_probs(model: Any, samples: Samples, temperature: float = 1.0, logits_at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """The log-probability of every sampled token (n, r), 0 where there is none, by a causal language model of transformers.

    Args:
        model: its logits must be the product of the last hidden states and the weight of its output embeddings
            (``moonopt.bench.text.models.load`` has looked).
        samples: what was sampled.
        temperature: that of sampling, by which logits are divided.
        logits_at_once: the largest product of tokens and vocabulary that exists at a time.

    """
    hidden = last_hidden(model, samples.tokens, samples.mask)[:, samples.prompt.shape[1] - 1 : -1]
    head = model.get_output_embeddings()
    chosen = samples.response_mask
    found = token_log_probs(
        hidden[chosen], head.weight, samples.response[chosen], getattr(head, "bias", None), temperature, logits_at_once
    )
    return torch.zeros(chosen.shape, dtype=found.dtype, device=found.device).masked_scatter(chosen, found)


def last_hidden(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """The hidden states (n, length, width) that the output embeddings are applied to."""
    states: Tensor = model.base_model(
        input_ids=tokens, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False
    ).last_hidden_state
    return states


def positions(mask: Tensor) -> Tensor:
    """The position of every token, counted from the first that is no padding."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """The log-probability (n) of each of ``tokens`` (n), of logits ``hidden @ weight.T + bias`` that are in float32 or better.

    ``weight`` (vocabulary, width) may be tied to the input embeddings. Autocast has no say in the logits.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    size = max(1, logits_at_once // len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(wide), None if bias is None else bias.to(wide), temperature
        pieces = zip(torch.split(hidden.to(wide), size), torch.split(tokens, size), strict=True)
        found = [
            checkpoint(_log_probs_of_chunk, *piece, *head, use_reentrant=False, preserve_rng_state=False) for piece in pieces
        ]
    return torch.cat(found) if found else hidden.new_zeros(0, dtype=wide)


def policy_losses(log_probs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """One surrogate loss (k) for each reward.

    Args:
        log_probs: of the sampled tokens (n, r), with a graph.
        mask: True where they were sampled.
        advantages: rewards less their baseline (n, k).

    """
    of_responses = torch.where(mask, log_probs, 0).sum(1)
    return -(advantages.detach().to(of_responses) * of_responses[:, None]).mean(0)


def shortfall_losses(log_probs: Tensor, before: Tensor, mask: Tensor, rewards: Tensor, advantages: Tensor) -> Tensor:
    """Losses (k) with the same gradients and a value that means something: how often the reward is missed.

    At the parameters that sampled, whose log-probabilities are ``before``, it is (m + 1) / (n + 2) for m missed of n: Laplace's
    estimate of the chance, never 0, so that methods can divide by it and take its logarithm. Elsewhere it changes as the
    surrogate does, and a long step may take it below 0. As differences of log-probabilities are small, so is the rounding of
    its change in a step.
    """
    estimate = ((1 - rewards).sum(0) + 1) / (len(rewards) + 2)
    return policy_losses(log_probs - before.detach(), mask, advantages) + estimate.to(log_probs)


def less_mean(rewards: Tensor) -> Tensor:
    """Advantages (n, k): rewards less their mean over the batch. The estimate is (n - 1) / n of what it should be."""
    return rewards - rewards.mean(0)


def less_others(rewards: Tensor) -> Tensor:
    """Advantages (n, k): rewards less the mean of the other samples. The estimate has no bias; of one sample it is 0."""
    count = len(rewards)
    return less_mean(rewards) * (count / max(1, count - 1))


#: How a reward becomes an advantage, by name. The paper does not say which baseline it takes.
BASELINES: dict[str, Callable[[Tensor], Tensor]] = {"mean": less_mean, "others": less_others}


def without_spread(rewards: Tensor, names: Sequence[str]) -> list[str]:
    """The rewards that are the same for all samples: these have nothing to say, and their loss has no gradient.

    >>> without_spread(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["accuracy", "clarity"])
    ['accuracy']
    """
    same = (rewards == rewards[:1]).all(0).tolist()
    return [name for name, constant in zip(names, same, strict=True) if constant]


def kl_penalty(log_probs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """A loss whose gradient estimates that of KL(policy || reference), in the mean over the sampled tokens.

    It is half the squared difference of the log-probabilities: on samples of the policy its gradient is, in the mean, that of
    the divergence of the next token, which those of other estimates of the value are not.
    """
    difference = torch.where(mask, log_probs - reference.detach(), 0)
    return difference.square().sum() / (2 * mask.sum().clamp(min=1))


def _log_probs_of_chunk(hidden: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = functional.linear(hidden, weight, bias) / temperature
    chosen: Tensor = logits.gather(1, tokens[:, None])[:, 0]
    return chosen - logits.logsumexp(1)
