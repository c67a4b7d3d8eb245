"""The doctor is shown machines that are made up, and must find what hurts there."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from recorded import run_of

from ddplab import checks, checkup, cli
from ddplab import events as ev
from ddplab.checks import Check
from ddplab.checkup import Checkup, doctor
from ddplab.errors import LaunchError
from ddplab.leftovers import Leftover

MIB, GIB = 2**20, 2**30
TORCH, LAB = Requirement("torch>=2.11"), Requirement("jupyterlab>=4.4; extra == 'notebook'")
LONG_NAME = "n" * 64

TRAPS = {
    "torch too old": (checks.check_package("torch", "2.9.1", TORCH), "bad", "2.9.1", "torch>=2.11"),
    "no torch": (checks.check_package("torch", None, TORCH), "bad", "missing", "pip install"),
    "no jupyterlab": (checks.check_package("jupyterlab", None, LAB), "note", "missing", "jupyterlab>=4.4"),
    "jupyterlab too old": (checks.check_package("jupyterlab", "3.6.0", LAB), "note", "3.6.0", "jupyterlab>=4.4"),
    "no ipykernel": (checks.check_package("ipykernel", None, None), "note", "missing", "ipykernel"),
    "no Gloo": (checks.check_backends([], "..."), "bad", "none", "Gloo"),
    "a GPU and torch for CPUs": (checks.check_gpus(0, ["H200"], None), "note", "H200", "build for CPUs"),
    "a hidden GPU": (checks.check_gpus(0, ["H200"], "13.0"), "note", "H200", "CUDA_VISIBLE_DEVICES"),
    "one core": (checks.check_cores(1, None), "note", "1", "never faster"),
    "a quota of half a core": (checks.check_cores(64, 0.5), "note", "0.5", "threads=1"),
    "1 GiB of memory": (checks.check_memory(GIB), "note", "1.0 GiB", "2 by spawn"),
    "400 MiB of memory": (checks.check_memory(400 * MIB), "bad", "400 MiB", "about 0 ranks"),
    "Docker's shared memory": (checks.check_shared_memory((64 * MIB, 64 * MIB), "linux"), "note", "64", "--shm-size"),
    "full shared memory": (checks.check_shared_memory((GIB, 0), "linux"), "bad", "0 MiB of 1.0 GiB", "num_workers=0"),
    "no shared memory": (checks.check_shared_memory(None, "linux"), "bad", "missing", "DataLoader"),
    "16 open files": (checks.check_open_files((16, 4096), 1), "bad", "16 (at most 4096)", "ulimit -n"),
    "a hard limit": (checks.check_open_files((16, 16), 1), "bad", "16 (at most 16)", "--ulimit nofile=4096"),
    "256 open files": (checks.check_open_files((256, 2**63 - 1), 24), "note", "no limit", "up to 24. For more"),
    "no socket in TMPDIR": (checks.check_temporary_folder("/t", "too long", GIB), "bad", "/t", "too long: set TMPDIR"),
    "a full TMPDIR": (checks.check_temporary_folder("/t", "", 3 * MIB), "note", "3 MiB free", "output"),
    "no loopback": (checks.check_loopback("unreachable"), "bad", "unreachable", "127.0.0.1"),
    "a long host name": (checks.check_host_name(LONG_NAME, ""), "note", "64", "DistBackendError"),
    "a host name unknown": (checks.check_host_name("vm", "not known"), "note", "vm: not known", "GLOO_SOCKET_IFNAME"),
    "leftovers": (checks.check_leftovers(3, 0), "note", "3 of earlier kernels", "end_leftovers=True"),
}

HARMLESS = {
    "torch of a local build": checks.check_package("torch", "2.14.1+cpu", TORCH),
    "a package without a bound": checks.check_package("ipykernel", "7.4.0", None),
    "Gloo": checks.check_backends(["gloo"], "..."),
    "two GPUs": checks.check_gpus(2, ["H200", "H200"], "13.0"),
    "no GPU": checks.check_gpus(0, [], "13.0"),
    "two cores": checks.check_cores(2, None),
    "a quota of more than the cores": checks.check_cores(2, 4.0),
    "2 GiB of memory": checks.check_memory(2 * GIB),
    "memory unknown": checks.check_memory(None),
    "a GiB of shared memory": checks.check_shared_memory((GIB, GIB), "linux"),
    "shared memory of macOS": checks.check_shared_memory(None, "darwin"),
    "1024 open files": checks.check_open_files((1024, 2**63 - 1), 120),
    "open files of Windows": checks.check_open_files(None, 64),
    "loopback": checks.check_loopback(""),
    "a host name of 63 characters": checks.check_host_name(LONG_NAME[:63], ""),
    "a temporary folder": checks.check_temporary_folder("/t", "", GIB),
    "leftovers that were ended": checks.check_leftovers(3, 3),
}


@pytest.fixture(autouse=True)
def _no_real_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here ends a process or removes a file that is not its own."""
    monkeypatch.setattr("ddplab.leftovers.find", list)
    monkeypatch.setattr("ddplab.leftovers.files", list)


@pytest.fixture(scope="module")
def here() -> Any:
    """What the doctor says of the machine that runs the tests."""
    return doctor()


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_told_with_advice(trap: str) -> None:
    """Each made-up machine gets the state, the finding and the advice that it needs."""
    check, state, found, advice = TRAPS[trap]
    assert (check.state, found in check.found, advice in check.advice) == (state, True, True), check


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_harmless_is_ok(case: str) -> None:
    """Nobody is warned of what does not hurt."""
    assert HARMLESS[case].state == "ok"


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, "ok"),
        ({"PATH": "/bin"}, "ok"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "bad"),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, "ok"),
        ({"TORCH_DISTRIBUTED_DEBUG": "1"}, "bad"),
        ({"TORCH_DISTRIBUTED_DEBUG": ""}, "bad"),
        ({"GLOO_DEVICE_TRANSPORT": "IBVERBS"}, "bad"),
        ({"GLOO_DEVICE_TRANSPORT": "TCP"}, "ok"),
        ({"OMP_PROC_BIND": "close"}, "bad"),
        ({"OMP_PROC_BIND": "false"}, "ok"),
        ({"OMP_NUM_THREADS": "8"}, "note"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "note"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "note"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "note"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "note"),
        ({"MASTER_PORT": "29500"}, "note"),
    ],
)
def test_a_variable_is_judged_by_its_value(environ: dict[str, str], state: str) -> None:
    """Of the environment exactly what changes a run is told."""
    assert [check.state for check in checks.check_variables(environ)] == [state]


def test_variables_with_one_advice_share_a_row() -> None:
    """What torchrun left in a shell is one finding, with the names and values of all of it."""
    (check,) = checks.check_variables({"RANK": "0", "WORLD_SIZE": "4", "HOME": "/"})
    assert check.found == "RANK=0 WORLD_SIZE=4"


def test_bounds_come_from_the_package_itself() -> None:
    """There is no second list of versions: pyproject.toml says what is needed, also of the extras."""
    required = checkup.requirements()
    assert required["torch"].specifier and required["nbval"].specifier
    assert (required["torch"].marker, bool(required["nbval"].marker)) == (None, True)


def test_a_wrong_start_method_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that would make each launch fail is named."""
    monkeypatch.setenv("DDPLAB_START_METHOD", "fork")
    check = checks.check_start_method()
    assert check.state == "bad" and "DDPLAB_START_METHOD='fork'" in check.advice


def test_a_chosen_start_method_tells_who_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow launches by a forgotten variable are explained."""
    monkeypatch.setenv("DDPLAB_START_METHOD", "spawn")
    assert checks.check_start_method().found == '"auto" is spawn by DDPLAB_START_METHOD'


def group(root: Path, path: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """The files of a system of 8 GiB with a group "a" and in it "a/b", where this process is."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {8 * MIB} kB\n")
    return tmp_path


def test_the_tightest_quota_counts(container: Path) -> None:
    """A limit of a group around the own one holds too."""
    group(container, "a", cpu_max="150000 100000")
    group(container, "a/b", cpu_max="max 100000")
    assert checkup.core_quota(container) == 1.5


def test_the_tightest_memory_limit_counts(container: Path) -> None:
    """What the group has left is less than what the system has; its file cache can be taken back."""
    group(container, "a", memory_max=str(GIB), memory_current=str(GIB // 2), memory_stat=f"anon 5\ninactive_file {MIB}")
    group(container, "a/b", memory_max="max", memory_current="5")
    assert checkup.available_bytes(container) == GIB // 2 + MIB


def test_without_groups_the_system_counts(container: Path) -> None:
    """A process in no container has no quota, and the memory that the system has."""
    assert (checkup.core_quota(container), checkup.available_bytes(container)) == (None, 8 * GIB)


def test_a_system_without_proc_is_not_known(tmp_path: Path) -> None:
    """macOS and Windows have none of these files."""
    assert (checkup.core_quota(tmp_path), checkup.available_bytes(tmp_path)) == (None, None)


def found(name: str) -> Any:
    return next(check for check in doctor().rows if check.name == name)


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is told in the table, which is there all the same."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found("backends").state == "bad" and "ModuleNotFoundError" in found("backends").found


def test_a_socket_that_cannot_be_made_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR of 80 characters is fine for files and too long for the forkserver."""

    def fail(**_: object) -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr(checkup, "Listener", fail)
    assert found("temporary folder").advice.startswith("AF_UNIX path too long: set TMPDIR")


def test_no_temporary_folder_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is read-only does not end the doctor."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    assert found("temporary folder").state == "bad"


def test_a_loopback_that_is_down_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback interface is tried, not looked up."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_connection", fail)
    assert found("loopback").state == "bad" and "Cannot assign" in found("loopback").found


def test_a_host_name_that_does_not_resolve_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo looks the name up, so the doctor does."""

    def fail(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert found("host name").state == "note" and "Name or service not known" in found("host name").found


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A name server that does not answer while the test runs."""
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answered.wait(60))
    yield
    answered.set()


@pytest.mark.usefixtures("silence")
def test_a_name_server_that_is_silent_is_not_waited_for() -> None:
    """A lookup can take half a minute; the doctor tells that and goes on."""
    assert checkup._name_problem("vm", limit_s=0.01) == "no answer within 0.01 s"


WORDS = [f"word{number:02}" for number in range(60)]


@pytest.mark.parametrize("shown", [repr, lambda checkup: checkup._repr_html_()], ids=["text", "html"])
def test_advice_is_shown_whole(shown: Any) -> None:
    """Cells of a table are cut at some length; advice goes on in the next row."""
    text = shown(Checkup((Check("memory", " ".join(WORDS), "bad", " ".join(WORDS)),)))
    assert [text.count(word) for word in WORDS] == [2] * len(WORDS)


def test_text_fits_a_terminal_of_120_columns(here: Any) -> None:
    """No line wraps where one prints the doctor."""
    assert max(map(len, repr(here).splitlines())) <= 120


def test_all_that_was_promised_is_looked_at(here: Any) -> None:
    """A row that is forgotten is missed."""
    names = {check.name for check in here.rows}
    assert names >= {"Python", *checkup.PACKAGES, "backends", "GPUs", "cores", "memory", "/dev/shm", "open files"}
    assert names >= {"start method", "temporary folder", "loopback", "host name", "environment", "leftovers"}


def test_the_verdict_names_what_is_bad() -> None:
    """One reads the last line first."""
    checkup = Checkup((Check("a", "", "ok"), Check("b", "", "note"), *[Check(name, "", "bad") for name in "cdc"]))
    assert (checkup.ok, repr(checkup).splitlines()[-1]) == (False, "bad: c, d, 1 note")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Leftover, Leftover, Path]:
    """A process that ends when told to, one that does not, and a file."""
    easy, hard = Leftover(101, 50, "python easy", "x"), Leftover(102, 60, "python hard", "x")
    file = tmp_path / "ddplab-output-x"
    file.touch()
    monkeypatch.setattr("ddplab.leftovers.find", lambda: [easy, hard])
    monkeypatch.setattr("ddplab.leftovers.files", lambda: [file])
    monkeypatch.setattr("ddplab.leftovers.end", lambda one: one is easy)
    return easy, hard, file


def test_leftovers_are_listed_and_left_alone(left: tuple[Leftover, Leftover, Path]) -> None:
    """Without being asked the doctor ends and removes nothing."""
    checkup = doctor()
    assert (checkup.leftovers, checkup.gone, left[2].exists()) == (left, (), True)
    assert all(text in repr(checkup) for text in ("101", "python easy", str(left[2]), "still there"))


def test_leftovers_are_ended_on_request(left: tuple[Leftover, Leftover, Path]) -> None:
    """What is gone and what is still there is told."""
    checkup = doctor(end_leftovers=True)
    assert (checkup.leftovers, checkup.gone, left[2].exists()) == (left, (left[0], left[2]), False)
    now = {line.split()[0]: line.split("  ")[-1].strip() for line in repr(checkup).splitlines() if "python " in line}
    assert now == {"101": "gone", "102": "still there"}


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("bad", 1)])
def test_the_command_prints_the_table(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script sees by the exit code whether something is bad."""
    checkup = Checkup((Check("cores", "1", state),))
    monkeypatch.setattr(cli, "doctor", lambda end_leftovers: checkup)
    assert (cli.main(["doctor"]), capsys.readouterr().out) == (code, f"{checkup!r}\n")


@pytest.mark.parametrize(("flags", "asked"), [([], False), (["--end-leftovers"], True)])
def test_the_command_ends_leftovers_only_with_its_flag(
    flags: list[str], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is handed on."""
    given = []
    monkeypatch.setattr(cli, "doctor", lambda end_leftovers: given.append(end_leftovers) or Checkup(()))
    cli.main(["doctor", *flags])
    assert given == [asked]


def test_a_room_of_machines_gets_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host, verdict, what was found, and the seconds of two launches; or why there was none."""
    monkeypatch.setattr(
        cli, "doctor", lambda _: Checkup((Check("cores", "2", "ok", ""), Check("torch", "2.14", "ok", "")))
    )
    monkeypatch.setattr("ddplab.launcher.launch", lambda *_, **__: run_of(ev.Result(0, 0.1, 0)))
    assert cli.main(["doctor", "--class"]) == 0
    host, *told = capsys.readouterr().out.strip().split(",")
    assert host and told[:2] == ['"nothing bad', ' 0 notes"'] and told[2:6] == ["", "2.14", "2", ""]

    def fails(*_: object, **__: object) -> None:
        raise LaunchError("no room")

    monkeypatch.setattr("ddplab.launcher.launch", fails)
    assert cli.main(["doctor", "--class"]) == 1
    assert "failed: no room" in capsys.readouterr().out
