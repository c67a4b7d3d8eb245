"""The embedded data set, ten shapes in CIFAR-10's form, and real CIFAR-10 where the user has it.

The shapes are hard enough to show learning. LeNet on 2,000 images, accuracy on 1,000 test images
(data seed 0, SGD, momentum 0.9; mean of 8 runs, lowest to highest in brackets; torch 2.14.1, CPU):

    lr    batch   1 epoch       2             5             8
    0.05  32      38 % (29-53)  65 % (35-76)  85 % (80-90)  87 % (79-93)
    0.02  32      22 % (11-32)  50 % (41-59)  90 % (84-94)  94 % (92-94)
    0.05  128     11 % (10-17)  27 % (22-36)  50 % (23-78)  82 % (56-92)
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ShapesDataset", "cifar10"]

_SIDE = 32  # pixels
# These set the difficulty; change one and the table above must be measured again.
_COVERAGE = (0.10, 0.25)  # part of the picture that a shape covers
_SHIFT = 3.0  # pixels from the middle, at most
_TURN = 0.4  # radians either way, at most
_GROUND, _INK = (0.20, 0.45), (0.55, 0.80)  # colours, of 1
_GRAIN = 0.25  # noise either way, at most, of 1


def _box(x: Tensor, y: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.maximum(x.abs() - half_width, y.abs() - half_height)


def _star(x: Tensor, y: Tensor) -> Tensor:
    angle = torch.remainder(torch.atan2(x, -y) + math.pi / 5, 2 * math.pi / 5) - math.pi / 5
    radius = torch.hypot(x, y)
    return 0.328 * (radius * angle.cos() - 1) + 0.945 * radius * angle.sin().abs()


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y - 0.24
    tip = torch.maximum(torch.maximum(0.707 * (x + y - 0.95), x - 0.97), -0.45 - y)
    return torch.minimum(tip, torch.hypot(x - 0.55, y + 0.45) - 0.6)


# Name: area, and how far a point lies outside the shape (inside: negative). y points down.
# With its area, a shape is scaled to cover what the others do: colours must not give it away.
_SHAPES: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "circle": (3.142, lambda x, y: torch.hypot(x, y) - 1),
    "ring": (3.770, lambda x, y: (torch.hypot(x, y) - 1).abs() - 0.3),
    "square": (4.000, lambda x, y: _box(x, y, 1, 1)),
    "triangle": (5.196, lambda x, y: torch.maximum(y - 1, 0.866 * x.abs() - 0.5 * y - 1)),
    "plus": (2.204, lambda x, y: torch.minimum(_box(x, y, 1, 0.33), _box(x, y, 0.33, 1))),
    "star": (1.176, _star),
    "heart": (2.997, _heart),
    "moon": (1.530, lambda x, y: torch.maximum(
        torch.hypot(x - 0.39, y) - 1, 0.8 - torch.hypot(x - 0.89, y))),
    "arrow": (1.358, lambda x, y: torch.minimum(
        _box(x + 0.5, y, 0.6, 0.25), torch.maximum(-x, 0.707 * (x + y.abs() - 0.9)))),
    "bars": (2.400, lambda x, y: torch.maximum(
        x.abs() - 1, torch.minimum(y.abs() - 0.2, (y.abs() - 0.8).abs() - 0.2))),
}  # fmt: skip


def _between(low_high: tuple[float, float], u: Tensor) -> Tensor:
    low, high = low_high
    return low + (high - low) * u


def _draw(shape: str, u: Tensor) -> Tensor:
    """Masks (n, 32, 32), 1 inside `shape`, from `u` (n, 4) in [0, 1): size, column, row, turn."""
    area, outside = _SHAPES[shape]
    size, column, row, turn = u.view(-1, 4, 1, 1).unbind(1)
    scale = _SIDE * (_between(_COVERAGE, size) / area).sqrt()
    pixel = torch.arange(_SIDE) - (_SIDE - 1) / 2
    x = (pixel - _between((-_SHIFT, _SHIFT), column)) / scale
    y = (pixel.view(-1, 1) - _between((-_SHIFT, _SHIFT), row)) / scale
    angle = _between((-_TURN, _TURN), turn)
    cos, sin = angle.cos(), angle.sin()
    return (0.5 - scale * outside(cos * x + sin * y, cos * y - sin * x)).clamp(0, 1)


def _generate(num_images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pixels (num_images, 3, 32, 32) as uint8, and labels (num_images,) as int64."""
    num_blocks = -(-num_images // 10)  # ten images with every class once, in random order
    generator = torch.Generator().manual_seed(seed)
    # One row an image, filled in order: image i is the same however many follow it.
    u = torch.rand(10 * num_blocks, 11 + _SIDE * _SIDE, generator=generator)
    order, place, ground, ink, grain = u.tensor_split([1, 5, 8, 11], dim=1)
    labels = order.view(num_blocks, 10).argsort(dim=1, stable=True).flatten()
    mask = torch.empty(len(u), 1, _SIDE, _SIDE)
    for label, shape in enumerate(_SHAPES):
        mask[labels == label, 0] = _draw(shape, place[labels == label])
    ground, ink = _between(_GROUND, ground), _between(_INK, ink)
    image = torch.lerp(ground.view(-1, 3, 1, 1), ink.view(-1, 3, 1, 1), mask)
    image += _between((-_GRAIN, _GRAIN), grain).view(-1, 1, _SIDE, _SIDE)
    # Whole numbers also hide the last bits, in which machines differ.
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels[:num_images], labels[:num_images]


class ShapesDataset(Dataset[tuple[Tensor, int]]):
    """`num_images` pictures of ten shapes in random colour, place, size and turn, under noise.

    An item is `(image, label)`: a float32 tensor (3, 32, 32) of red, green, blue in [-1, 1], rows
    from the top (show `image.permute(1, 2, 0) / 2 + 0.5`), and an int 0..9, the place in `classes`.
    `targets` holds all labels, int64 (num_images,): each ten in a row have every class once.

    Item i depends on `train`, `seed` and i alone: every rank builds the same data, each for itself
    (0.1 s for 2,000 images), and fewer images are the first of more. `num_images` below 1 or a
    negative `seed` is a ValueError; an index too high is an IndexError.

    >>> shapes = ShapesDataset(100)
    >>> image, label = shapes[0]
    >>> tuple(image.shape), label, shapes.classes[label]
    ((3, 32, 32), 6, 'heart')
    """

    classes: tuple[str, ...] = tuple(_SHAPES)

    def __init__(self, num_images: int = 2000, *, train: bool = True, seed: int = 0) -> None:
        if num_images < 1 or seed < 0:
            raise ValueError(
                f"ShapesDataset(num_images={num_images}, seed={seed}): "
                "give num_images of 1 or more and a seed of 0 or more"
            )
        self.pixels, self.targets = _generate(num_images, 2 * seed + bool(train))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index] / 127.5 - 1, int(self.targets[index])


def cifar10(
    root: str | Path = "data",
    *,
    train: bool = True,
    download: bool = False,
    transform: Callable[..., object] | None = None,
) -> Dataset[tuple[Tensor, int]]:
    """Real CIFAR-10 below the folder `root`: 50,000 images, or 10,000 with `train=False`.

    Items have the form of `ShapesDataset`, unless `transform` makes something else of the PIL
    image; `classes` and `targets` (here lists) are there too. `download=True` fetches 170 MB where
    the data is missing, in the notebook only: in a rank it is a RuntimeError, as every rank would
    write the same files. Missing or damaged data without `download` is a FileNotFoundError.

    >>> cifar10("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: cifar10: no complete CIFAR-10 in ...folder/cifar-10-batches-py; call ...
    """
    rank = os.environ.get("DDPLAB_RANK")
    if download and rank is not None:
        raise RuntimeError(
            f"rank {rank}: cifar10(download=True) was called in a rank, and every rank would write "
            "the same files; call it once in a cell before launch, then cifar10(download=False) "
            "in the function"
        )
    from torchvision import transforms
    from torchvision.datasets import CIFAR10

    if transform is None:
        normalize = transforms.Normalize([0.5] * 3, [0.5] * 3)
        transform = transforms.Compose([transforms.ToTensor(), normalize])
    try:
        images: Dataset[tuple[Tensor, int]] = CIFAR10(root, train, transform, download=download)
    except RuntimeError as error:
        if download:
            raise
        raise FileNotFoundError(
            f"cifar10: no complete CIFAR-10 in {Path(root).resolve() / CIFAR10.base_folder}; call "
            "cifar10(download=True) once in a cell (170 MB), or use the embedded ShapesDataset()"
        ) from error
    return images
