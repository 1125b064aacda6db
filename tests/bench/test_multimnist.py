"""MultiMNIST: on made-up digits, on files in which every digit tells its number, and on a few hundred real ones."""

import os
import sys
from pathlib import Path

import pytest
import torch

from moonopt import build, cli, route_parameters
from moonopt.bench import find, paper
from moonopt.bench.data import mnist
from moonopt.bench.data.idx import write_idx
from moonopt.bench.multimnist import MultiMNIST, resized
from moonopt.errors import UserError
from moonopt.methods import known_settings

SPLITS = ("train", "valid", "test")
SMALL = {"data.train_pairs": 400, "data.valid_pairs": 40, "data.test_pairs": 200}
WHOLE_CANVAS = {"data.image_size": 36}


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A folder with made-up digits."""
    folder = tmp_path_factory.mktemp("made_up")
    MultiMNIST().make(folder)
    return folder


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A folder with 600 training and 200 test digits, of which two corners tell the number and the number the label."""
    folder = tmp_path_factory.mktemp("numbered")
    (folder / "mnist").mkdir()
    numbers = torch.arange(800)
    images = torch.zeros(800, 28, 28, dtype=torch.uint8)
    code = torch.stack([numbers // 256, numbers % 256], 1).to(torch.uint8)
    images[:, 0, :2] = images[:, 27, 26:] = code
    labels = (numbers % 10).to(torch.uint8)
    for file, values in zip(mnist.SHA256, (images[:600], labels[:600], images[600:], labels[600:]), strict=True):
        write_idx(folder / "mnist" / file, values)
    return folder


@pytest.fixture(scope="module")
def real():
    """The folder with the real MNIST."""
    folder = os.environ.get("MOONOPT_DATA")
    if folder is None or mnist.missing(Path(folder)) is not None:
        pytest.skip("needs MNIST in $MOONOPT_DATA")
    return Path(folder)


def load(folder, seed=0, **settings):
    return MultiMNIST(settings).load(folder, seed)


def numbers_of(data):
    """The numbers of the left and the right digits of numbered pictures."""
    pixels = data.tensors[0].squeeze(1).long()
    left, right = pixels[:, 0, :2], pixels[:, 35, 34:]
    return left[:, 0] * 256 + left[:, 1], right[:, 0] * 256 + right[:, 1]


def everything(data):
    return data.batch(torch.arange(len(data)), torch.Generator())


def test_the_registry_has_it_with_the_numbers_of_the_paper():
    bench = find("multimnist")
    assert bench is MultiMNIST
    assert bench.published is paper.MULTIMNIST
    assert {name for row in bench.published.rows.values() for name in row} <= {metric.name for metric in bench.metrics}


def test_a_factor_scales_the_right_loss_alone_and_no_metric(made_up):
    torch.manual_seed(0)
    model = MultiMNIST().model()
    batch = everything(load(made_up, **SMALL).test)
    plain, scaled = (MultiMNIST({"data.right_factor": factor}) for factor in (1.0, 10.0))
    before, after = plain.losses(model, batch), scaled.losses(model, batch)
    assert after["left"] == before["left"]
    assert after["right"].item() == pytest.approx(10 * before["right"].item())
    with torch.no_grad():
        assert scaled.evaluate(model, [batch]) == plain.evaluate(model, [batch])


def test_noise_replaces_a_share_of_the_right_training_labels_and_nothing_else(made_up):
    clean, noisy, drawn = (load(made_up, **SMALL, **{"data.right_noise": share}) for share in (0.0, 0.4, 1.0))
    for split in SPLITS:
        before, after = everything(getattr(clean, split)), everything(getattr(noisy, split))
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])
        assert torch.equal(before[2], after[2]) == (split != "train")
    changed = everything(clean.train)[2] != everything(noisy.train)[2]
    assert 0.25 < changed.float().mean() < 0.47  # a tenth of the drawn labels are the right ones
    agree = everything(clean.train)[2] == everything(drawn.train)[2]
    assert agree.float().mean() < 0.2
    with pytest.raises(UserError, match="between 0 and 1"):
        load(made_up, **SMALL, **{"data.right_noise": 1.5})


def test_the_share_of_the_matrices_is_that_of_the_paper():
    routing = route_parameters(MultiMNIST().model())
    assert 0.764 <= routing.matrix_share <= 0.774
    assert all("blocks" in placement.name for placement in routing.of_kind("matrix"))
    assert sum(placement.parameter.numel() for placement in routing.placements) == 682_092


def test_inspect_prints_the_share(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moonopt", "inspect", "multimnist"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "76.86% of 682,092 parameters are in matrices" in capsys.readouterr().out


@pytest.mark.parametrize("method", MultiMNIST.tuned)
def test_settings_for_methods_are_known_to_them(method):
    assert set(MultiMNIST.tuned[method]) <= set(known_settings(method))


def test_labels_are_those_of_the_digits(numbered):
    splits = load(numbered, **SMALL, **WHOLE_CANVAS)
    for split in SPLITS:
        data = getattr(splits, split)
        for numbers, labels in zip(numbers_of(data), data.tensors[1:], strict=True):
            assert torch.equal(numbers % 10, labels.long())


def test_no_digit_is_in_two_splits_and_test_digits_are_from_the_test_files(numbered):
    splits = load(numbered, **WHOLE_CANVAS | {f"data.{split}_pairs": 1000 for split in SPLITS})
    train, valid, test = (set(torch.cat(numbers_of(getattr(splits, split))).tolist()) for split in SPLITS)
    assert (len(train), len(valid)) == (550, 50)
    assert train | valid == set(range(600))
    assert test == set(range(600, 800))


def test_every_digit_comes_once_on_each_side_before_any_comes_again(numbered):
    data = load(numbered, **SMALL | WHOLE_CANVAS | {"data.train_pairs": 1200}).train
    for numbers in numbers_of(data):
        assert len(set(numbers[:550].tolist())) == len(set(numbers[550:1100].tolist())) == 550
    left, right = numbers_of(data)
    assert (left == right).float().mean() < 0.02


def test_pairs_depend_on_the_seed_of_the_data_alone(made_up):
    first, again = load(made_up, seed=0, **SMALL), load(made_up, seed=1, **SMALL)
    other = load(made_up, **SMALL, **{"data.seed": 1})
    for split in SPLITS:
        ours, theirs = getattr(first, split).tensors, getattr(again, split).tensors
        assert all(map(torch.equal, ours, theirs))
        assert not torch.equal(ours[0], getattr(other, split).tensors[0])


def test_fewer_pairs_are_the_first_of_more(made_up):
    more, fewer = load(made_up, **SMALL), load(made_up, **SMALL | {"data.train_pairs": 10, "data.valid_pairs": 7})
    assert torch.equal(fewer.train.tensors[0], more.train.tensors[0][:10])
    assert torch.equal(fewer.valid.tensors[2], more.valid.tensors[2][:7])
    assert torch.equal(fewer.test.tensors[0], more.test.tensors[0])


def test_pictures_are_bytes_in_memory_and_floats_in_a_batch(made_up):
    data = load(made_up, **SMALL).train
    assert {tensor.dtype for tensor in data.tensors} == {torch.uint8}
    images, left, _ = data.batch(torch.tensor([3, 5]), torch.Generator())
    assert (images.shape, images.dtype, left.dtype) == ((2, 1, 28, 28), torch.float32, torch.int64)
    assert torch.equal(images, data.tensors[0][[3, 5]] / 255)
    assert 0.5 < images.max() <= 1


def test_resizing_interpolates_between_the_nearest_pixels():
    images = torch.randint(256, (3, 1, 36, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    places = (torch.arange(28, dtype=torch.float64) + 0.5) * 36 / 28 - 0.5
    distances = (places[:, None] - torch.arange(36)).abs()
    weights = (1 - distances).clamp(min=0)
    expected = weights @ images.double() @ weights.T
    assert (resized(images, 28).double() - expected).abs().max() <= 0.5 + 1e-4
    assert torch.equal(resized(images, 36), images)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"data.canvas": 27}, "data.canvas must be at least 28, the size of the digits; found 27."),
        ({"data.train_pairs": 0}, "data.train_pairs must be at least 1, found 0."),
        ({"data.test_pairs": -1}, "data.test_pairs must be at least 1, found -1."),
    ],
)
def test_settings_without_sense_are_refused(settings, text, made_up):
    with pytest.raises(UserError, match=text):
        load(made_up, **SMALL | settings)


def test_too_few_digits_are_refused(tmp_path):
    (tmp_path / "mnist").mkdir()
    for file in mnist.SHA256:
        write_idx(tmp_path / "mnist" / file, torch.zeros((11, 28, 28) if "images" in file else (11,), dtype=torch.uint8))
    with pytest.raises(UserError, match="at least 12 training digits, found 11"):
        load(tmp_path)


def test_made_up_digits_are_told_from_mnist_and_never_written_over_it(made_up):
    bench = MultiMNIST()
    assert bench.missing(made_up) is None
    with pytest.raises(UserError, match="is not MNIST's"):
        bench.verify(made_up)
    with pytest.raises(UserError, match="has files already"):
        bench.make(made_up)


def trained(folder, pairs, **model):
    """Accuracies of a smaller ViT after one epoch of MOON, with rates that fall to zero, in batches of 32."""
    data = {"data.train_pairs": pairs, "data.valid_pairs": 1, "data.test_pairs": 500}
    bench = MultiMNIST(data | {"model.patch_size": 7} | model)
    splits = bench.load(folder, 0)
    torch.manual_seed(0)
    net = bench.model()
    rates = {key.removeprefix("optimizer."): value for key, value in bench.tuned["moon"].items()}
    optimizer = build("moon", net, bench.tasks, optimizer=rates)
    batches = torch.randperm(pairs).split(32)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=len(batches))
    for indices in batches:
        optimizer.minimize(lambda batch: bench.losses(net, batch), splits.train.batch(indices, torch.Generator()))
        schedule.step()
    with torch.no_grad():
        return bench.evaluate(net.eval(), [everything(splits.test)])


def test_a_few_steps_read_made_up_digits_better_than_chance(made_up):
    assert trained(made_up, 8000, **{"model.depth": 1})["average accuracy"] > 40


def test_real_pictures_show_real_digits_with_their_labels(real):
    """What nothing overlaps, the first 8 rows and columns of a left digit, is that of a digit of this label and these files."""
    splits = load(real, **SMALL, **WHOLE_CANVAS)
    sources = dict(zip(("train", "test"), mnist.read(real), strict=True))
    for split, source in (("train", "train"), ("valid", "train"), ("test", "test")):
        images, labels = sources[source]
        pictures, left, _ = getattr(splits, split).tensors
        known = torch.cat([images[:, :8].flatten(1), images[:, 8:, :8].flatten(1)], 1)
        for picture, label in zip(pictures[:20, 0], left[:20], strict=True):
            seen = torch.cat([picture[:8, :28].flatten(), picture[8:28, :8].flatten()])
            assert label in labels[(known == seen).all(1)]


def test_real_splits_have_their_sizes_and_every_digit_once_on_each_side(real):
    splits = load(real)
    assert [len(getattr(splits, split)) for split in SPLITS] == [55_000, 5_000, 10_000]
    (_, labels), (_, test_labels) = mnist.read(real)
    for side in (1, 2):
        both = torch.cat([splits.train.tensors[side], splits.valid.tensors[side]])
        assert torch.equal(both.bincount(), labels.bincount())
        assert torch.equal(splits.test.tensors[side].bincount(), test_labels.bincount())


def test_a_short_run_on_real_digits_beats_80_percent_on_both_tasks(real):
    found = trained(real, 24_000, **{"model.depth": 2})
    assert found["left accuracy"] > 80
    assert found["right accuracy"] > 80


def test_made_up_digits_are_as_many_as_asked_for_and_fixed_by_the_seed(tmp_path, monkeypatch, capsys):
    read = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        words = ["moonopt", "data", "make", "mnist", "--out", str(tmp_path / name), "--count", "60", "--seed", str(seed)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        read.append(mnist.read(tmp_path / name))
    (images, _), (test_images, _) = read[0]
    assert (len(images), len(test_images)) == (60, 10)
    assert torch.equal(images, read[1][0][0])
    assert not torch.equal(images, read[2][0][0])
