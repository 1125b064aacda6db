"""SegNet with a multi-task attention network (Liu, Johns and Davison, 2019), the model of NYU-v2 and CityScapes.

A SegNet without any task in it, and for every task masks that choose among its features, stage by stage. All operations
are deterministic on every device and have forward-mode derivatives: pooling that is undone later keeps masks in place of
indices, and the bilinear growth of a picture is two products with small matrices. Features lie in memory with the channels
last, as the convolutions of GPUs and CPUs want them.
"""

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.bench.models.layout import channels_last
from moonopt.errors import UserError

#: The width of every stage, in base widths, and how many convolutions it has.
WIDTHS = (1, 2, 4, 8, 8)
CONVOLUTIONS = (2, 2, 3, 3, 3)
#: Height and width of the images must be multiples of it: every stage halves them.
STRIDE = 2 ** len(WIDTHS)


class SegNetMTAN(nn.Module):
    """Five stages down, five up, one attention branch and one head per task.

    With ``width=64`` it has 44,229,073 parameters for the three tasks of NYU-v2 and 41,206,984 for the two of CityScapes.

    Args:
        outputs: how many channels each task has.
        width: of the first stage; the others have 2, 4, 8 and 8 times as many channels.
        channels: of the images.

    >>> model = SegNetMTAN({"segmentation": 13, "depth": 1}, width=2)
    >>> {task: tuple(output.shape) for task, output in model(torch.zeros(2, 3, 32, 64)).items()}
    {'segmentation': (2, 13, 32, 64), 'depth': (2, 1, 32, 64)}

    """

    def __init__(self, outputs: Mapping[str, int], *, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        if width < 1:
            raise UserError(f"model.width must be at least 1, found {width}.")
        wide = [factor * width for factor in WIDTHS]
        narrow = [width, *wide[:-1]]  # what a stage of the decoder leaves
        before = [channels, *wide[:-1]]
        after = [*wide[1:], wide[-1]]
        self.encoder = nn.ModuleList(map(Stage, before, wide, CONVOLUTIONS))
        self.decoder = nn.ModuleList(map(Stage, wide, narrow, CONVOLUTIONS))
        # Between the stages of a branch; one set for the branches of all tasks.
        self.encoder_transitions = nn.ModuleList(map(_convolution, wide, after))
        self.decoder_transitions = nn.ModuleList(map(_convolution, wide, narrow))
        looked_at = [width, *(2 * each for each in wide[1:])]
        self.encoder_attention = nn.ModuleDict({task: nn.ModuleList(map(_attention, looked_at, wide)) for task in outputs})
        looked_at = [a + b for a, b in zip(wide, narrow, strict=True)]
        self.decoder_attention = nn.ModuleDict({task: nn.ModuleList(map(_attention, looked_at, narrow)) for task in outputs})
        self.heads = nn.ModuleDict({task: _head(width, size) for task, size in outputs.items()})
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(cast(Tensor, module.bias))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """What every task makes of images (batch, channels, height, width), of their size and before any softmax."""
        check_size(images.shape[2], images.shape[3])
        features = channels_last(images)
        down: list[tuple[Tensor, Tensor]] = []  # of every stage, features after the first and after the last convolution
        places: list[Tensor] = []  # where the largest were
        for stage in self.encoder:
            down.append(stage(features))
            features, place = pool(down[-1][1])
            places.append(place)
        up: list[tuple[Tensor, Tensor]] = []  # of every stage, from the last one on, what goes in and what comes out
        for stage, place in zip(reversed(self.decoder), reversed(places), strict=True):
            spread = unpool(features, place)
            _, features = stage(spread)
            up.append((spread, features))
        branches = self._decoded(self._encoded(down), up)
        return {task: self.heads[task](branch) for task, branch in branches.items()}

    def _encoded(self, down: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """The branch of every task after the last pooling."""
        branches: dict[str, Tensor] = {}
        for number, (first, last) in enumerate(down):
            transition = self.encoder_transitions[number]
            for task, attention in self.encoder_attention.items():
                seen = torch.cat([first, branches[task]], 1) if task in branches else first
                branches[task] = functional.max_pool2d(transition(_at(attention, number)(seen) * last), 2)
        return branches

    def _decoded(self, branches: dict[str, Tensor], up: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """The branch of every task in the size of the images."""
        for number, (spread, features) in zip(reversed(range(len(WIDTHS))), up, strict=True):
            transition = self.decoder_transitions[number]
            rows, columns = (growth(size // 2, spread) for size in spread.shape[2:])
            for task, attention in self.decoder_attention.items():
                grown = transition(resized(branches[task], rows, columns))
                branches[task] = _at(attention, number)(torch.cat([spread, grown], 1)) * features
        return branches


class Stage(nn.Module):
    """Some convolutions, of which the first changes the width."""

    def __init__(self, inputs: int, outputs: int, convolutions: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs)
        self.rest = nn.Sequential(*(_convolution(outputs, outputs) for _ in range(convolutions - 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features after the first and after the last convolution."""
        first = self.first(x)
        return first, self.rest(first)


def check_size(height: int, width: int) -> None:
    """Raise ``UserError`` where the stages do not divide a size of images."""
    if height % STRIDE or width % STRIDE or 0 in (height, width):
        raise UserError(
            f"SegNet halves its images {len(WIDTHS)} times: their height and width must be multiples of {STRIDE}, found "
            f"{height} x {width}. Crop or resize them."
        )


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every 2 x 2 pixels, and of which it was, the first of equal ones: a mask (batch, h, 2, w, 2, channels).

    >>> largest, chosen = pool(torch.tensor([[1.0, 3.0], [2.0, 3.0]]).view(1, 1, 2, 2))
    >>> largest.item(), chosen.view(2, 2).tolist()
    (3.0, [[False, True], [False, False]])
    """
    batch, channels, height, width = x.shape
    windows = x.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, channels)
    order = torch.arange(4, 0, -1, dtype=torch.uint8, device=x.device).view(2, 1, 2, 1)
    values = windows.detach()
    candidates = (values == values.amax((2, 4), keepdim=True)) * order
    chosen = candidates == candidates.amax((2, 4), keepdim=True)
    return torch.where(chosen, windows, 0).sum((2, 4)).permute(0, 3, 1, 2), chosen


def unpool(x: Tensor, chosen: Tensor) -> Tensor:
    """The other way round: every pixel where the largest was, zeros around it."""
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None]
    return torch.where(chosen, pixels, 0).flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


def resized(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A picture of another height and width, by matrices (new, old) for each of them."""
    batch, channels, _, width = x.shape
    high = rows @ x.permute(0, 2, 3, 1).flatten(2)
    wide = columns @ high.view(batch * len(rows), width, channels)
    return wide.view(batch, len(rows), len(columns), channels).permute(0, 3, 1, 2)


def growth(size: int, like: Tensor) -> Tensor:
    """The matrix (2 size, size) that doubles an axis by linear interpolation, the first and the last pixel staying the ends.

    >>> growth(2, torch.zeros(0))
    tensor([[1.0000, 0.0000],
            [0.6667, 0.3333],
            [0.3333, 0.6667],
            [0.0000, 1.0000]])
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    old = torch.arange(size, dtype=dtype, device=like.device)
    new = torch.arange(2 * size, dtype=dtype, device=like.device) * ((size - 1) / (2 * size - 1))
    return (1 - (new.unsqueeze(1) - old).abs()).clamp(min=0).to(like.dtype)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def _attention(inputs: int, outputs: int) -> nn.Sequential:
    """A mask between 0 and 1 for every channel and pixel."""
    first = (nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 1), nn.BatchNorm2d(outputs), nn.Sigmoid())


def _head(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, outputs, 1))


def _at(modules: nn.Module, number: int) -> nn.Module:
    return cast(nn.ModuleList, modules)[number]
