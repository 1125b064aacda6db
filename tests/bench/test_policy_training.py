"""Sampling, rewards and losses together: a tiny Qwen3 learns three rewards, and goes on from a saved state bit for bit."""

import copy

import pytest
import tiny_language_models as tiny
import torch

from moonopt import MOON
from moonopt.bench.text.policy import less_mean, response_log_probs, shortfall_losses
from moonopt.bench.text.rewards import RunningMean, conciseness
from moonopt.bench.text.sampling import left_padded, sample

pytest.importorskip("transformers")

PROMPT = left_padded([[5 + n % 4, 6] for n in range(32)], tiny.PAD)
LETTERS, DIGITS = range(2, 15), range(28, 38)


class Run:
    """A model in training, and all of its state."""

    def __init__(self):
        self.model = tiny.qwen3(initializer_range=0.1, num_hidden_layers=1)
        self.method = MOON(self.model, tasks=["letters", "conciseness", "digits"], lr=0.01, vector_lr=0.01, beta=1e-3)
        self.running = RunningMean()
        self.history = []

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        samples = sample(self.model, *PROMPT, generator, length=8, end=[tiny.END, 27], pad=tiny.PAD)
        rewards = self.rewards(samples)
        with torch.no_grad():
            before = response_log_probs(self.model, samples)
        self.method.minimize(self.losses, samples, before, rewards)
        self.history.append(rewards.mean(0))

    def rewards(self, samples):
        lengths = samples.lengths.tolist()
        self.running = self.running.after(lengths)
        responses = [row[:length] for row, length in zip(samples.response.tolist(), lengths, strict=True)]
        return torch.tensor(
            [
                [any(t in LETTERS for t in row), conciseness(len(row), self.running), any(t in DIGITS for t in row)]
                for row in responses
            ]
        ).float()

    def losses(self, samples, before, rewards):
        log_probs = response_log_probs(self.model, samples)
        return shortfall_losses(log_probs, before, samples.response_mask, rewards, less_mean(rewards))

    def state(self):
        return copy.deepcopy((self.model.state_dict(), self.method.state_dict(), self.running))

    def load(self, state):
        self.model.load_state_dict(state[0])
        self.method.load_state_dict(state[1])
        self.running = state[2]


def test_rewards_rise():
    run = Run()
    for number in range(40):
        run.step(number)
    early, late = (torch.stack(part).mean(0) for part in (run.history[:8], run.history[-8:]))
    assert late.sum() > early.sum() + 0.2
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_a_run_goes_on_from_a_saved_state_bit_for_bit():
    whole, resumed = Run(), Run()
    for number in range(3):
        whole.step(number)
    resumed.load(whole.state())
    for number in range(3, 6):
        whole.step(number)
        resumed.step(number)
    assert resumed.running == whole.running
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
