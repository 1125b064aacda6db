"""Sampling from a tiny random Qwen3: the cache, padding, ends, temperature, and randomness from a generator alone."""

from types import SimpleNamespace

import pytest
import tiny_language_models as tiny
import torch

from moonopt.bench.text import decoding
from moonopt.bench.text.policy import response_log_probs
from moonopt.bench.text.sampling import left_padded, sample
from moonopt.errors import UserError

pytest.importorskip("transformers")

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
NO_END = [10_000]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(model, seed=0, prompts=PROMPTS, **changes):
    options = {"length": 12, "end": [tiny.END], "pad": tiny.PAD}
    return sample(model, *left_padded(prompts, tiny.PAD), generator(seed), **options | changes)


def test_prompts_end_together():
    tokens, mask = left_padded([[5, 6, 7], [8]], 0)
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    with pytest.raises(ValueError, match="at least one token"):
        left_padded([[1], []], 0)


def test_the_likeliest_tokens_are_those_of_the_model_without_cache_or_padding():
    model = tiny.qwen3(torch.float64)
    found = drawn(model, temperature=0, end=NO_END)
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert found.response[row].tolist() == tokens[len(prompt) :]


def test_the_same_generator_gives_the_same_responses_and_torchs_own_has_no_say():
    model = tiny.qwen3()
    first = drawn(model)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = drawn(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(drawn(model, seed=1).response[:, :3], first.response[:, :3])


def test_a_generator_goes_on_from_a_saved_state():
    model, one = tiny.qwen3(), generator()
    prompt = left_padded(PROMPTS, tiny.PAD)
    options = {"length": 6, "end": NO_END, "pad": tiny.PAD}
    first = sample(model, *prompt, one, **options)
    saved = one.get_state()
    second = sample(model, *prompt, one, **options)
    resumed = torch.Generator()
    resumed.set_state(saved)
    assert torch.equal(sample(model, *prompt, resumed, **options).response, second.response)
    assert not torch.equal(first.response, second.response)


def test_frequencies_are_the_probabilities_at_the_temperature():
    model = tiny.qwen3(torch.float64)
    count = 4000
    found = drawn(model, prompts=[PROMPTS[0]] * count, length=1, end=NO_END, temperature=0.7)
    expected = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7).softmax(0).detach()
    share = torch.bincount(found.response[:, 0], minlength=len(expected)) / count
    assert (share - expected).abs().max() < 4 * (expected.max() / count).sqrt()
    assert expected.max() > 2 * expected.min()


def test_a_response_ends_with_its_end_token_and_padding_comes_behind():
    ends = [tiny.END, 5, 6, 7, 8, 9, 10, 11]
    found = drawn(tiny.qwen3(), prompts=[[20 + n, 3] for n in range(15)], length=30, end=ends)
    lengths = found.lengths.tolist()
    assert found.response.shape == (15, max(lengths))
    assert min(lengths) < max(lengths)
    for tokens, mask, length in zip(found.response.tolist(), found.response_mask.tolist(), lengths, strict=True):
        assert mask == [True] * length + [False] * (max(lengths) - length)
        assert tokens[length:] == [tiny.PAD] * (max(lengths) - length)
        assert not set(tokens[: length - 1]) & set(ends)
        assert length == 30 or tokens[length - 1] in ends


def test_an_end_token_that_is_also_the_padding_counts_once():
    found = drawn(tiny.qwen3(), prompts=[[20 + n, 3] for n in range(15)], length=30, end=list(range(12)), pad=5)
    for tokens, length in zip(found.response.tolist(), found.lengths.tolist(), strict=True):
        assert sum(token < 12 for token in tokens[:length]) == (length < 30 or tokens[-1] < 12)


def test_without_an_end_a_response_has_the_length_that_is_allowed():
    assert drawn(tiny.qwen3(), end=NO_END).lengths.tolist() == [12, 12, 12]


def test_the_log_probabilities_of_greedy_tokens_are_the_largest():
    model = tiny.qwen3(torch.float64)
    found = drawn(model, temperature=0, end=NO_END)
    best = response_log_probs(model, found)
    changed = found._replace(response=(found.response + 1) % len(tiny.WORDS))
    assert (best[:, 0] > response_log_probs(model, changed)[:, 0]).all()


def test_parts_of_the_model_are_left_in_their_modes_and_dropout_has_no_say():
    model = tiny.qwen3(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    first, second = drawn(model), drawn(model)
    assert torch.equal(first.response, second.response)
    assert [module.training for module in model.modules()] == modes
    assert not first.response.requires_grad


def test_a_model_with_gradient_checkpointing_samples_the_same():
    model = tiny.qwen3().train()
    expected = drawn(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.equal(drawn(model).response, expected.response)


def test_a_sequence_over_the_context_is_refused():
    with pytest.raises(
        UserError, match="prompt of 4 tokens and a response of up to 61 are more than the model's context of 64"
    ):
        drawn(tiny.qwen3(), length=61)
    assert drawn(tiny.qwen3(), length=60).response.shape[1] <= 60


@pytest.mark.parametrize("changes", [{"length": 0}, {"temperature": -1.0}])
def test_settings_without_meaning_are_refused(changes):
    with pytest.raises(UserError, match="length of at least 1 and a temperature of at least 0"):
        drawn(tiny.qwen3(), **changes)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = {
    "qwen3": tiny.qwen3,
    "llama": tiny.llama,
    "two heads for a key": lambda *args: tiny.qwen3(*args, num_attention_heads=4, num_key_value_heads=2),
}


def fixed(model, _, most):
    return decoding.FixedDecoder(model, most, captured=False)


def grown(model, *_):
    return decoding.GrowingDecoder(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 3, 20])
@pytest.mark.parametrize("prompts", [PROMPTS, [[5], [6]]], ids=["several tokens", "one token"])
def test_a_cache_of_fixed_size_samples_the_same_as_one_that_grows(family, length, prompts):
    model = FAMILIES[family](torch.float64)
    ends = drawn(model, prompts=prompts, end=NO_END, length=20).response[:, 3].tolist()
    for end in (NO_END, ends):
        found, expected = (drawn(model, prompts=prompts, end=end, length=length, decoder=kind) for kind in (fixed, grown))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert length < 4 or expected.lengths.max() < length


def test_every_step_attends_by_ours(monkeypatch):
    calls, ours = [], decoding._attend
    monkeypatch.setattr(decoding, "_attend", lambda *args, **options: calls.append(1) or ours(*args, **options))
    model = tiny.qwen3()
    drawn(model, end=NO_END, length=9, decoder=fixed)
    assert len(calls) == 8 * model.config.num_hidden_layers  # the first token comes from the prompts
    assert model.config._attn_implementation == "sdpa"


def test_one_query_attends_as_in_transformers():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = tiny.qwen3(num_attention_heads=4, num_key_value_heads=2).model.layers[0].self_attn
    query, key, value = (torch.randn(3, heads, places, 8) for heads, places in ((4, 1), (2, 6), (2, 6)))
    mask = torch.rand(3, 1, 1, 6) < 0.6
    mask[..., 0] = True
    found, expected = (
        attend(module, query, key, value, mask, scaling=0.3)[0] for attend in (decoding._attend, sdpa_attention_forward)
    )
    torch.testing.assert_close(found, expected)


def test_no_token_of_a_prompt_sees_nothing_or_what_comes_later():
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    found = decoding._prompt_mask(mask, 6)
    assert found.shape == (2, 1, 4, 6)
    assert found.any(-1).all()
    assert found[0, 0].int().tolist() == [[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]
    assert found[1, 0].int().tolist() == [[1] * n + [0] * (6 - n) for n in (1, 2, 3, 4)]


def with_torchs_attention(config):
    config._attn_implementation = "sdpa"
    return SimpleNamespace(config=config)


def test_only_families_that_are_known_and_see_everything_have_a_cache_of_fixed_size():
    import transformers

    gpu, model = torch.device("cuda"), tiny.qwen3()
    assert decoding._can_capture(model, gpu)
    assert decoding._can_capture(tiny.llama(), gpu)
    assert decoding._can_capture(with_torchs_attention(transformers.Qwen2Config()), gpu)
    assert not decoding._can_capture(model, torch.device("cpu"))
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not decoding._can_capture(model, gpu)
    assert not decoding._can_capture(tiny.qwen3(attn_implementation="eager"), gpu)
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert not decoding._can_capture(with_torchs_attention(transformers.LlamaConfig(rope_parameters=rotation)), gpu)
    for name in ("Mistral", "Gemma3", "Falcon", "Bart"):
        config = getattr(transformers, f"{name}Config")()
        assert not decoding._can_capture(with_torchs_attention(config), gpu), name


@needs_gpu
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_sample_the_same(family, amp, monkeypatch):
    """Where torch is told to be deterministic, after weights have changed, and in bfloat16 until two tokens are as likely."""
    graphs, capture = [], decoding.FixedDecoder._capture
    monkeypatch.setattr(decoding.FixedDecoder, "_capture", lambda *args: graphs.append(capture(*args)) or graphs[-1])
    model = FAMILIES[family]().cuda()
    prompts = [[20 + n, *range(3, 3 + n % 5)] for n in range(12)]

    def found(**decoder):
        tokens, mask = (each.cuda() for each in left_padded(prompts, tiny.PAD))
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            return sample(model, tokens, mask, generator(), length=24, end=[tiny.END], pad=tiny.PAD, **decoder).response

    def check():
        captured, again, expected = found(), found(), found(decoder=grown)
        assert torch.equal(captured, again)
        length = min(captured.shape[1], expected.shape[1])
        assert (captured[:, :length] == expected[:, :length]).float().mean() > (0.7 if amp else 0.999)
        return captured

    torch.use_deterministic_algorithms(True)
    try:
        first = check()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        second = check()
        prompts = [[20 + n] for n in range(12)]
        check()
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.shape != second.shape or not torch.equal(first, second)
    assert len(graphs) == 6
    assert None not in graphs


@needs_gpu
def test_a_step_that_cannot_be_captured_is_computed(monkeypatch):
    model = tiny.qwen3().cuda()
    tokens, mask = (each.cuda() for each in left_padded(PROMPTS, tiny.PAD))
    options = {"length": 12, "end": NO_END, "pad": tiny.PAD}
    expected = sample(model, tokens, mask, generator(), **options)
    attend = decoding._attend

    def waits(*args, **others):
        args[1].sum().item()
        return attend(*args, **others)

    monkeypatch.setattr(decoding, "_attend", waits)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        found = sample(model, tokens, mask, generator(), **options)
    assert torch.equal(found.response, expected.response)
    assert torch.cuda.current_stream() == stream
