"""The logits of the next token, step by step, with a key-value cache: one that grows, or one that stays where it is.

The host of a small model takes ten times as long to launch a step as a GPU to compute it. There, the cache has its final size
from the beginning, and a step, always the same then, is captured as a CUDA graph and replayed.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moonopt.errors import one_sentence

#: Tokens, a mask of all that were seen with them, their positions, and the logits (n, vocabulary) behind the last of them.
NextLogits = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Families, by ``config.model_type``, whose layers take positions, a mask and a cache as they are given. Others may count
#: positions themselves, add to the mask, or ask more of a cache, and would sample something else without a word.
FAMILIES = ("llama", "qwen2", "qwen3")
#: Rotary positions that look at values in Python.
DYNAMIC_ROTATIONS = ("dynamic", "longrope")
#: What a layer must be that sees all tokens.
WHOLE = "full_attention"
#: Torch's attention, and ours of one query, by the names that transformers gives them.
ATTENTION, ONE_QUERY = "sdpa", "moonopt_one_query"
#: The size of a cache is a multiple of it, so that masks are aligned for the attention's kernels.
UNIT = 16


def decoder_for(model: Any, device: torch.device, most: int) -> NextLogits:
    """For one batch of prompts that will have at most so many tokens with their responses."""
    return FixedDecoder(model, most, captured=True) if _can_capture(model, device) else GrowingDecoder(model)


def _can_capture(model: Any, device: torch.device) -> bool:
    config = model.config
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return (
        device.type == "cuda"
        and config.model_type in FAMILIES
        and getattr(config, "_attn_implementation", None) == ATTENTION
        and getattr(config, "sliding_window", None) is None
        and all(kind == WHOLE for kind in getattr(config, "layer_types", None) or ())
        and rotation.get("rope_type") not in DYNAMIC_ROTATIONS
    )


class _Network:
    """Logits are in float32, as those of the loss."""

    def __init__(self, model: Any) -> None:
        self._base, head = model.base_model, model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        self._wide = torch.promote_types(head.weight.dtype, torch.float32)
        self._weight, self._bias = head.weight.to(self._wide), None if bias is None else bias.to(self._wide)

    def __call__(self, tokens: Tensor, mask: Tensor, places: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The logits, and the cache as it is then."""
        found = self._base(input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(found.last_hidden_state[:, -1].to(self._wide), self._weight, self._bias)
        return logits, found.past_key_values


class GrowingDecoder:
    """With the cache of transformers, on any device."""

    def __init__(self, model: Any) -> None:
        self._network, self._cache = _Network(model), None

    def __call__(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        logits, self._cache = self._network(tokens, mask.long(), places, self._cache)
        return logits


class FixedDecoder:
    """With a cache of fixed size; ``captured`` on a GPU: the second step after the prompts becomes a CUDA graph.

    The first one is computed as it is, so that in the capture nothing happens for the first time. The graph reads what autocast
    keeps of the weights: all calls must be within one context of it.
    """

    def __init__(self, model: Any, most: int, captured: bool) -> None:
        self._network, self._config, self._captured = _Network(model), model.config, captured
        self._cache = FixedCache(-(-most // UNIT) * UNIT)
        self._given: tuple[Tensor, Tensor, Tensor] | None = None  # tokens, positions and mask of a step, which stay in place
        self._graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None  # and its logits

    def __call__(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        seen = mask.shape[1]
        if not self._cache.layers:
            return self._network(tokens, _prompt_mask(mask, self._cache.size), places, self._cache)[0]
        if self._given is None:
            whole = functional.pad(mask, (0, self._cache.size - seen))[:, None, None]
            self._given = tokens.clone(), places.clone(), whole
            self._cache.begin_steps(seen - 1, tokens.device)
            return self._step(*self._given)
        kept_tokens, kept_places, kept_mask = self._given
        kept_tokens.copy_(tokens)
        kept_places.copy_(places)
        kept_mask[:, 0, 0, seen - 1] = mask[:, -1]
        self._cache.advance()
        if self._captured and self._graph is None:
            self._graph = self._capture(*self._given)
        if self._graph is None:
            return self._step(*self._given)
        graph, logits = self._graph
        graph.replay()
        return logits

    def _step(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        with _one_query(self._config), _unsorted():
            return self._network(tokens, mask, places, self._cache)[0]

    def _capture(self, *given: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A step that cannot be captured is computed as it is from then on."""
        device = given[0].device
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            # Torch would not come back to the stream of here from a capture that fails.
            with torch.cuda.stream(here), torch.cuda.graph(graph, None, stream, capture_error_mode="thread_local"):
                logits = self._step(*given)
        except RuntimeError as error:
            warnings.warn(f"Sampling goes on without a CUDA graph. {one_sentence(error)}", stacklevel=2)
            self._captured = False
            return None
        return graph, logits


class FixedCache:
    """Keys and values by layer, (n, heads, size, width), as the attention of transformers asks for them.

    At first they are written from the beginning on, then one place at a time. What was not written yet is zero, and must be
    masked.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._place: Tensor | None = None  # of a step

    def begin_steps(self, place: int, device: torch.device) -> None:
        self._place = torch.tensor([place], device=device)

    def advance(self) -> None:
        """To the place of the next step."""
        self._place.add_(1)  # type: ignore[union-attr]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.layers:  # under autocast keys may be wider, and the attention would make them narrow again
            self.layers[layer_idx] = tuple(  # type: ignore[assignment]
                values.new_zeros(*each.shape[:2], self.size, each.shape[3]) for each in (keys, values)
            )
        kept = self.layers[layer_idx]
        for whole, new in zip(kept, (keys, values), strict=True):
            if self._place is None:
                whole[:, :, : new.shape[2]] = new
            else:
                whole.index_copy_(2, self._place, new.to(whole.dtype))
        return kept

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Some versions of transformers ask, and then take the positions that they are given."""
        return 0


def _prompt_mask(mask: Tensor, size: int) -> Tensor:
    """What the tokens of prompts see, (n, 1, p, size): those before that are no padding, and themselves, lest any sees none."""
    count = mask.shape[1]
    before = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
    itself = torch.eye(count, dtype=torch.bool, device=mask.device)
    return functional.pad((before & mask[:, None, :]) | itself, (0, size - count))[:, None]


@contextlib.contextmanager
def _unsorted() -> Iterator[None]:
    """Without deterministic algorithms, which sort indices on the device: one index has an order anyway."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


@contextlib.contextmanager
def _one_query(config: Any) -> Iterator[None]:
    """Where there is one query, heads that share keys are taken together, and no key is copied for them."""
    from transformers import AttentionInterface

    AttentionInterface.register(ONE_QUERY, _attend)
    before, config._attn_implementation = config._attn_implementation, ONE_QUERY
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    _: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Of one query (n, heads, 1, width) and keys (n, key heads, size, width): (n, 1, heads, width), as transformers wants."""
    count, heads, _one, width = query.shape
    grouped = query.view(count, key.shape[1], heads // key.shape[1], width)
    found = functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return found.reshape(count, 1, heads, -1), None
