"""Wrong solutions of the tasks, each with what must be said of it; ``wrongNN.py`` has those of a chapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WRONG: list[tuple[str, str, Callable[..., Any]]] = []


def wrong(number: str, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Keep a wrong solution of a task."""
    return lambda fn: WRONG.append((number, words, fn)) or fn
