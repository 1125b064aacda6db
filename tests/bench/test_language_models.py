"""Loading language models from folders, and what is said of folders that hold none."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import tiny_language_models as tiny
import torch

from moonopt.bench.text.models import check_head, checkpoint_layers, convert, load, missing
from moonopt.errors import UserError

SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>"}


@pytest.fixture
def folder(tmp_path):
    """Saves a tiny Qwen3 with its tokenizer."""
    pytest.importorskip("transformers")

    def save(name="model", model=None, **special):
        place = tmp_path / name
        (tiny.qwen3() if model is None else model).save_pretrained(place)
        tiny.tokenizer(**special).save_pretrained(place)
        return place

    return save


def test_a_folder_gives_the_model_its_tokenizer_and_its_ends(folder):
    place = folder(**SPECIAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = load(place)
    assert (found.end, found.pad) == ((tiny.END,), tiny.PAD)
    assert found.tokenizer("ab1")["input_ids"] == [2, 3, 29]
    for one, other in zip(found.model.parameters(), tiny.qwen3().parameters(), strict=True):
        assert torch.equal(one, other)
    assert next(load(place, torch.bfloat16).model.parameters()).dtype == torch.bfloat16


def test_ends_of_the_model_count_beside_that_of_the_tokenizer(folder):
    model = tiny.qwen3()
    model.generation_config.eos_token_id = [7, tiny.END]
    assert load(folder(model=model, **SPECIAL)).end == (tiny.END, 7)


def test_a_tokenizer_without_padding_takes_its_end_and_says_so(folder):
    place = folder(eos_token="<end>")
    with pytest.warns(UserWarning, match="has no padding token: its end token 1 fills up"):
        found = load(place)
    assert found.pad == tiny.END


def test_a_tokenizer_without_an_end_is_refused(folder):
    model = tiny.qwen3(eos_token_id=None)
    with pytest.raises(UserError, match="has no end token"):
        load(folder(model=model, pad_token="<pad>"))


def test_a_folder_without_weights_is_refused(folder):
    place = folder(**SPECIAL)
    (place / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights: expected model\*\.safetensors"):
        load(place)
    (place / "adapter_model.safetensors").write_bytes(b"")
    assert "has no weights" in missing(place)


def test_weights_that_are_missing_or_of_another_size_are_named(folder):
    place = folder(**SPECIAL)
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "model.safetensors")
    lost = [name for name in weights if name.startswith("model.layers.1.")]
    kept = {name: each for name, each in weights.items() if name not in lost}
    save_file(kept, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"not all there: model\.layers\.1\..* and {len(lost) - 3} more\."):
        load(place)
    save_file(kept | {name: torch.zeros(3, 3) for name in lost}, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="cannot be loaded as a causal language model"):
        load(place)


def test_what_the_template_for_chats_writes_behind_an_answer_ends_it(folder):
    place = folder(**SPECIAL, additional_special_tokens=["z"])
    tokenizer = load(place).tokenizer
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}z\n{% endfor %}"
    tokenizer.save_pretrained(place)
    assert load(place).end == (tiny.END, *tokenizer("z")["input_ids"])
    for other in ("{{ 'z' }}{{ messages[0]['content'] }}", "{{ raise_exception('no answers') }}"):
        tokenizer.chat_template = other
        tokenizer.save_pretrained(place)
        assert load(place).end == (tiny.END,)


def test_damaged_weights_are_told_in_one_sentence(folder):
    place = folder(**SPECIAL)
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be loaded as a causal language model") as raised:
        load(place)
    assert "\n" not in str(raised.value)


def test_what_is_no_folder_and_no_gguf_file_is_refused(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match="There is no"):
        load(tmp_path / "nowhere")
    (tmp_path / "weights.txt").write_text("")
    with pytest.raises(UserError, match="is no GGUF file"):
        load(tmp_path / "weights.txt")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"damaged\.gguf cannot be loaded"):
        load(tmp_path / "damaged.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"several GGUF files, name one: damaged\.gguf, other\.gguf"):
        load(tmp_path)


def test_without_transformers_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"moonopt\[llm\]"):
        load(tmp_path)


def test_a_model_that_changes_its_logits_is_refused():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.CohereConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.5
    )
    check_head(tiny.qwen3())
    with pytest.raises(UserError, match="does more to its logits than its output embeddings do"):
        check_head(transformers.CohereForCausalLM(config))


def test_a_converted_model_is_the_same_but_for_its_digits(folder, tmp_path):
    place = folder(**SPECIAL)
    convert(place, tmp_path / "converted")
    found, expected = load(tmp_path / "converted", torch.bfloat16), load(place, torch.bfloat16)
    assert found[2:] == expected[2:]
    assert found.tokenizer("ab1")["input_ids"] == [2, 3, 29]
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_layers_are_checkpointed_in_eval_mode():
    pytest.importorskip("transformers")
    model = tiny.qwen3().eval()
    checkpoint_layers(model)
    assert all(layer.training and not layer.mlp.training for layer in model.model.layers)
    model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


def test_what_is_missing_of_a_model_is_a_sentence(folder, tmp_path):
    assert missing(folder(**SPECIAL)) is None
    assert missing(tmp_path / "nowhere").startswith("There is no")


def gguf_of_smollm2():
    """The file, where there is one."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    found = next(Path(os.environ.get("MOONOPT_DATA", "nowhere")).glob("smollm2/*.gguf"), None)
    if found is None:
        pytest.skip("needs a GGUF file of SmolLM2-135M-Instruct in $MOONOPT_DATA/smollm2")
    return found


@pytest.mark.slow
def test_smollm2_from_its_gguf_file_has_the_weights_that_gguf_unpacks_and_can_be_converted(tmp_path):
    path = gguf_of_smollm2()
    import gguf

    found = load(path)
    packed = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.3.ffn_up.weight")
    expected = torch.tensor(gguf.dequantize(packed.data, packed.tensor_type))
    assert torch.equal(found.model.model.layers[3].mlp.up_proj.weight, expected)
    convert(path, tmp_path)
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 300_000_000
    converted = load(tmp_path)
    for one, other in zip(converted.model.parameters(), found.model.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16().float())


@pytest.mark.slow
def test_smollm2_from_its_gguf_file_knows_the_capital_of_france():
    found = gguf_of_smollm2()
    from moonopt.bench.text.sampling import left_padded, sample

    model, tokenizer, end, pad = load(found)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    prompt = left_padded([tokenizer(text, add_special_tokens=False)["input_ids"]], pad)
    answer = sample(model, *prompt, torch.Generator(), length=20, end=end, pad=pad, temperature=0)
    assert "Paris" in tokenizer.decode(answer.response[0])
