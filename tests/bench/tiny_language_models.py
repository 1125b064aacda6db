"""Language models that are small enough for tests: random weights, a handful of tokens."""

import torch

PAD, END = 0, 1
WORDS = ["<pad>", "<end>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789"]


SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
    "initializer_range": 0.3,
}


def qwen3(dtype=torch.float32, seed=0, **changes):
    """A random Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes)).to(dtype)


def llama(dtype=torch.float32, seed=0, **changes):
    """A random Llama of two layers, the family of SmolLM2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).to(dtype)


def tokenizer(**special):
    """One token for each letter and digit; spaces are between tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)
