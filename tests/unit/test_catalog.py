"""The catalogue of causes: each entry is whole, is triggered by its example and not by its near miss."""

import importlib
import importlib.resources
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

from ddplab import catalog, faults, logs
from ddplab.explanation import explain

ENTRIES = catalog.entries()
TOLD = [name for name, entry in ENTRIES.items() if not entry.silent]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("id", TOLD)
def test_an_example_triggers_its_entry_first(id: str) -> None:
    """The example of an entry is explained by it."""
    assert explain(ENTRIES[id].example).id == id


@pytest.mark.parametrize("id", TOLD)
def test_a_near_miss_does_not(id: str) -> None:
    """A text that only looks like it is not explained by the entry, not even as a second."""
    lines = logs.read(ENTRIES[id].near_miss)
    assert id not in [one.entry.id for one in catalog.candidates(lines)]


@pytest.mark.parametrize("id", ENTRIES)
def test_an_entry_is_whole(id: str) -> None:
    """Every field has the form that the reader of an explanation expects."""
    entry = ENTRIES[id]
    names = [id, entry.fault or "none"]
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert entry.category in catalog.CATEGORIES and entry.steps
    texts = [entry.sentence, entry.cause, *([entry.second] if entry.second else [])]
    assert all(text.endswith(".") and not text.endswith("..") for text in texts)
    if entry.silent:
        assert entry.sentence.startswith("No error, but") and entry.fault and not entry.weight
        assert not (entry.any or entry.all or entry.example or entry.near_miss)
    else:
        assert 0 < entry.weight <= 90 and entry.classes and entry.source
        assert entry.any or entry.all or id == "peer-raised"


@pytest.mark.parametrize("id", TOLD)
def test_an_example_is_seen_in_a_long_log(id: str) -> None:
    """Each cause has a line that the digest of a long log keeps."""
    dull = "".join(f"step {step} loss 0.5\n" for step in range(10_000))
    kept = logs.digest(io.BytesIO(f"{dull}{ENTRIES[id].example}\n{dull}".encode()))
    assert set(ENTRIES[id].example.splitlines()) <= {line for _, line in kept} and len(kept) < 20_000


def test_every_fault_that_an_entry_names_exists() -> None:
    """See it happen: the name is one that ``faults.run`` takes."""
    named = {entry.fault for entry in ENTRIES.values() if entry.fault}
    assert named <= set(faults.names())


def test_the_catalogue_is_installed_with_the_package() -> None:
    """The data file is found beside the modules."""
    assert importlib.resources.files("ddplab").joinpath("catalog.toml").is_file()


def test_capitals_blanks_and_quotes_do_not_count() -> None:
    """A star is a gap within limits, a hash a number."""
    view = catalog.View(logs.read("Rank 12 HAS\n  `lost' it"))
    assert list(view.found("rank # has lost it")) and list(view.found("rank * lost it"))
    assert not list(view.found("rank lost"))
    far = catalog.View(logs.read("rank " + "x" * 300 + " lost"))
    assert not list(far.found("rank * lost"))


@pytest.mark.parametrize("id", ENTRIES)
def test_a_pattern_looks_only_so_far(id: str) -> None:
    """A gap without a limit would make a long log slow."""
    entry = ENTRIES[id]
    for pattern in (*entry.any, *entry.all, *entry.none, *entry.hints):
        if pattern.startswith("re:"):
            assert not re.search(r"(?<!\\)\.[*+]|\\[wS][*+]", pattern)
            assert pattern == logs.squeeze(pattern).replace("(?p<", "(?P<")


FRAME = '  File "/site/torch/{0}", line 7, in call\n    return fn()'


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (FRAME.format("nn/parallel/distributed.py"), "ddp_usage"),
        (FRAME.format("distributed/fsdp/wrap.py"), "ddp_usage"),
        (FRAME.format("utils/data/dataloader.py"), "sampler_data"),
        (FRAME.format("distributed/rpc/api.py"), "rpc"),
        (FRAME.format("distributed/rendezvous.py"), "initialisation"),
        (FRAME.format("distributed/distributed_c10d.py"), "collective_mismatch"),
        ("frame #1: c10d::Reducer::mark_variable_ready(unsigned long) + 0x4cd", "ddp_usage"),
        ("frame #3: c10d::ProcessGroupNCCL::WorkNCCL::f() + 0x4cd (libtorch_cuda.so)", "nccl_backend"),
    ],
)
def test_where_nothing_else_tells_files_and_names_give_the_kind(text: str, category: str) -> None:
    """It is told as a kind, without a cause; an own exception behind it counts more."""
    told = explain(text)
    assert (told.category, told.certain) == (category, False)
    assert told.sure == "the kind of error, not its cause" and "does not" in told.sentence
    assert told.steps[0].startswith("Get the whole text")
    assert explain(f'{text}\n  File "mine.py", line 3, in f\nKeyError: 3').category != category


def test_a_message_that_is_cut_off_is_still_found() -> None:
    """With more than half of it left; but it is not told as certain."""
    whole = "RuntimeError: Default process group has not been initialized"
    assert explain(whole).certain
    cut = explain(whole[:-8])
    assert cut.id == "no-init" and not cut.certain
    assert not explain(whole[:-26]).known


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that counts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_explain")


def test_most_public_reports_are_explained_rightly(bench: ModuleType) -> None:
    """The target on the collected reports: 97 % of the categories, 92 % of the causes."""
    category, cause = bench.accuracy(list(bench.judged()))
    assert category >= 0.97 and cause >= 0.92


def test_fresh_reports_stay_explained(bench: ModuleType) -> None:
    """What was learnt from reports that nobody had tuned for is not lost again."""
    category, cause = bench.accuracy(list(bench.fresh()))
    assert category >= 0.97 and cause >= 0.94


def test_nothing_is_claimed_of_other_texts(bench: ModuleType) -> None:
    """What has nothing to do with it stays unknown, and what says little is not answered in a confident voice."""
    assert not list(bench.claimed())
