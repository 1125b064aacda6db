"""REINFORCE: by hand on a language of two tokens, in chunks and without, masks, baselines, and every way to MOON's deltas."""

import itertools

import pytest
import tiny_language_models as tiny
import torch

from moonopt import MOON
from moonopt.bench.text import policy
from moonopt.bench.text.policy import (
    BASELINES,
    Samples,
    kl_penalty,
    less_mean,
    less_others,
    policy_losses,
    response_log_probs,
    shortfall_losses,
    token_log_probs,
    without_spread,
)


def two_tokens(weight, tokens):
    """Log-probabilities (n, r) in a language of tokens 0 and 1, whose logits are the weight whatever came before."""
    hidden = torch.ones(tokens.numel(), 1, dtype=weight.dtype)
    return token_log_probs(hidden, weight[:, None], tokens.flatten()).view(tokens.shape)


def test_the_gradient_on_a_language_of_two_tokens_is_the_one_by_hand():
    weight = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 1], [1, 1], [0, 0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    losses = policy_losses(two_tokens(weight, tokens), mask, less_mean(rewards))
    p = torch.sigmoid(torch.tensor(0.8, dtype=torch.float64))  # of token 0
    # The gradient of log-probability by the logit of token 0: 1 - p for token 0 and -p for token 1.
    of_responses = torch.stack([(1 - p) - p, -p, 2 * (1 - p)])
    for reward in range(2):
        advantages = rewards[:, reward] - rewards[:, reward].mean()
        by_hand = -(advantages * of_responses).sum() / 3
        (found,) = torch.autograd.grad(losses[reward], weight, retain_graph=True)
        torch.testing.assert_close(found, torch.stack([by_hand, -by_hand]), rtol=1e-14, atol=1e-14)


def test_over_all_responses_the_gradient_is_that_of_the_expected_reward():
    weight = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor(list(itertools.product((0, 1), repeat=3)))
    reward = torch.tensor([1.0, 0, 2, 5, 0, 1, 1, 7], dtype=torch.float64)
    log_probs = two_tokens(weight, tokens)
    chances = log_probs.detach().sum(1).exp()
    torch.testing.assert_close(chances.sum(), torch.ones_like(chances.sum()))
    (expected,) = torch.autograd.grad((log_probs.sum(1).exp() * reward).sum(), weight, retain_graph=True)
    weighted = len(tokens) * chances * (reward - 1.5)  # any baseline
    (found,) = torch.autograd.grad(policy_losses(log_probs, torch.ones_like(tokens).bool(), weighted[:, None])[0], weight)
    torch.testing.assert_close(found, -expected)


def test_over_all_tokens_the_gradient_of_the_penalty_is_that_of_the_divergence():
    weight = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    log_probs = two_tokens(weight, torch.tensor([[0], [1]]))
    chances = log_probs.exp()
    reference = torch.tensor([[0.2], [0.8]], dtype=torch.float64).log()
    (expected,) = torch.autograd.grad((chances * (log_probs - reference)).sum(), weight, retain_graph=True)
    alone = [
        kl_penalty(each[None], other[None], torch.tensor([[True]])) for each, other in zip(log_probs, reference, strict=True)
    ]
    (found,) = torch.autograd.grad((chances.detach()[:, 0] * torch.stack(alone)).sum(), weight, retain_graph=True)
    torch.testing.assert_close(found, expected)
    assert kl_penalty(log_probs, log_probs, torch.ones(2, 1).bool()) == 0
    assert kl_penalty(log_probs, reference, torch.zeros(2, 1).bool()) == 0


@pytest.mark.parametrize("logits_at_once", [1, 11, 22, 50, 10**6])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_change_nothing(logits_at_once, bias):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, 4), (11, 4), (11,))]
    hidden, weight, shift = (each.requires_grad_() for each in given)
    tokens = torch.randint(11, (7,), generator=generator)
    inputs = [hidden, weight, shift] if bias else [hidden, weight]
    logits = (hidden @ weight.T + (shift if bias else 0)) / 0.7
    expected = logits.log_softmax(1)[torch.arange(7), tokens]
    found = token_log_probs(hidden, weight, tokens, shift if bias else None, 0.7, logits_at_once)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(7, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_logits_never_exist_for_more_than_a_chunk(monkeypatch):
    sizes = []
    chunk = policy._log_probs_of_chunk

    def watched(hidden, tokens, weight, bias, temperature):
        sizes.append(len(hidden) * len(weight))
        return chunk(hidden, tokens, weight, bias, temperature)

    monkeypatch.setattr(policy, "_log_probs_of_chunk", watched)
    hidden = torch.randn(10, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        found = token_log_probs(hidden, torch.randn(50, 4), torch.arange(10), logits_at_once=150)
    assert sizes == [150, 150, 150, 50]
    assert max(kept, default=0) < 10 * 50
    found.sum().backward()
    assert sorted(sizes[4:]) == [50, 150, 150, 150]  # again, for the backward pass


def test_logits_of_half_precision_are_in_float32_even_under_autocast():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (8 * torch.randn(*shape, generator=generator) for shape in ((5, 8), (9, 8)))
    tokens = torch.arange(5)
    low = hidden.bfloat16(), weight.bfloat16()
    expected = (low[0].double() @ low[1].double().T).log_softmax(1)[torch.arange(5), tokens]
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(*low, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_no_tokens_have_no_log_probabilities():
    assert token_log_probs(torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_advantages_of_each_reward_have_its_own_baseline():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    torch.testing.assert_close(less_mean(rewards).sum(0), torch.zeros(2))
    others = torch.stack([rewards[j] - rewards[[i for i in range(4) if i != j]].mean(0) for j in range(4)])
    torch.testing.assert_close(less_others(rewards), others)
    assert less_others(rewards[:1]).tolist() == [[0, 0]]
    assert set(BASELINES) == {"mean", "others"}


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("name", list(BASELINES))
def test_rewards_that_are_all_equal_are_told_and_have_no_gradient(reward, name):
    weight = torch.zeros(2, requires_grad=True)
    rewards = torch.full((3, 1), reward)
    assert without_spread(rewards, ["accuracy"]) == ["accuracy"]
    losses = policy_losses(two_tokens(weight, torch.tensor([[0], [1], [1]])), torch.ones(3, 1).bool(), BASELINES[name](rewards))
    losses.sum().backward()
    assert weight.grad.tolist() == [0, 0]


def test_shortfalls_have_the_gradients_of_the_surrogates_and_the_chance_to_miss_as_their_value():
    weight = torch.tensor([0.3, -0.5], dtype=torch.float64, requires_grad=True)
    log_probs = two_tokens(weight, torch.tensor([[0, 1], [1, 1], [0, 0]]))
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    shortfalls = shortfall_losses(log_probs, log_probs, mask, rewards, less_mean(rewards))
    surrogates = policy_losses(log_probs, mask, less_mean(rewards))
    assert shortfalls.tolist() == pytest.approx([2 / 5, 2 / 5], rel=1e-14)  # one of three missed, and Laplace's two more
    for one, other in zip(shortfalls, surrogates, strict=True):
        found, expected = (torch.autograd.grad(each, weight, retain_graph=True)[0] for each in (one, other))
        torch.testing.assert_close(found, expected)
    moved = two_tokens(weight.detach() + 0.1, torch.tensor([[0, 1], [1, 1], [0, 0]]))
    moved_shortfalls = shortfall_losses(moved, log_probs, mask, rewards, less_mean(rewards))
    moved_surrogates = policy_losses(moved, mask, less_mean(rewards))
    torch.testing.assert_close(moved_shortfalls - shortfalls, moved_surrogates - surrogates)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_shortfall_has_a_logarithm_whatever_the_rewards_are(reward):
    log_probs, rewards = torch.full((8, 2), -1.0), torch.full((8, 1), reward)
    found = shortfall_losses(log_probs, log_probs, torch.ones(8, 2).bool(), rewards, less_mean(rewards))
    assert found.tolist() == pytest.approx([(9 - 8 * reward) / 10])


def test_what_is_not_sampled_has_no_say_even_if_it_is_not_finite():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, float("-inf")]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss = policy_losses(log_probs, mask, torch.tensor([[1.0], [2.0]]))
    assert loss.tolist() == [(3 + 6) / 2]
    loss.sum().backward()
    assert log_probs.grad.tolist() == [[-0.5, -0.5], [-1, 0]]


def samples(seed=0, count=3, prompt=4, response=5):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, len(tiny.WORDS), (count, prompt + response), generator=generator)
    left = torch.arange(prompt) >= torch.arange(count)[:, None]
    right = torch.arange(response) < (response - torch.arange(count))[:, None]
    return Samples(tokens[:, :prompt], left, tokens[:, prompt:], right)


@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_of_a_model_are_those_of_its_logits_and_padding_changes_nothing(tied):
    pytest.importorskip("transformers")
    model = tiny.qwen3(torch.float64, tie_word_embeddings=tied)
    given = samples()
    found = response_log_probs(model, given, temperature=1.3, logits_at_once=100)
    assert given.lengths.tolist() == [5, 4, 3]
    for row, length in enumerate(given.lengths.tolist()):
        alone = given.tokens[row][given.mask[row]][None]
        logits = model(alone).logits[0, -length - 1 : -1] / 1.3
        expected = logits.log_softmax(1).gather(1, alone[0, -length:, None])[:, 0]
        torch.testing.assert_close(found[row, :length], expected, rtol=1e-6, atol=1e-8)
        assert found[row, length:].tolist() == [0] * (5 - length)


def losses_of(model, given, rewards):
    log_probs = response_log_probs(model, given, logits_at_once=100)
    return policy_losses(log_probs, given.response_mask, less_mean(rewards))


def test_gradients_with_chunks_and_checkpointed_layers_are_those_without():
    pytest.importorskip("transformers")
    given, rewards = samples(), torch.eye(3, dtype=torch.float64)
    gradients = []
    for checkpointing in (False, True):
        model = tiny.qwen3(torch.float64).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        losses = losses_of(model, given, rewards)
        gradients.append(torch.autograd.grad(losses @ torch.tensor([1.0, 2.0, 3.0]).double(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("delta", ["forward_mode", "double_backward"])
def test_exact_deltas_of_the_three_losses_are_those_of_a_backward_pass_per_task(delta):
    pytest.importorskip("transformers")
    given, rewards = samples(), torch.eye(3, dtype=torch.float64)
    found = []
    for mode in ("per_task", delta):
        model = tiny.qwen3(torch.float64)
        method = MOON(model, tasks=["accuracy", "conciseness", "clarity"], lr=0.01, beta=0.1, delta=mode)
        method.minimize(losses_of, model, given, rewards)
        found.append((method.logits.clone(), [p.detach().clone() for p in model.parameters()]))
    assert found[0][0].abs().max() > 1e-4
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)  # Qwen3 has norms in float32, whatever its dtype
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


def test_rewards_that_are_all_equal_leave_the_parameters_of_a_model_where_they_are():
    pytest.importorskip("transformers")
    model = tiny.qwen3()
    before = [p.detach().clone() for p in model.parameters()]
    method = MOON(model, tasks=3, lr=0.01)
    losses = method.minimize(losses_of, model, samples(), torch.ones(3, 3))
    assert losses.tolist() == [0, 0, 0]
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old)
