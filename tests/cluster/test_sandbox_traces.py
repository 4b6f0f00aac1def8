"""``down`` leaves nothing, whatever ran and wherever ``up`` was killed, and ends nothing that is not the sandbox's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ENOUGH_S
from transom_slurm.sandbox import Sandbox, SandboxError, processes
from transom_slurm.sandbox.waiting import until

pytestmark = pytest.mark.cluster

UP = "import sys; from transom_slurm.sandbox import Sandbox; Sandbox.up(3, sys.argv[1])"
_QUIET = "</dev/null >/dev/null 2>&1"
MILESTONES = (
    "sandbox.json",
    "etc/slurm.conf",
    "nodes/n1/bin",
    "etc/id_ed25519",
    "etc/ssh_config",
    "hub/init.json",
    "hub/init.pid",
    "run/munged.hub.pid",
    "run/slurmctld.pid",
    "nodes/n1/init.json",
    "nodes/n1/init.pid",
    "nodes/n3/init.pid",
    "run/munged.n1.pid",
    "nodes/n2/slurmd.pid",
    "nodes/n3/sshd.pid",
)


def _host() -> set[str]:
    """Mounts, links and addresses of the host."""
    links, addresses = (subprocess.check_output(["ip", "-o", what], text=True) for what in ("link", "addr"))
    return {*Path("/proc/self/mounts").read_text().splitlines(), *links.splitlines(), *addresses.splitlines()}


def _ours(line: str, directory: Path) -> bool:
    """Whether a mount, link or address could be a sandbox's: others may change the host meanwhile."""
    marks = (
        str(directory),
        " /usr/bin ",
        " /run ",
        " /etc/hosts ",
        " /etc/shadow ",
        " /var/log ",
        "bridge",
        "eth0",
        "10.77.",
    )
    return any(mark in line for mark in marks)


def _processes(directory: Path) -> list[str]:
    """Living processes that mention the directory in their environment or command line, save for ours."""
    found = []
    for pid in set(processes.every_pid()) - processes.ourselves():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in text:
            found.append(f"{pid} {text.replace(bytes(1), b' ')[:200]!r}")
    return found


def _namespaces(pids: set[int]) -> set[str]:
    return {processes.namespace(pid, kind) for pid in pids for kind in ("net", "pid", "mnt", "uts", "ipc")} - {""}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where a sandbox may be; nothing of it and of the host may have changed at the end."""
    before, place = _host(), tmp_path / "s"
    yield place
    Sandbox.clear(place)
    assert not place.exists()
    assert until(lambda: not _processes(place), ENOUGH_S), _processes(place)
    assert not [line for line in _host() - before if _ours(line, place)]


def test_down_ends_jobs_daemons_sessions_and_namespaces(directory: Path) -> None:
    sandbox = Sandbox.up(3, directory)
    sandbox.run(["sbatch", "-N3", "-o/dev/null", "--wrap", "srun setsid sleep 300"])
    sandbox.run(["sh", "-c", f"setsid --fork sleep 300 {_QUIET}"])
    sandbox.run(["sh", "-c", f"setsid --fork env -i /bin/sleep 300 {_QUIET}"])
    sandbox.run(["sh", "-c", f"setsid --fork env -i /bin/sleep 300 {_QUIET}"], node="n2")
    sandbox.run(["ssh", "-F", str(sandbox.ssh_config), "n3", f"setsid --fork sleep 300 {_QUIET}"])
    assert until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-o%T"]).stdout, ENOUGH_S)
    ours = processes.owned(sandbox.directory / "etc/slurm.conf")
    spaces = _namespaces(ours) - _namespaces({os.getpid()})
    assert len(spaces) >= 3 * 5
    sandbox.down()
    assert not directory.exists()
    alive = {pid for pid in processes.every_pid() if processes.state(pid) != "Z"}
    assert not spaces & _namespaces(alive)


def test_down_spares_a_shell_that_only_points_at_the_sandbox(directory: Path) -> None:
    sandbox = Sandbox.up(1, directory)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **sandbox.env()}) as shell:
        sandbox.down()
        assert shell.poll() is None
        shell.kill()


def test_down_works_with_nodes_without_power_and_daemons_dead(directory: Path) -> None:
    sandbox = Sandbox.up(3, directory)
    sandbox.fail("n1", "power")
    sandbox.fail("n2", "slurmd-kill")
    sandbox.fail("n3", "net-cut")
    sandbox.stop_controller(kill=True)
    sandbox.down()


def test_down_twice_and_of_nothing(directory: Path) -> None:
    assert not Sandbox.clear(directory)
    Sandbox.up(1, directory).down()
    assert not Sandbox.clear(directory)


def test_down_never_removes_a_directory_that_is_no_sandbox(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SandboxError, match="nothing is up"):
        Sandbox.clear(tmp_path)
    with pytest.raises(SandboxError, match="not empty"):
        Sandbox.up(1, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def _start_until(directory: Path, milestone: str) -> subprocess.Popen[bytes]:
    """``up`` in a process of its own, caught as soon as it has got so far."""
    process = subprocess.Popen([sys.executable, "-c", UP, str(directory)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + ENOUGH_S
    while not (directory / milestone).exists():
        assert process.poll() is None, f"it ended before {milestone}"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return process


@pytest.mark.parametrize("milestone", MILESTONES)
def test_down_after_up_was_killed(directory: Path, milestone: str) -> None:
    with _start_until(directory, milestone) as process:
        process.kill()
    with pytest.raises(SandboxError):
        Sandbox.up(1, directory)
    assert Sandbox.clear(directory)


@pytest.mark.parametrize("milestone", ["etc/slurm.conf", "run/slurmctld.pid", "nodes/n3/init.pid"])
def test_up_cleans_up_when_interrupted(directory: Path, milestone: str) -> None:
    with _start_until(directory, milestone) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(ENOUGH_S) != 0
    assert not directory.exists()


def test_no_second_command_meddles_with_a_start(directory: Path) -> None:
    with _start_until(directory, "hub/init.pid") as process:
        processes.stop([process.pid])
        with pytest.raises(SandboxError, match="another command"):
            Sandbox.clear(directory)
        process.send_signal(signal.SIGCONT)
        assert process.wait(ENOUGH_S) == 0
    assert len(Sandbox.attach(directory).nodes) == 3
