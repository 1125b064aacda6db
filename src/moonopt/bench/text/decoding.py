"""The logits of the next token, step by step, with a key-value cache: one that grows, or one that stays where it is.

The host of a small model takes ten times as long to launch a step as a GPU to compute it. There, the cache has its final size
from the beginning, and a step, always the same then, is captured as a CUDA graph and replayed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Tokens, a mask of all that were seen with them, their positions, and the logits (n, vocabulary) behind the last of them.
NextLogits = Callable[[Tensor, Tensor, Tensor], Tensor]

#: The kinds of layers and of attention that a mask of our own is good for, and our name for the latter with one query.
LAYER, ATTENTION, ONE_QUERY = "full_attention", "sdpa", "moonopt_one_query"
#: What some models add to their attention.
ADDITIONS = ("softcap", "s_aux", "position_bias")
#: The size of a cache is a multiple of it, so that masks are aligned for the attention's kernels.
UNIT = 16


def decoder_for(model: Any, device: torch.device, most: int) -> NextLogits:
    """For one batch of prompts that will have at most so many tokens with their responses."""
    return FixedDecoder(model, most, captured=True) if _can_capture(model, device) else GrowingDecoder(model)


def _can_capture(model: Any, device: torch.device) -> bool:
    config = model.config
    kinds = getattr(config, "layer_types", None) or [LAYER]
    attention = getattr(config, "_attn_implementation", None)
    return device.type == "cuda" and attention == ATTENTION and all(kind == LAYER for kind in kinds)


class _Head:
    """Logits are in float32, as those of the loss."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        self._wide = torch.promote_types(head.weight.dtype, torch.float32)
        self._weight, self._bias = head.weight.to(self._wide), None if bias is None else bias.to(self._wide)

    def __call__(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return functional.linear(states[:, -1].to(self._wide), self._weight, self._bias)


class GrowingDecoder:
    """With the cache of transformers, on any device and for any model."""

    def __init__(self, model: Any) -> None:
        self._model, self._head = model, _Head(model)
        self._cache: Any = None

    def __call__(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        found = self._model.base_model(
            input_ids=tokens, attention_mask=mask.long(), position_ids=places, past_key_values=self._cache, use_cache=True
        )
        self._cache = found.past_key_values
        return self._head(found.last_hidden_state)


class FixedDecoder:
    """With a cache of fixed size; ``captured`` on a GPU: the second step after the prompts becomes a CUDA graph.

    The first one is computed as it is, so that in the capture nothing happens for the first time.
    """

    def __init__(self, model: Any, most: int, captured: bool) -> None:
        self._model, self._head, self._captured = model, _Head(model), captured
        self._cache = FixedCache(-(-most // UNIT) * UNIT)
        self._given: tuple[Tensor, ...] = ()  # tokens, positions and mask of a step, in place
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def __call__(self, tokens: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        seen = mask.shape[1]
        if tokens.shape[1] > 1 or not self._cache.layers:
            return self._compute(tokens, places, _prompt_mask(mask, self._cache.size))
        if not self._given:
            whole = functional.pad(mask, (0, self._cache.size - seen))[:, None, None]
            self._given = tokens.clone(), places.clone(), whole
            self._cache.begin_steps(seen - 1, tokens.device)
            return self._step()
        for kept, now in zip(self._given, (tokens, places), strict=False):
            kept.copy_(now)
        self._given[2][:, 0, 0, seen - 1] = mask[:, -1]
        self._cache.advance()
        if not self._captured:
            return self._step()
        if self._graph is None:
            self._capture()
        self._graph.replay()  # type: ignore[union-attr]
        return self._logits  # type: ignore[return-value]

    def _step(self) -> Tensor:
        with _one_query(self._model.config):
            return self._compute(*self._given)

    def _compute(self, tokens: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        found = self._model.base_model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=self._cache, use_cache=True
        )
        return self._head(found.last_hidden_state)

    def _capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = self._step()


class FixedCache:
    """Keys and values by layer, (n, heads, size, width), as the attention of transformers asks for them.

    At first they are written from the beginning on, then one place at a time. What was not written yet is zero, and must be
    masked.
    """

    is_compileable = False  # nothing is to be compiled by transformers

    def __init__(self, size: int) -> None:
        self.size = size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._place: Tensor | None = None  # of a step

    def begin_steps(self, place: int, device: torch.device) -> None:
        self._place = torch.tensor([place], device=device)

    def advance(self) -> None:
        if self._place is not None:
            self._place.add_(1)

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
                with _unsorted():
                    whole.index_copy_(2, self._place, new.to(whole.dtype))
        return kept

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Asked for by models that make positions and masks themselves, which are given here."""
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
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


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
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Of one query (n, heads, 1, width) and keys (n, key heads, size, width): (n, 1, heads, width), as transformers wants."""
    if any(others.get(name) is not None for name in ADDITIONS):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: Any = sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **others)  # type: ignore[no-any-return]
    count, heads, _, width = query.shape
    grouped = query.view(count, key.shape[1], heads // key.shape[1], width)
    found = functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return found.reshape(count, 1, heads, -1), None
