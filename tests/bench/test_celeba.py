"""Benchmarks celeba-cnn and celeba-vit on made-up faces: batches, losses, F1, and runs in which something is learnt."""

import json
import sys

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from moonopt import build, cli, route_parameters
from moonopt.bench import delta_m, find, paper
from moonopt.bench.celeba import CelebaCNN, CelebaViT, accuracy, count, f1
from moonopt.bench.data import celeba, faces
from moonopt.errors import UserError
from moonopt.methods import known_settings

LOCATION = "moonopt.bench.celeba:{}"
TINY = {"data.image_size": 32}
SMALL = {
    CelebaCNN: TINY | {"model.width": 8},
    CelebaViT: TINY | {"model.width": 32, "model.depth": 2, "model.attention_heads": 4, "model.mlp_ratio": 2.0},
}
BOTH = pytest.mark.parametrize("kind", [CelebaCNN, CelebaViT])
#: Of the paper's tables; stl is a run for each task.
METHODS = ("ls", "si", "rlw", "dwa", "uw", "mgda", "pcgrad", "graddrop", "cagrad", "imtl-g", "nash-mtl", "famo", "muon", "moon")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A data folder with 750 made-up faces: 600 to train on, 75 for validation, 75 for the test."""
    folder = tmp_path_factory.mktemp("data")
    faces.make_faces(folder / celeba.FOLDER, count=750)
    return folder


def whole(data):
    return data.batch(torch.arange(len(data)), torch.Generator())


def answers(faces, seed, share=0.3):
    """Random logits, and attributes of which the first is on no face, the second on all, the third is never found."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(faces, 40, generator=generator) < share
    wanted[:, 0], wanted[:, 1] = False, True
    logits = torch.randn(faces, 40, generator=generator) + 2 * wanted - 1
    logits[:, 2] = -1
    return logits, wanted


class Answering(torch.nn.Module):
    """Takes the numbers of examples for images, and answers with the logits that it has for them."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, numbers):
        return dict(zip(celeba.ATTRIBUTES, self.logits[numbers].split(1, 1), strict=True))


@BOTH
def test_it_can_be_found_and_has_the_numbers_of_the_paper(kind):
    bench = find(LOCATION.format(kind.__name__))
    assert bench.published is {"celeba-cnn": paper.CELEBA, "celeba-vit": paper.CELEBA_VIT}[bench.name]
    assert bench.tasks == tuple(paper.CELEBA_STL)
    assert {metric.name for metric in bench.metrics} >= set(bench.tasks)
    assert {metric.task for metric in bench.metrics} == {*bench.tasks, None}


@BOTH
@pytest.mark.parametrize("method", CelebaCNN.tuned)
def test_settings_for_methods_are_known_to_them(method, kind):
    assert set(kind.tuned[method]) <= set(known_settings(method))


@pytest.mark.parametrize(("kind", "parameters", "share"), [(CelebaCNN, 5_197_160, 0.9946), (CelebaViT, 4_815_144, 0.98)])
def test_the_models_have_their_sizes(kind, parameters, share):
    model = kind().model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert route_parameters(model).matrix_share == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize("seed", range(3))
def test_f1_and_accuracy_agree_with_scikit_learn(seed):
    logits, wanted = answers(200, seed)
    counts = count(logits > 0, wanted)
    columns = list(zip(wanted.T.numpy(), (logits > 0).T.numpy(), strict=True))
    expected = [f1_score(yes, found, zero_division=0) for yes, found in columns]
    assert f1(counts).tolist() == pytest.approx(expected, abs=1e-7)
    assert expected[0] == expected[2] == 0
    assert accuracy(counts).tolist() == pytest.approx([accuracy_score(yes, found) for yes, found in columns])


@pytest.mark.parametrize("size", [1, 7, 100])
def test_metrics_are_over_the_whole_split_however_it_is_batched(size):
    logits, wanted = answers(100, 0)
    batches = [(numbers, wanted[numbers]) for numbers in torch.arange(100).split(size)]
    found = CelebaCNN().evaluate(Answering(logits), batches)
    scores = [f1_score(yes, guess, zero_division=0) for yes, guess in zip(wanted.T, (logits > 0).T, strict=True)]
    assert [found[task] for task in celeba.ATTRIBUTES] == pytest.approx(scores, abs=1e-7)
    assert found["mean F1"] == pytest.approx(sum(scores) / 40, abs=1e-7)
    assert found["mean accuracy"] == pytest.approx(100 * ((logits > 0) == wanted).double().mean().item())


def test_the_best_mean_f1_is_selected_and_delta_m_is_over_the_forty():
    bench = CelebaCNN()
    stl = dict(paper.CELEBA_STL) | {"mean F1": 0.5, "mean accuracy": 80.0}
    assert bench.score(stl) == -0.5
    assert bench.score_of_task(stl, "Bald") == -stl["Bald"]
    assert delta_m(stl, bench.published.rows[bench.published.reference], bench.metrics) == 0
    worse = {name: 0.9 * value for name, value in stl.items()}
    assert delta_m(worse, stl, bench.metrics) == pytest.approx(10)


def test_losses_are_the_cross_entropy_of_every_attribute():
    logits, wanted = answers(50, 0)
    found = CelebaCNN().losses(lambda images: Answering(logits)(torch.arange(50)), (torch.rand(50, 3, 8, 8), wanted))
    chances = logits.sigmoid()
    for number, task in enumerate(celeba.ATTRIBUTES):
        expected = torch.nn.functional.binary_cross_entropy(chances[:, number], wanted[:, number].float())
        torch.testing.assert_close(found[task], expected)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])  # the second is what autocast makes of logits
def test_losses_and_gradients_of_extreme_logits_are_those_of_torch(given):
    one = torch.tensor([0, 1e-3, 1, 19.9, 20, 20.1, 88, 104, 1e4]).repeat(2, 1)
    column = torch.cat([one, -one], 1).flatten().to(given)
    logits, yes = column.unsqueeze(1).expand(-1, 40).clone().requires_grad_(), torch.arange(36) >= 18
    wanted = yes.unsqueeze(1).expand(-1, 40)
    found = CelebaCNN().losses(lambda images: Answering(logits)(torch.arange(36)), (torch.rand(36, 3, 8, 8), wanted))
    exact = column.double().requires_grad_()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(exact, yes.double())
    expected.backward()
    sum(found.values()).backward()
    for number, loss in enumerate(found.values()):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[given]  # half a unit in the last place
        torch.testing.assert_close(logits.grad[:, number].double(), exact.grad, rtol=tolerance, atol=1e-8)


def test_faces_are_bytes_in_memory_and_colours_from_0_to_1_in_a_batch(made_up):
    splits = CelebaCNN(TINY).load(made_up, 0)
    assert [len(part) for part in vars(splits).values()] == [600, 75, 75]
    assert {tensor.dtype for tensor in splits.train.tensors} == {torch.uint8}
    some = torch.tensor([3, 5])
    images, attributes = splits.train.batch(some, torch.Generator())
    assert (images.shape, images.dtype) == ((2, 3, 32, 32), torch.float32)
    assert (attributes.shape, attributes.dtype) == ((2, 40), torch.bool)
    assert torch.equal(images, splits.train.tensors[0][some] / 255)
    again, _ = splits.train.batch(some, torch.Generator().manual_seed(1))
    assert torch.equal(images, again)


def test_the_splits_are_the_same_for_every_seed(made_up):
    one, other = (CelebaCNN(TINY).load(made_up, seed) for seed in (0, 1))
    assert torch.equal(one.test.tensors[0], other.test.tensors[0])


def test_images_that_pools_leave_nothing_of_are_refused(made_up):
    with pytest.raises(UserError, match=r"data\.image_size must be at least 8, found 7"):
        CelebaCNN({"data.image_size": 7}).load(made_up, 0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data.image_size": 20}, "patch_size must divide"),
        ({"model.width": 30}, "attention_heads must"),
        ({"model.attention_heads": 0}, "attention_heads must"),
        ({"model.patch_size": 0}, "patch_size must divide"),
    ],
)
def test_sizes_that_a_vit_cannot_have_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        CelebaViT(settings).model()


def test_made_up_faces_are_made_in_the_data_folder(tmp_path):
    bench = CelebaCNN(TINY)
    assert "moonopt data make celeba" in bench.missing(tmp_path)
    bench.make(tmp_path, 12, seed=1)
    assert bench.missing(tmp_path) is None
    assert bench.is_made_up(tmp_path)
    assert not bench.is_made_up(tmp_path / "elsewhere")
    assert len(bench.load(tmp_path, 0).train) == 10
    with pytest.raises(UserError, match="is not CelebA as published"):
        bench.verify(tmp_path)


def trained(kind, method, folder, epochs, **rates):
    """A small model after some epochs in batches of 32, the mean loss of each epoch, and the splits."""
    bench = kind(SMALL[kind])
    splits = bench.load(folder, 0)
    torch.manual_seed(0)
    model = bench.model()
    optimizer = build(method, model, bench.tasks, optimizer=rates)
    means = []
    for _ in range(epochs):
        losses = []
        for indices in torch.randperm(len(splits.train)).split(32):
            found = optimizer.minimize(lambda batch: bench.losses(model, batch), splits.train.batch(indices, torch.Generator()))
            losses.append(torch.stack(list(found.values())).mean())
        means.append(torch.stack(losses).mean().item())
    return model.eval(), means, splits


def test_attributes_are_learnt_from_600_faces(made_up):
    model, _, splits = trained(CelebaCNN, "ls", made_up, 8, lr=3e-3)
    parts = [whole(splits.valid), whole(splits.test)]
    images, wanted = (torch.cat(part) for part in zip(*parts, strict=True))
    with torch.no_grad():
        logits = model(images)
    beaten = []
    for number, task in enumerate(celeba.ATTRIBUTES):
        right = ((logits[task].squeeze(1) > 0) == wanted[:, number]).double().mean()
        share = wanted[:, number].double().mean()
        if right > max(share, 1 - share) + 0.02:
            beaten.append(task)
    assert {"Male", "Wearing_Lipstick", "No_Beard"} <= set(beaten)
    assert len(beaten) >= 8


@pytest.mark.parametrize(
    ("kind", "method"), [(CelebaCNN, "moon"), (CelebaCNN, "famo"), (CelebaCNN, "mgda"), (CelebaViT, "moon"), (CelebaViT, "ls")]
)
def test_a_short_run_in_which_the_mean_loss_falls(kind, method, made_up, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    short = {"train.epochs": 1, "train.batch_size": 32, "train.steps_per_epoch": 9, "train.log_every": 3}
    settings = SMALL[kind] | short | {"optimizer.lr": 0.01}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    place = ["--data", str(made_up), "--out", str(runs)]
    monkeypatch.setattr(sys, "argv", ["moonopt", "run", LOCATION.format(kind.__name__), "--method", method, *place, *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    lines = [json.loads(line) for path in runs.rglob("metrics.jsonl") for line in path.read_text().splitlines()]
    means = [sum(line["loss"].values()) / 40 for line in lines if line["kind"] == "train"]
    assert means[-1] < means[0] - 0.02
    (result,) = runs.rglob("result.json")
    assert 0 <= json.loads(result.read_text())["metrics"]["mean F1"] <= 1


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_paper_trains(method, kind, made_up):
    matrices = {"lr": 1e-2, "vector_lr": 3e-3} if method in ("muon", "moon") else {"lr": 1e-3}
    model, means, splits = trained(kind, method, made_up, 3, **matrices)
    assert means[-1] < means[0]
    with torch.no_grad():
        found = kind().evaluate(model, [whole(splits.test)])
    assert all(0 <= found[task] <= 1 for task in celeba.ATTRIBUTES)
