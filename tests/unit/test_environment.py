"""The files that say what is needed agree with one another: conda is never run here, so they are compared."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PYPI_NAME = {"pytorch": "torch"}  # where conda-forge has another one
Ranges = dict[str, SpecifierSet]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def ranges(requirements: list[str]) -> Ranges:
    return {r.name.lower(): r.specifier for r in map(Requirement, requirements)}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(text("pyproject.toml"))["project"]
    return found


@pytest.fixture(scope="module")
def for_readers(project: dict[str, Any]) -> Ranges:
    """What one needs to run the notebooks and to check them, as pyproject.toml has it."""
    extras = project["optional-dependencies"]
    return ranges(project["dependencies"] + extras["notebook"]) | {"nbval": ranges(extras["dev"])["nbval"]}


@pytest.fixture(scope="module")
def everything(project: dict[str, Any]) -> Ranges:
    extras = project["optional-dependencies"].values()
    return ranges([*project["dependencies"], *chain.from_iterable(extras)])


@pytest.fixture(scope="module")
def conda() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text("environment.yml"))
    return found


@pytest.fixture(scope="module")
def from_conda(conda: dict[str, Any]) -> Ranges:
    found = ranges([line for line in conda["dependencies"] if isinstance(line, str)])
    return {PYPI_NAME.get(name, name): specifier for name, specifier in found.items()}


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in text("constraints.txt").splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_conda_gets_the_packages_of_pyproject(from_conda: Ranges, for_readers: Ranges) -> None:
    assert from_conda.keys() - {"python", "pip"} == set(for_readers)


def test_conda_gets_the_version_ranges_of_pyproject(from_conda: Ranges, for_readers: Ranges) -> None:
    assert {name: from_conda[name] for name in for_readers} == for_readers


def test_conda_gets_the_python_of_pyproject(from_conda: Ranges, project: dict[str, Any]) -> None:
    assert from_conda["python"] == SpecifierSet(project["requires-python"])


def test_conda_gets_the_project_itself_through_pip(conda: dict[str, Any]) -> None:
    assert conda["channels"][0] == "conda-forge"
    assert conda["dependencies"][-1] == {"pip": ["-e ."]}


def test_every_requirement_has_a_lower_bound_and_no_upper_one(everything: Ranges) -> None:
    wrong = {name: str(r) for name, r in everything.items() if [part.operator for part in r] != [">="]}
    assert wrong == {}


def test_every_requirement_is_pinned_within_its_range(everything: Ranges, pins: dict[str, str]) -> None:
    assert everything.keys() <= pins.keys()
    assert {name: pins[name] for name, r in everything.items() if pins[name] not in r} == {}


def test_constraints_hold_pins_and_nothing_of_this_machine() -> None:
    wrong = [line for line in text("constraints.txt").splitlines() if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]
    assert wrong == []
    assert "ddplab==" not in text("constraints.txt")


def test_constraints_are_sorted_and_name_each_package_once(pins: dict[str, str]) -> None:
    lines = [line.lower() for line in text("constraints.txt").splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    assert len(lines) == len(pins)


def test_the_workflow_runs_make_test_on_the_oldest_python(project: dict[str, Any]) -> None:
    job = yaml.safe_load(text(".github/workflows/test.yml"))["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test", "make systems"]
    assert f">={job['strategy']['matrix']['python-version'][0]}" == project["requires-python"]


def test_ci_runs_make_test_and_little_else() -> None:
    commands = [line for line in text(".ci/run").splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make chromium", "make test", "make systems"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
