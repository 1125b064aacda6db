"""Made-up scenes for the eye: one under the other what was seen, the classes, the depths and the normals of each."""

from pathlib import Path

import torch
from torch import Tensor

from moonopt.bench.data.celeba_images import require_pillow
from moonopt.bench.data.scenes import SPLITS, Layout
from moonopt.bench.data.scenes_made_up import numbered_scene

GAP = 4  # pixels between pictures
#: Red, green and blue of the classes; what has none is black.
PALETTE = (
    *((230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240)),
    *((240, 50, 230), (210, 245, 60), (250, 190, 212), (0, 128, 128), (170, 110, 40), (220, 190, 255)),
)


def sheet(path: Path, layout: Layout, size: tuple[int, int], count: int = 6, seed: int = 0) -> None:
    """Write the first training scenes that ``make_scenes`` makes as one image, a column for each."""
    require_pillow()
    from PIL import Image

    columns = [_column(numbered_scene(layout, seed, SPLITS[0], number, size)) for number in range(count)]
    pixels = torch.cat(columns, 1).mul(255).round().to(torch.uint8).contiguous()
    Image.frombytes("RGB", (pixels.shape[1], pixels.shape[0]), pixels.numpy().tobytes()).save(path)


def _column(scene: dict[str, Tensor]) -> Tensor:
    """The pictures of a scene, colours from 0 to 1 in (height, width, 3), each with a white edge at the right and below."""
    pictures = [scene["image"], _classes(scene["label"]), _shades(scene["depth"])]
    if "normal" in scene:
        known = scene["normal"].any(2, keepdim=True)
        pictures.append((scene["normal"] + 1) / 2 * known)
    return torch.cat([torch.nn.functional.pad(picture, (0, 0, 0, GAP, 0, GAP), value=1.0) for picture in pictures])


def _classes(label: Tensor) -> Tensor:
    colours = torch.tensor([(0, 0, 0), *PALETTE]) / 255
    return colours[label.long() + 1]


def _shades(depth: Tensor) -> Tensor:
    """Grey by rank, so that neither one thing nearby nor the distance takes all shades; unknown is black."""
    known = depth > 0
    ordered = depth[known].sort().values
    ranks = torch.searchsorted(ordered, depth.contiguous()) / max(len(ordered), 1)
    return ((0.15 + 0.85 * ranks) * known).expand(-1, -1, 3)
