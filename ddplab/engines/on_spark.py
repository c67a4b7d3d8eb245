"""Ranks as processes of Spark's TorchDistributor."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ddplab.engines.on_ray import answers, missing

__all__ = ["Spark"]

LOCAL = ("local", "local[")
WORKERS_S = 10.0  # for the workers of a cluster to come
JAVA = "conda install -c conda-forge openjdk=17, or apt-get install openjdk-17-jre-headless."


class Spark:
    """The cluster of the active session, or of Spark's own settings, or this machine.

    A session that is started here serves all launches to come, and ends with this process or by its ``stop()``.
    """

    name = "spark"

    def __init__(self, world_size: int, backend: str | None, say: Callable[[str], None]) -> None:
        try:
            import pandas  # noqa: F401 - what TorchDistributor needs to run on a cluster
            import pyarrow  # noqa: F401
            from pyspark.ml.torch.distributor import TorchDistributor
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise missing("spark", "PySpark, or what it needs,", error) from None
        session: Any = SparkSession.getActiveSession()
        if not session:
            say("ddplab starts a session of Spark: ten seconds or more, once")
            session = _start(world_size)
        context = session.sparkContext
        is_local = context.master == LOCAL[0] or context.master.startswith(LOCAL[1])
        deadline = time.monotonic() + WORKERS_S
        while not is_local and context.defaultParallelism < world_size:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"engine='spark': {world_size} ranks need as many cores at a time, and {context.master} has "
                    f"{context.defaultParallelism}. Use fewer ranks, or add workers."
                )
            time.sleep(0.1)  # those of a session that has just started come one by one
        self.address: str = context.getConf().get("spark.driver.host")
        try:
            self._distributor = TorchDistributor(world_size, local_mode=is_local, use_gpu=backend == "nccl")
        except RuntimeError as error:  # Spark has no GPUs, or must encrypt
            raise ValueError(f"engine='spark': {error} backend='gloo' needs no GPU.") from None
        self._distributor.logger.setLevel(logging.WARNING)

    def run(self, world_size: int, visit: Callable[[], None]) -> None:
        """Call ``visit`` in each process: of a torchrun on this machine, or of one in each task of the cluster."""
        self._distributor.run(visit)


def _start(world_size: int) -> Any:
    """A session on the master of Spark's own settings, else on this machine."""
    from pyspark.sql import SparkSession

    home = os.environ.get("JAVA_HOME")
    if not shutil.which("java", path=os.path.join(home, "bin") if home else None):
        where = f"JAVA_HOME={home!r} has no bin/java" if home else "there is no java on the PATH"
        raise ValueError(f"engine='spark': Spark runs on Java 17 or newer, and {where}: {JAVA}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    master = os.environ.get("SPARK_MASTER")
    if master and master.startswith("spark://"):
        answers("spark", "SPARK_MASTER", master.removeprefix("spark://"), "start-master.sh")
    builder = SparkSession.builder.master(master or f"local[{world_size}]").appName("ddplab")
    if not master:
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    with _silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return builder.config("spark.ui.enabled", "false").getOrCreate()
        except Exception as error:
            told = f"Spark did not start ({str(error).splitlines()[0]:.200}). It needs Java 17 or newer"
            raise ValueError(f"engine='spark': {told}: {JAVA}") from None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let what is started here, the Java machine, write its many warnings to nowhere, for as long as it lives."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
