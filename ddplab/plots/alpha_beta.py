"""The time of a message as a start-up time and a time for each byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ddplab.plots.values import in_seconds

__all__ = ["Fit", "fit_alpha_beta"]


class Fit(NamedTuple):
    """The line seconds = ``alpha_s`` + ``beta_s_per_byte`` * bytes.

    >>> print(Fit(85e-6, 0.5e-9), Fit(0.002, 0.0), sep=", ")
    85 µs + bytes / 2 GB/s, 2 ms
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        """What the line gives for a message of ``num_bytes``.

        >>> Fit(0.5, 0.25).seconds(2)
        1.0
        """
        return self.alpha_s + self.beta_s_per_byte * num_bytes

    def __str__(self) -> str:
        per_byte = f" + bytes / {1e-9 / self.beta_s_per_byte:.3g} GB/s" if self.beta_s_per_byte else ""
        return f"{in_seconds(self.alpha_s)}{per_byte}"


def fit_alpha_beta(rows: Iterable[tuple[float, float]]) -> Fit:
    """Fit seconds = alpha + beta * bytes to rows (bytes, seconds): a start-up time, and a time for each byte.

    Least squares of the *relative* errors, (line - seconds) / seconds: without that the few largest
    messages would decide alone. Where alpha or beta would be below 0 it is set to 0, and the other fitted
    alone. The model is R. Hockney's (1994). Raises ``ValueError`` for fewer than two sizes, and for seconds
    that are not above 0.

    >>> print(fit_alpha_beta([(0, 0.002), (1e6, 0.003), (1e7, 0.012)]))
    2 ms + bytes / 1 GB/s
    """
    points = np.array(list(rows), dtype=np.float64).reshape(-1, 2)
    size, time_s = points[:, 0], points[:, 1]
    if len(set(size)) < 2 or not (time_s > 0).all():
        raise ValueError("fit_alpha_beta: give rows (bytes, seconds) of two sizes or more, with seconds above 0")
    beta, alpha = np.polyfit(size, time_s, 1, w=1 / time_s)
    if alpha < 0:
        alpha, beta = 0.0, (size / time_s).sum() / ((size / time_s) ** 2).sum()
    elif beta < 0:
        alpha, beta = (1 / time_s).sum() / (1 / time_s**2).sum(), 0.0
    return Fit(float(alpha), float(beta))
