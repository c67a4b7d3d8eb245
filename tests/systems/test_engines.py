"""The same function on Ray Train and on Spark's TorchDistributor: real clusters of this machine."""

from __future__ import annotations

import _thread
import http.server
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddplab import RankFailedError, launch, log

Need = Callable[[str], None]
pytestmark = pytest.mark.filterwarnings("default")  # the engines and Java leave sockets and pipes to the collector


@pytest.fixture(params=["ray", "spark"], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of an engine; its cluster on this machine serves all tests, and is shut down after them."""
    yield request.param
    if request.param == "ray" and (ray := sys.modules.get("ray")):
        ray.shutdown()
    if request.param == "spark" and "pyspark" in sys.modules:
        from pyspark.sql import SparkSession

        if session := SparkSession.getActiveSession():
            session.stop()


def train(learning_rate: float) -> tuple[list[Any], str, str]:
    """A few steps of DDP."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    torch.manual_seed(dist.get_rank())
    for step in range(5):
        loss = model(torch.randn(16, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step=step, loss=loss)
    print("trained", dist.get_rank())
    print("a word of warning", file=sys.stderr)
    return [parameter.detach() for parameter in model.module.parameters()], os.getcwd(), dist.get_backend()


def test_what_does_not_answer_is_refused_first(need: Need, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the command that mends it. This runs before any cluster is there."""
    need("ray")
    need("spark")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    (java := tmp_path / "bin" / "java").parent.mkdir()
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=other.handle_request).start()
    for engine, environ, told in (
        ("ray", {"RAY_ADDRESS": nobody}, rf"nothing answers at RAY_ADDRESS='{nobody}' .*ray start --head"),
        ("ray", {"RAY_ADDRESS": "ray://head:10001"}, "run the notebook on a node of Ray"),
        ("spark", {"SPARK_MASTER": f"spark://{nobody}"}, rf"nothing answers at SPARK_MASTER='{nobody}' .*start-master"),
        ("spark", {"JAVA_HOME": "/nowhere"}, "JAVA_HOME='/nowhere' has no bin/java: conda install .* or apt-get"),
        (
            "spark",
            {"JAVA_HOME": str(tmp_path)},
            r"Spark did not start \(.*\)\. It needs Java 17 or newer: conda install",
        ),
        ("ray", {"RAY_ADDRESS": f"127.0.0.1:{other.server_port}"}, "another service.*ray start --head"),
        ("spark", {"JAVA_HOME": "", "PATH": "/nowhere"}, "there is no java on the PATH"),
    ):
        with monkeypatch.context() as changed:
            for name, value in environ.items():
                changed.setenv(name, value)
            with pytest.raises(ValueError, match=f"^engine='{engine}': .*{told}"):
                launch(print, engine=engine)
    other.server_close()


def test_a_run_is_like_one_here(need: Need, engine: str) -> None:
    """Bit for bit the same weights and losses; what was printed, logged and called comes back as from local ranks."""
    need(engine)
    here = launch(train, 0.1, backend="gloo", view="quiet")
    there = launch(train, 0.1, engine=engine, view="quiet")
    for (mine, *others), (theirs, *also) in zip(here.results, there.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)) and others == also
    assert [row[0:2] + row[3:] for row in there.metrics] == [row[0:2] + row[3:] for row in here.metrics]
    assert sorted(there.output().splitlines()) == sorted(here.output().splitlines())
    names = [[call.name for call in run.collectives if call.name != "init_process_group"] for run in (here, there)]
    assert names[0] == names[1]  # but for the group, which Ray makes before the rank begins
    assert there.receipt and there.receipt.clean
    assert there.spec.engine == engine and f"engine='{engine}'" in repr(there)


def test_a_failure_has_its_root_cause(need: Need, engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The rank that raised is named with its line, and the engine adds no noise of its own."""
    need(engine)

    def fail() -> None:
        print("before")
        if dist.get_rank() == 1:
            raise ValueError("bad luck")
        dist.barrier()

    with pytest.raises(
        RankFailedError, match=r"^rank 1 of 2 failed first: ValueError in test_engines.py, line \d+: bad"
    ):
        launch(fail, engine=engine, view="static")
    shown = "".join(capfd.readouterr())
    assert set(re.findall(r"^(?!rank \d [|!] ).+", shown, re.MULTILINE)) <= {""}, shown


def test_an_interrupted_cell_leaves_no_rank(need: Need, engine: str) -> None:
    """Pressed while ranks hang in a group of their own making, with backend=None and the variables of torchrun."""
    need(engine)

    def hang(name: str) -> None:
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f"sum {total.item()} {os.environ[name]}")
        dist.barrier()
        if dist.get_rank() == 0:
            print("all are up")
        while dist.get_rank():
            pass
        dist.barrier()

    class Pressed:
        """A stream that presses the button when a rank says that it is up."""

        def write(self, text: str) -> int:
            if "all are up" in text:
                _thread.interrupt_main()
            return len(text)

        def flush(self) -> None:
            """Nothing is kept."""

    before, sys.stdout = sys.stdout, Pressed()  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            launch(hang, "GIVEN", engine=engine, backend=None, env={"GIVEN": "x"}, view="live")
    finally:
        sys.stdout = before
    run: Any = caught.value.run  # type: ignore[attr-defined]
    assert "sum 2.0 x" in run.output(1) and run.receipt.clean
    assert {failure.type for failure in run.failures} == {"Interrupted"}
    assert all(re.search(rf"^rank {rank} .* at test_engines.py, line ", run.report(), re.M) for rank in (0, 1))


def test_more_ranks_than_the_cluster_has(need: Need, engine: str) -> None:
    """They would wait for ever; it is said how many there are. Spark on this machine alone takes any number."""
    need(engine)
    if engine == "ray":
        import ray

        found = int(ray.cluster_resources()["CPU"])
        with pytest.raises(
            ValueError, match=rf"need as many CPUs, and the cluster has {found}\. Use world_size={found}"
        ):
            launch(print, engine="ray", world_size=found + 1)
