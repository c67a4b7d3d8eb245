"""Lets pytest choose cells by their tags: ``-m "not needs_gpu"``."""

from __future__ import annotations

from typing import Any


def pytest_itemcollected(item: Any) -> None:
    """Mark a cell with those of its tags that pyproject.toml lists as markers."""
    known = {line.partition(":")[0] for line in item.config.getini("markers")}
    for tag in item.cell.metadata.get("tags", []) if hasattr(item, "cell") else []:
        if tag in known:
            item.add_marker(tag)
