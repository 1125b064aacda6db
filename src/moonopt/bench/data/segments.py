"""Made-up digits of seven segments, each shifted and shaded at random: easy to read, in the form of MNIST."""

import torch
from torch import Tensor

SIZE = 28
SHIFT = 3  # pixels, at most, in every direction
#: Rows and columns of the segments.
SEGMENTS = {
    "top": (slice(4, 7), slice(8, 20)),
    "middle": (slice(13, 16), slice(8, 20)),
    "bottom": (slice(22, 25), slice(8, 20)),
    "upper left": (slice(4, 16), slice(8, 11)),
    "upper right": (slice(4, 16), slice(17, 20)),
    "lower left": (slice(13, 25), slice(8, 11)),
    "lower right": (slice(13, 25), slice(17, 20)),
}
#: The segments that each digit lacks.
DARK: tuple[set[str], ...] = (
    {"middle"},
    {"top", "middle", "bottom", "upper left", "lower left"},
    {"upper left", "lower right"},
    {"upper left", "lower left"},
    {"top", "bottom", "lower left"},
    {"upper right", "lower left"},
    {"upper right"},
    {"middle", "bottom", "upper left", "lower left"},
    set(),
    {"lower left"},
)


def digits(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 28, 28) and labels (count), as bytes."""
    glyphs = torch.zeros(len(DARK), SIZE, SIZE)
    for glyph, dark in zip(glyphs, DARK, strict=True):
        for name, place in SEGMENTS.items():
            if name not in dark:
                glyph[place] = 1
    labels = torch.randint(len(DARK), (count,), generator=generator)
    shifts = torch.randint(-SHIFT, SHIFT + 1, (count, 2), generator=generator).tolist()
    images = torch.stack([glyphs[label].roll(shift, (0, 1)) for label, shift in zip(labels, shifts, strict=True)])
    shades = torch.randint(128, 256, images.shape, generator=generator)
    return (images * shades).to(torch.uint8), labels.to(torch.uint8)
