"""Steps of scenes and faces as a GPU would have them: deterministic operations, and none that waits for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moonopt.bench.celeba import CelebaCNN, CelebaViT
from moonopt.bench.cityscapes import CityScapes
from moonopt.bench.data.scenes import SceneTensors
from moonopt.bench.data.scenes_views import Scenes
from moonopt.bench.nyuv2 import NYUv2

#: The operations that raise on CUDA tensors according to the documentation of ``torch.use_deterministic_algorithms``.
NONDETERMINISTIC = {
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_dense_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "bincount with weights",
    "cumsum of floats",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "histc",
    "kthvalue",
    "max_unpool2d",
    "max_unpool3d",
    "median with indices",
    "nll_loss2d_backward",
    "nll_loss2d_forward",
    "put_",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "scatter_reduce",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "upsample_nearest2d_backward",
    "upsample_trilinear3d_backward",
}
#: What needs a number or a shape from the device, so that no CUDA graph can have it.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "bincount with weights",
    "index with a mask",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_dim",
}
SIZE, FACES = (32, 64), 32
BENCHMARKS = {
    "nyuv2": (NYUv2, {"model.width": 2}),
    "cityscapes": (CityScapes, {"model.width": 2}),
    "celeba-cnn": (CelebaCNN, {"model.width": 2, "data.image_size": FACES}),
    "celeba-vit": (CelebaViT, {"model.width": 16, "model.depth": 1, "data.image_size": FACES}),
}


class Recorded(TorchDispatchMode):
    """The names of all operations inside, of some with what makes them what they are."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(self._name(function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _name(function, args, kwargs):
        name = function.overloadpacket.__name__
        masks = name == "index" and any(index is not None and index.dtype is torch.bool for index in args[1])
        weights = name == "bincount" and (kwargs.get("weights") is not None or (len(args) > 1 and args[1] is not None))
        special = {
            "index": " with a mask" if masks else "",
            "bincount": " with weights" if weights else "",
            "cumsum": " of floats" if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() else "",
            "median": " with indices" if function._overloadname == "dim" else "",
        }
        return name + special.get(name, "")


def scenes(bench, count=4):
    """Random ones, of which some pixels are not known."""
    generator = torch.Generator().manual_seed(0)
    known = torch.rand(count, 1, *SIZE, generator=generator) > 0.2
    normal = torch.nn.functional.normalize(torch.randn(count, 3, *SIZE, generator=generator), dim=1) * known
    return SceneTensors(
        torch.randint(256, (count, 3, *SIZE), generator=generator, dtype=torch.uint8),
        255.0,
        torch.randint(-1, bench.layout.classes, (count, *SIZE), generator=generator, dtype=torch.int8),
        torch.rand(count, 1, *SIZE, generator=generator) * known,
        normal if bench.layout.normals else None,
    )


@pytest.fixture(params=BENCHMARKS)
def problem(request):
    """A benchmark, its model, and what makes a batch."""
    kind, settings = BENCHMARKS[request.param]
    bench = kind(settings)
    torch.manual_seed(0)
    if request.param in ("nyuv2", "cityscapes"):
        data = Scenes(scenes(bench), augment=True)
        return bench, bench.model(), lambda: data.batch(torch.arange(4), torch.Generator().manual_seed(1))
    return bench, bench.model(), lambda: (torch.rand(4, 3, FACES, FACES), torch.rand(4, 40) > 0.5)


def test_the_recorder_sees_what_would_not_do():
    x = torch.randn(1, 1, 4, 4, requires_grad=True)
    with Recorded() as recorded:
        torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear").sum().backward()
        x.detach()[x.detach() > 0].cumsum(0)
        pooled, places = torch.nn.functional.max_pool2d(x.detach(), 2, return_indices=True)
        torch.nn.functional.max_unpool2d(pooled, places, 2)
        pooled.sum().item()
    assert {"upsample_bilinear2d_backward", "cumsum of floats", "max_unpool2d"} <= recorded.names & NONDETERMINISTIC
    assert {"index with a mask", "_local_scalar_dense"} <= recorded.names & WAITING


def test_a_step_has_deterministic_operations_alone_and_waits_for_nothing(problem):
    bench, model, batch = problem
    given = batch()
    with Recorded() as recorded:
        losses = bench.losses(model, given)
        torch.stack(list(losses.values())).sum().backward()
    assert recorded.names & {"convolution_backward", "native_layer_norm_backward"}
    assert not recorded.names & (NONDETERMINISTIC | WAITING)


def test_a_batch_is_made_without_waiting(problem):
    _, _, batch = problem
    with Recorded() as recorded:
        batch()
    assert recorded.names
    assert not recorded.names & (NONDETERMINISTIC | WAITING)


@pytest.mark.parametrize("convention", ["protocol", "whole"])
def test_an_evaluation_is_deterministic(problem, convention):
    bench, model, batch = problem
    if "data.metrics" in bench.settings:
        bench.settings["data.metrics"] = convention
    given = batch()
    with Recorded() as recorded, torch.no_grad():
        bench.evaluate(model.eval(), [given])
    assert recorded.names
    assert not recorded.names & NONDETERMINISTIC
