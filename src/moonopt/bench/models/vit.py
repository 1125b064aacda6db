"""A small vision transformer (Dosovitskiy et al., 2020) with one head per task.

Ours, so that its matrices are those that the paper counts: attention projections and MLP layers. Patch embedding, positions,
norms and heads are vectors to MOON (``moonopt.route_parameters``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.bench.models import heads


class ViT(nn.Module):
    """Patches, learned positions, pre-norm blocks, the mean over patches, one head per task.

    Args:
        outputs: how many each task has.
        image_size: of the square images, in pixels; a multiple of ``patch_size``.
        patch_size: of the square patches, in pixels.
        channels: of the images.
        width: of the embedding; a multiple of ``attention_heads``.
        depth: number of blocks.
        attention_heads: of every block.
        mlp_ratio: hidden width of a block's MLP over ``width``.
        head_width: hidden width of every head; 0 for linear heads.

    >>> model = ViT({"left": 10, "right": 10}, image_size=12, patch_size=4, width=16, depth=1)
    >>> {task: tuple(logits.shape) for task, logits in model(torch.zeros(5, 1, 12, 12)).items()}
    {'left': (5, 10), 'right': (5, 10)}

    """

    def __init__(
        self,
        outputs: Mapping[str, int],
        *,
        image_size: int,
        patch_size: int,
        channels: int = 1,
        width: int = 64,
        depth: int = 4,
        attention_heads: int = 4,
        mlp_ratio: float = 2.0,
        head_width: int = 0,
    ) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise ValueError(f"patch_size must divide image_size = {image_size}, found {patch_size}.")
        self.patch_embedding = nn.Conv2d(channels, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, attention_heads, mlp_ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict({task: _head(width, head_width, size) for task, size in outputs.items()})
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs of every task for images (batch, channels, size, size)."""
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        features = self.norm(self.blocks(patches + self.positions)).mean(1)
        return heads.predictions(features, self.heads)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, attention_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        hidden = round(mlp_ratio * width)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, attention_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention over all patches."""

    def __init__(self, width: int, attention_heads: int) -> None:
        super().__init__()
        if attention_heads < 1 or width % attention_heads:
            raise ValueError(f"attention_heads must divide width = {width}, found {attention_heads}.")
        self.attention_heads = attention_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.attention_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _head(width: int, hidden: int, outputs: int) -> nn.Module:
    if hidden == 0:
        return nn.Linear(width, outputs)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, outputs))
