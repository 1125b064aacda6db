"""NYU-v2: classes, depths and normals of the pixels of indoor scenes, told by one SegNet with attention for every task.

The protocol is that of MTAN, CAGrad, Nash-MTL and FAMO. There are no validation data: reported is the mean over the last ten
evaluations on test data. Some of the training scenes can be held out to tune on (``data.valid_scenes``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from moonopt.bench.base import Benchmark, Published, Splits
from moonopt.bench.data import scenes, scenes_made_up
from moonopt.bench.data.made_up import is_marked, mark
from moonopt.bench.data.scenes import Layout
from moonopt.bench.data.scenes_metrics import (
    CONVENTIONS,
    AngleErrors,
    Confusion,
    DepthErrors,
    Tally,
    depth_loss,
    normal_loss,
    segmentation_loss,
)
from moonopt.bench.data.scenes_views import Batch, Scenes
from moonopt.bench.metrics import Metric, delta_m
from moonopt.bench.models.segnet import SegNetMTAN, check_size
from moonopt.bench.paper import NYUV2, NYUV2_METRICS
from moonopt.errors import UserError, unknown_name
from moonopt.methods import by_optimizer

#: About how many pixels go through the model at a time in an evaluation.
PIXELS = 1 << 20
#: Made-up scenes to train on.
MADE_UP = 48
#: 1 where Δm against the published single-task learning is 0, 2 where it is 100 %.
RELATIVE = Metric("relative to STL", higher=False)


SETTINGS: Mapping[str, Any] = {
    "data.augment": True,
    "data.valid_scenes": 0,  # of the training scenes, held out to select and tune on
    "data.metrics": "protocol",  # errors as means over batches; "whole": over all pixels
    "model.width": 64,
    "train.epochs": 200,
    "train.schedule": "step:100:0.5",
    "train.select": "last:10",
}
TUNED = by_optimizer({"optimizer.lr": 1e-4}, {"optimizer.lr": 1e-2, "optimizer.vector_lr": 1e-3})


class SceneBenchmark(Benchmark):
    """Pixels of scenes. A batch has images, labels, depths and, where the layout has them, normals."""

    layout: ClassVar[Layout]
    made_up_size: ClassVar[tuple[int, int]]
    files: ClassVar[str] = "the npy files of MTAN's archive"
    reference: ClassVar[Mapping[str, float]]  # metrics of single-task learning that the headline is relative to
    headline = RELATIVE.name
    evaluation_batch = 64  # a fifth of a GB at the size of the published images
    tuned = TUNED
    tuning = "Not tuned yet: with Adam the protocol's 1e-4, with Muon and MOON 1e-2 for the matrices and 1e-3 for the vectors."

    def load(self, folder: Path, seed: int) -> Splits:
        """The splits of the files, the same for every seed; ``val`` is what published tables test on."""
        tree = self._tree(folder)
        if (absent := self.missing(folder)) is not None:
            raise UserError(absent)
        train, test = (scenes.read(tree, split, self.layout) for split in scenes.SPLITS)
        for found in (train, test):
            check_size(*found.size)
        total, held_out, augment = len(train.image), self.settings["data.valid_scenes"], self.settings["data.augment"]
        if not 0 <= held_out < total:
            raise UserError(
                f"data.valid_scenes must be from 0 to {total - 1}, of {total} scenes to train on; found {held_out}."
            )
        if not held_out:
            return Splits(Scenes(train, augment=augment), test=Scenes(test))
        valid, rest = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tensor_split([held_out])
        return Splits(Scenes(train, rest.sort().values, augment), Scenes(train, valid.sort().values), Scenes(test))

    def model(self) -> nn.Module:
        return self._model(self.tasks)

    def model_of_task(self, task: str) -> nn.Module:
        """The branch of that task alone: branches share batch norms, and what others leave there would be of no training."""
        return self._model([task])

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        image, *targets = batch
        computed = {"segmentation": segmentation_loss, "depth": depth_loss, "normal": normal_loss}
        found = predicted(model, image)
        given = zip(self.tasks, targets, strict=True)
        return {task: computed[task](found[task], target) for task, target in given if task in found}

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        convention = self.settings["data.metrics"]
        if convention not in CONVENTIONS:
            raise UserError(unknown_name(convention, tuple(CONVENTIONS), "data.metrics"))
        tallies: dict[str, Tally] = {
            "segmentation": Confusion(self.layout.classes),
            "depth": DepthErrors(convention),
            "normal": AngleErrors(convention),
        }
        size = self.settings["data.metrics_batch"]
        if size < 1 or self.evaluation_batch % size:
            # Any other number would break the batches of the protocol where scenes are fetched.
            raise UserError(f"data.metrics_batch must divide {self.evaluation_batch}, found {size}.")
        found: dict[str, Tensor] = {}
        for batch in batches:
            at_once = max(1, PIXELS // batch[0][0, 0].numel() // size) * size
            tallied = size if convention == "protocol" else at_once
            for image, *targets in zip(*(torch.split(part, at_once) for part in batch), strict=True):
                found = predicted(model, image)
                given = dict(zip(self.tasks, targets, strict=True))
                for task, outputs in found.items():
                    for output, truth in zip(torch.split(outputs, tallied), torch.split(given[task], tallied), strict=True):
                        tallies[task].add(output, truth)
        metrics = {metric.name: math.nan for metric in self.metrics}
        for task in found:
            metrics |= tallies[task].metrics()
        return metrics | {self.headline: self._relative(metrics, self.metrics)}

    def score_of_task(self, metrics: Mapping[str, float], task: str) -> float:
        """How the metrics of a task are to those of the published single-task learning: they have no common unit."""
        return self._relative(metrics, self.metrics_of_task(task))

    def missing(self, folder: Path) -> str | None:
        if (absent := scenes.missing(self._tree(folder), self.layout)) is None:
            return None
        return f"{absent} Put {self.files} there, or make some up with `moonopt data make {self.name}`."

    def verify(self, folder: Path) -> None:
        if (absent := self.missing(folder)) is not None:
            raise UserError(absent)
        scenes.verify(self._tree(folder), self.layout)

    def make(self, folder: Path, count: int | None = None, seed: int = 0, size: tuple[int, int] | None = None) -> None:
        """Write ``count`` made-up training scenes and half as many to test on, of a size (height, width)."""
        many = MADE_UP if count is None else count
        scenes_made_up.make_scenes(self._tree(folder), self.layout, many, seed, size or self.made_up_size)
        mark(self._tree(folder))

    def is_made_up(self, folder: Path) -> bool:
        return is_marked(self._tree(folder))

    def _model(self, tasks: Iterable[str]) -> nn.Module:
        outputs = {"segmentation": self.layout.classes, "depth": 1, "normal": 3}
        return SegNetMTAN({task: outputs[task] for task in tasks}, **self.section("model"))

    def _tree(self, folder: Path) -> Path:
        """The folder with the splits: the one that ``data.folder`` names, or the data folder itself if it has them."""
        inside = folder / str(self.settings["data.folder"])
        return folder if not inside.exists() and (folder / scenes.SPLITS[0]).is_dir() else inside

    def _relative(self, metrics: Mapping[str, float], chosen: Sequence[Metric]) -> float:
        return 1 + delta_m(metrics, self.reference, chosen) / 100


class NYUv2(SceneBenchmark):
    """Thirteen classes, depth in metres and normals of indoor scenes."""

    name = "nyuv2"
    title = "NYU-v2: classes, depth and normals of indoor scenes, by a SegNet with attention for each task"
    metrics = (*NYUV2_METRICS, RELATIVE)
    tasks = ("segmentation", "depth", "normal")
    layout = scenes.NYUV2
    made_up_size = (96, 128)
    defaults: ClassVar = {**SETTINGS, "data.folder": "nyuv2", "data.metrics_batch": 2, "train.batch_size": 2}
    published: ClassVar[Published | None] = NYUV2
    reference = NYUV2.rows["stl"]
    data_note = "npy files of MTAN's archive, or small ones by `moonopt data make nyuv2`"


class NYUv2Small(NYUv2):
    """The same scenes at 96 x 128, with normals computed from depth, in a protocol of our own that fits into minutes.

    Nothing of it can be set beside published numbers, but for the headline, in which they are a scale.
    """

    name = "nyuv2-small"
    layout = scenes.NYUV2_SMALL
    title = "NYU-v2's scenes at 96 x 128 in 40 epochs, by a SegNet of half the width; our own protocol"
    defaults: ClassVar = {
        **NYUv2.defaults,
        "data.folder": "nyuv2_96x128_tree",
        "data.metrics": "whole",
        "model.width": 32,
        "train.epochs": 40,
        "train.batch_size": 8,
        "train.schedule": "step:20:0.5",
        "train.evaluate_every": 2,
        "train.select": "last:5",
    }
    published = None
    data_note = "npy files of scenes of 96 x 128 pixels"
    files = "npy files of NYU-v2's scenes, a fifth as high and wide,"


def predicted(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """What a model says of images, in float32, with normals of length 1."""
    outputs = {task: output.float() for task, output in model(image).items()}
    if "normal" in outputs:
        outputs["normal"] = functional.normalize(outputs["normal"], dim=1)
    return outputs
