"""CityScapes: classes and inverse depths of the pixels of streets, in the protocol of NYU-v2, without normals."""

from typing import ClassVar

from moonopt.bench.data import scenes
from moonopt.bench.nyuv2 import RELATIVE, SETTINGS, TUNED, SceneBenchmark
from moonopt.bench.paper import CITYSCAPES, CITYSCAPES_METRICS


class CityScapes(SceneBenchmark):
    """Seven classes and the inverse depth of streets."""

    name = "cityscapes"
    title = "CityScapes: classes and inverse depth of streets, by a SegNet with attention for each task"
    metrics = (*CITYSCAPES_METRICS, RELATIVE)
    tasks = ("segmentation", "depth")
    layout = scenes.CITYSCAPES
    made_up_size = (64, 128)
    defaults: ClassVar = {**SETTINGS, "data.folder": "cityscapes", "data.metrics_batch": 8, "train.batch_size": 8}
    tuned: ClassVar = {  # gamma is FAMO's own, for these data alone
        **TUNED,
        **{name: {**TUNED[name], "balancer.gamma": 0.01} for name in ("famo", "famo+muon")},
    }
    published = CITYSCAPES
    reference = CITYSCAPES.rows["stl"]
    data_note = "npy files of MTAN's archive, or small ones by `moonopt data make cityscapes`"
