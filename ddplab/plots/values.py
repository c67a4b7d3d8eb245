"""What ranks returned, as numbers; and numbers as words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddplab.run import Run, Text

__all__ = [
    "NothingToDrawError", "by_rank", "in_bytes", "in_seconds", "in_words", "light", "listed", "numbers", "spaced"
]  # fmt: skip

Array = NDArray[np.float64]


class NothingToDrawError(ValueError):
    """A run has not got as far as what was to be drawn."""


def by_rank(values: Run | Sequence[Any], call: str) -> dict[int, Any]:
    """The value of each rank: of a run, what those that returned gave; of a sequence, its items in rank order.

    ``call`` names the picture in errors. Raises ``ValueError`` if there is no value at all; of a run it is a
    ``NothingToDrawError``.

    >>> by_rank(["a", "b"], "memory(...)")
    {0: 'a', 1: 'b'}
    """
    if isinstance(values, Run):
        if not values.returned:
            raise NothingToDrawError(f"{call}: no rank returned a value, for the run failed")
        return dict(values.returned)
    found = dict(enumerate(values))
    if not found:
        raise ValueError(f"{call}: no rank returned a value")
    return found


def numbers(value: Any, what: str = "the value") -> Array:
    """A number, a tensor, an array or any nest of lists, tuples and dicts of these, flat and in order, as float64.

    ``what`` names the value in errors. Raises ``TypeError`` for what holds no numbers.

    >>> numbers([1, (2.5, [True])]).tolist()
    [1.0, 2.5, 1.0]
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        if all(type(item) in (int, float) for item in value):
            return np.array(value, dtype=np.float64)
        parts = [numbers(item, what) for item in value]
        return np.concatenate(parts) if parts else np.zeros(0)
    if isinstance(value, Text):
        raise TypeError(f"{what} is the text {str(value)[:40]!r}: a saved run keeps lists, not tensors: use x.tolist()")
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().double().numpy()
        if isinstance(value, str | bytes) or value is None:
            raise TypeError
        return np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be numbers or tensors, not {type(value).__name__}: {value!r:.60}") from None


def in_bytes(num_bytes: float) -> str:
    """Bytes with the unit of 1,024 that fits.

    >>> in_bytes(24), in_bytes(1536), in_bytes(25 * 2**20)
    ('24 B', '1.5 KiB', '25 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def in_seconds(time_s: float) -> str:
    """Seconds with the unit that fits.

    >>> in_seconds(85e-6), in_seconds(0.0125), in_seconds(0), in_seconds(120)
    ('85 µs', '12.5 ms', '0 µs', '120 s')
    """
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if time_s < 999.5 * unit:
            return f"{time_s / unit:.3g} {name}"
    return f"{time_s:.3g} s"


def in_words(values: Iterable[float]) -> str:
    """Numbers as text, with six digits at most.

    >>> in_words([3.0, 1 / 3])
    '3, 0.333333'
    """
    return ", ".join(f"{value:.6g}" for value in values)


def listed(items: Sequence[Any], most: int = 8) -> str:
    """Items in words: the first ``most`` of them, and how many more there are.

    >>> listed([3, 1]), listed([]), listed(range(5), 2)
    ('3, 1', 'none', '0, 1 and 3 more')
    """
    words = ", ".join(str(item) for item in items[:most])
    more = len(items) - most
    return f"{words} and {more:,} more" if more > 0 else words or "none"


def spaced(items: Sequence[Any], most: int) -> list[Any]:
    """The first item and then every n-th, at most ``most`` of them: those to be named where not all can be.

    >>> spaced(range(5), 3), spaced([], 3)
    ([0, 2, 4], [])
    """
    return list(items[:: max(1, -(-len(items) // most))])


def light(colour: str, share: float = 0.45) -> tuple[float, float, float]:
    """A colour like ``#0072B2`` mixed with white, so that black text on it can be read; ``share`` is what stays of it.

    >>> light("#000000", 0.25)
    (0.75, 0.75, 0.75)
    """
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return (1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue))
