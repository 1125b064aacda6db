"""Language models from the disk: a folder of transformers with a causal model and its tokenizer, or a GGUF file."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moonopt.bench.text.policy import last_hidden
from moonopt.errors import UserError, one_sentence

#: Names of files with weights that transformers reads.
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
#: The largest difference, relative to the largest logit, between a model's logits and those of its output embeddings.
HEAD_TOLERANCE = 1e-2


class LanguageModel(NamedTuple):
    """A causal model with its tokenizer, the tokens that end a response, and the one that fills up."""

    model: Any
    tokenizer: Any
    end: tuple[int, ...]
    pad: int


def load(path: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A model from a folder or a GGUF file (whose weights become ``dtype``), in eval mode. Nothing is ever downloaded."""
    tokenizer = load_tokenizer(path)
    import transformers

    folder, options = _place(path)
    if options and hasattr(transformers, "GgufConfig"):  # weights that stay packed cannot be trained
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _loading(path):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, output_loading_info=True, **options
        )
    model, found = loaded
    _check_whole(found, path)
    check_head(model)
    end, pad = end_and_pad(model, tokenizer, path)
    return LanguageModel(model, tokenizer, end, pad)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer alone."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError("Language models need transformers: pip install 'moonopt[llm]'.") from error
    folder, options = _place(path)
    with _loading(path):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


def missing(path: Path) -> str | None:
    """What of a model is not there, in a sentence."""
    try:
        _place(path)
    except UserError as error:
        return str(error)
    return None


def convert(source: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a model as a folder of transformers, for machines that cannot read GGUF files."""
    found = load(source, dtype)
    found.model.hf_quantizer = None  # it would refuse to have its model saved, though nothing is quantized any more
    found.model.config.__dict__.pop("quantization_config", None)
    found.model.save_pretrained(target)
    found.tokenizer.save_pretrained(target)


def checkpoint_layers(model: Any) -> None:
    """Keep no activations within layers for the backward pass, though the model is in eval mode: a policy has no dropout."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # of this one alone, which is what transformers looks at


def end_and_pad(model: Any, tokenizer: Any, path: Path) -> tuple[tuple[int, ...], int]:
    """The tokens that end a response, by the tokenizer and the model; and the padding, which may be one of them."""
    given = [getattr(part, "eos_token_id", None) for part in (tokenizer, model.config, model.generation_config)]
    given.append(_ends_of_a_turn(tokenizer))
    listed = [each for found in given for each in (found if isinstance(found, list | tuple) else [found])]
    end = tuple(int(each) for each in dict.fromkeys(listed) if each is not None)
    if not end:
        raise UserError(f"The tokenizer in {path} has no end token (eos_token), without which no response ends.")
    if tokenizer.pad_token_id is not None:
        return end, int(tokenizer.pad_token_id)
    warnings.warn(
        f"The tokenizer in {path} has no padding token: its end token {end[0]} fills up, and is masked.", stacklevel=3
    )
    return end, end[0]


def _ends_of_a_turn(tokenizer: Any) -> list[int]:
    """What the template for chats writes behind an answer: base models that have one may name another end."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    answer = "The answer."
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template may refuse what it likes; prompts need that of a question alone
        return []
    _, found, behind = text.rpartition(answer)
    tokens = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
    return [token for token in tokens[:1] if token in tokenizer.all_special_ids]


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise ``UserError`` where logits are not the hidden states times the output embeddings: some are scaled or capped."""
    tokens = torch.arange(min(4, model.config.vocab_size))[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    training = model.training
    model.eval()
    expected = model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
    head = model.get_output_embeddings()
    found = head(last_hidden(model, tokens, mask))
    model.train(training)
    if found.shape != expected.shape or (found - expected).abs().max() > HEAD_TOLERANCE * expected.abs().max():
        raise UserError(
            f"{type(model).__name__} does more to its logits than its output embeddings do; such models are not supported."
        )


def _check_whole(found: Mapping[str, Any], path: Path) -> None:
    """Raise ``UserError`` where transformers has made up weights that the files do not have."""
    absent = sorted(found["missing_keys"])
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise UserError(f"The weights in {path} are not all there: {', '.join(absent[:3])}{more}.")


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Without the bars of transformers; what it raises is one sentence."""
    from transformers.utils import logging as imported

    logging: Any = imported  # untyped in some versions
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # transformers raises of every kind
        raise UserError(f"{path} cannot be loaded as a causal language model: {one_sentence(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()


def _place(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder that transformers is to read, and how."""
    if not path.exists():
        raise UserError(f"There is no {path}: expected a folder with a causal language model, or a GGUF file.")
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is no GGUF file: expected one whose name ends in .gguf, or a folder.")
        return path.parent, {"gguf_file": path.name}
    packed = sorted(path.glob("*.gguf"))
    if any(next(path.glob(pattern), None) for pattern in WEIGHTS):
        return path, {}
    if len(packed) == 1:
        return path, {"gguf_file": packed[0].name}
    if packed:
        raise UserError(f"{path} has several GGUF files, name one: {', '.join(each.name for each in packed)}.")
    raise UserError(f"{path} has no weights: expected {', '.join(WEIGHTS)} or *.gguf.")
