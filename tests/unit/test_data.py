"""What the lessons rely on in `ddplab.data`: same items everywhere, fair classes, one download."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10

from ddplab.data import ShapesDataset, cifar10


@pytest.fixture(scope="module")
def train() -> ShapesDataset:
    return ShapesDataset(2000)


@pytest.fixture(scope="module")
def test() -> ShapesDataset:
    return ShapesDataset(1000, train=False)


def as_batch(shapes: ShapesDataset) -> tuple[Tensor, Tensor]:
    images, labels = next(iter(DataLoader(shapes, batch_size=len(shapes))))
    return images, labels


def test_an_item_has_the_form_of_cifar10(train: ShapesDataset) -> None:
    image, label = train[7]
    assert image.shape == (3, 32, 32) and image.dtype == torch.float32
    assert -1 <= image.min() < 0 < image.max() <= 1
    assert type(label) is int and train.classes[label] in train.classes


def test_a_loop_over_the_dataset_ends() -> None:
    assert len(list(ShapesDataset(13))) == len(ShapesDataset(13)) == 13


def test_ten_classes_have_ten_names() -> None:
    assert len(set(ShapesDataset.classes)) == 10


@pytest.mark.parametrize("num_images", [1, 10, 11, 999])
def test_item_i_is_the_same_however_many_are_asked_for(train: ShapesDataset, num_images: int) -> None:
    few = ShapesDataset(num_images)
    assert torch.equal(few.pixels, train.pixels[:num_images])
    assert torch.equal(few.targets, train.targets[:num_images])


def test_items_do_not_depend_on_the_number_of_threads_or_the_global_seed(
    train: ShapesDataset,
) -> None:
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(num_threads, 2))
        with torch.random.fork_rng():
            torch.manual_seed(123)
            again = ShapesDataset(2000)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(again.pixels, train.pixels)


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    ShapesDataset(10)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_labels_are_those_the_lessons_show(train: ShapesDataset) -> None:
    assert train.targets[:10].tolist() == [6, 7, 1, 4, 8, 3, 0, 9, 2, 5]


def test_splits_and_seeds_share_no_image() -> None:
    parts = [ShapesDataset(100, train=train, seed=seed) for train in (True, False) for seed in (0, 1, 2)]
    pixels = torch.cat([part.pixels for part in parts]).flatten(1)
    assert len(pixels.unique(dim=0)) == 600


def test_a_pickle_gives_the_same_items_also_after_a_learner_changed_a_label() -> None:
    shapes = ShapesDataset(20)
    shapes.targets[0] = 9
    copy = pickle.loads(pickle.dumps(shapes))
    assert torch.equal(copy[3][0], shapes[3][0]) and copy[0][1] == 9


@pytest.mark.parametrize(("num_images", "seed"), [(0, 0), (-1, 0), (10, -1)])
def test_an_impossible_number_or_seed_is_refused(num_images: int, seed: int) -> None:
    with pytest.raises(ValueError, match=f"num_images={num_images}, seed={seed}"):
        ShapesDataset(num_images, seed=seed)


@pytest.mark.parametrize("num_images", [1000, 1003])
def test_classes_are_balanced_to_within_one(num_images: int) -> None:
    counts = ShapesDataset(num_images).targets.bincount(minlength=10)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_rank_of_an_unshuffled_sampler_meets_all_classes(train: ShapesDataset, world_size: int) -> None:
    for rank in range(world_size):
        sampler = DistributedSampler(train, world_size, rank, shuffle=False)
        counts = train.targets[list(sampler)].bincount(minlength=10)
        mean = len(sampler) / 10
        assert counts.min() > 0.4 * mean and counts.max() < 1.6 * mean, f"rank {rank}: {counts}"


def colours(shapes: ShapesDataset) -> Tensor:
    images, _ = as_batch(shapes)
    return torch.cat([images.mean((2, 3)), images.std((2, 3))], dim=1)


@pytest.mark.parametrize("num_features", [3, 6], ids=["mean", "mean-and-std"])
def test_colours_do_not_give_the_class_away(train: ShapesDataset, test: ShapesDataset, num_features: int) -> None:
    """Neither the nearest class mean nor a linear fit gets far from one in ten."""
    known, asked = colours(train)[:, :num_features], colours(test)[:, :num_features]
    known, asked = (known - known.mean(0)) / known.std(0), (asked - known.mean(0)) / known.std(0)
    centres = torch.stack([known[train.targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(asked, centres).argmin(1)
    known, asked = (
        nn.functional.pad(known, (0, 1), value=1),
        nn.functional.pad(asked, (0, 1), value=1),
    )
    one_hot = nn.functional.one_hot(train.targets, 10).float()
    linear = (asked @ torch.linalg.lstsq(known, one_hot).solution).argmax(1)
    for guess in (nearest, linear):
        assert (guess == test.targets).float().mean() < 0.2


def test_all_shapes_cover_the_same_part_of_a_picture(train: ShapesDataset) -> None:
    """A larger shape would show in the spread of the colours."""
    images, labels = as_batch(train)
    spread = torch.stack([images[labels == label].std((2, 3)).mean() for label in range(10)])
    assert spread.max() / spread.min() < 1.05


def lenet() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        ),
    )


def test_lenet_learns_in_one_epoch_and_has_more_to_learn(train: ShapesDataset, test: ShapesDataset) -> None:
    images, labels = as_batch(train)
    test_images, test_labels = as_batch(test)
    accuracy = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lenet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            for batch in torch.randperm(2000).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                accuracy.append((model(test_images).argmax(1) == test_labels).float().mean().item())
    assert 0.2 < accuracy[0] < 0.7 and accuracy[0] + 0.1 < accuracy[2] < 0.97


@pytest.fixture
def fake_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CIFAR-10 folder with two images a file, all black (label 3) or all white (label 5)."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    black_white = torch.tensor([[0], [255]], dtype=torch.uint8).expand(2, 3072).numpy()
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        (folder / name).write_bytes(pickle.dumps({"data": black_white, "labels": [3, 5]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    # The fake files cannot have the real check sums; that they exist is still checked.
    for files in ("train_list", "test_list"):
        monkeypatch.setattr(CIFAR10, files, [(name, None) for name, _ in getattr(CIFAR10, files)])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
    return tmp_path


@pytest.fixture(autouse=True)
def in_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPLAB_RANK", raising=False)


@pytest.mark.parametrize(("train", "num_images"), [(True, 10), (False, 2)])
def test_real_items_have_the_form_of_the_embedded_ones(fake_cifar10: Path, train: bool, num_images: int) -> None:
    items = list(cifar10(fake_cifar10, train=train))
    assert len(items) == num_images
    (black, three), (white, five) = items[:2]
    assert black.shape == (3, 32, 32) and black.dtype == torch.float32
    assert (black == -1).all() and (white == 1).all() and (three, five) == (3, 5)


def test_a_transform_replaces_the_default(fake_cifar10: Path) -> None:
    image, _ = cifar10(fake_cifar10, transform=lambda image: image.size)[0]
    assert image == (32, 32)


def test_the_launcher_may_ask_for_a_download_and_data_already_there_is_kept(
    fake_cifar10: Path,
) -> None:
    assert len(list(cifar10(fake_cifar10, download=True))) == 10


def test_a_rank_may_not_download(fake_cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the data is there: the cell would fail on the next machine."""
    monkeypatch.setenv("DDPLAB_RANK", "2")
    with pytest.raises(RuntimeError, match=r"rank 2: .*once in a cell before launch.*download=False"):
        cifar10(fake_cifar10, download=True)


def test_a_rank_may_read(fake_cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPLAB_RANK", "2")
    assert len(list(cifar10(fake_cifar10))) == 10


def test_missing_data_names_the_folder_and_both_ways_on(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        cifar10(tmp_path)
    for part in (str(tmp_path / "cifar-10-batches-py"), "download=True", "ShapesDataset()"):
        assert part in str(caught.value)


def test_half_a_data_set_is_missing_data(fake_cifar10: Path) -> None:
    (fake_cifar10 / CIFAR10.base_folder / "data_batch_4").unlink()
    with pytest.raises(FileNotFoundError, match="no complete CIFAR-10"):
        cifar10(fake_cifar10)


def test_a_download_that_fails_is_not_told_as_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CIFAR10) -> None:
        raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(RuntimeError, match="corrupted"):
        cifar10(tmp_path, download=True)
