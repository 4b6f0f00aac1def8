"""Faults of what runs in the hub: slurmctld, and transomd with its database. The target's name is ``hub``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from transom_slurm.sandbox import processes, targets, watch
from transom_slurm.sandbox.config import ClusterSpec
from transom_slurm.sandbox.daemons import spawn, start_script
from transom_slurm.sandbox.errors import SandboxMissing
from transom_slurm.sandbox.waiting import until

CTLD_STOPPED_S, CTLD_RUNNING_S = 1.5, 0.3
START_TIMEOUT_S = 60.0


def ctld_kill(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """SIGKILL to slurmctld."""
    watch.stop_controller(spec, signal.SIGKILL)
    return "slurmctld killed: what it had not saved is lost"


def ctld_stop(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """SIGSTOP to slurmctld: its port accepts, and nobody answers."""
    processes.stop([_controller(spec)])
    return "slurmctld stopped: it accepts connections and does not answer"


def ctld_slow(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """slurmctld runs for a small part of the time."""
    _controller(spec)
    times = [str(CTLD_STOPPED_S), str(CTLD_RUNNING_S)]
    start_script(spec, "", "duty.py", *times, str(spec.layout.run / "slurmctld.pid"), says="slows")
    return f"slurmctld slowed: it runs {CTLD_RUNNING_S} s, then stands still for {CTLD_STOPPED_S} s"


def daemon_kill(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """SIGKILL to transomd; how it was started is kept, so that ``heal`` can start it again."""
    found = targets.transomd(spec)
    if not found:
        raise SandboxMissing("kill transomd", "none runs in this sandbox")
    pid = min(found)
    how = {"argv": targets.command_line(pid), "env": processes.environment(pid), "cwd": os.readlink(f"/proc/{pid}/cwd")}
    _keep(spec, daemon=how)
    processes.signal_each(found, signal.SIGKILL)
    until(lambda: not targets.transomd(spec), 5.0)
    return "transomd killed: the jobs go on"


def db_locked(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """Somebody else holds the write lock of transomd's database."""
    file = targets.database(spec)
    start_script(spec, "", "hold_db.py", str(file), says="locked")
    return f"{file} is locked: transomd reads and cannot write"


def db_gone(spec: ClusterSpec, _node: str, _argument: str) -> str:
    """The database is not at its path. A transomd that has it open keeps it, as every Unix process does."""
    file = targets.database(spec)
    os.rename(file, _aside(file))
    file.mkdir()
    _keep(spec, database=str(file))
    return f"{file} is moved away: a transomd that is started now does not find it"


def heal(spec: ClusterSpec) -> tuple[str, ...]:
    """Undo all of these and say what was done."""
    kept, done = _kept(spec), []
    helpers = targets.running(processes.owned(spec.layout.conf) - _of_nodes(spec), ["duty.py", "hold_db.py"])
    if helpers:
        processes.signal_each(helpers, signal.SIGTERM)
        until(lambda: not any(processes.state(pid) not in ("", "Z") for pid in helpers), 10.0)
        done.append("nothing slows slurmctld or holds the database any more")
    if file := kept.get("database"):
        os.rmdir(file)
        os.rename(_aside(Path(file)), file)
        done.append(f"{file} is back")
    done += _heal_controller(spec)
    if kept.get("daemon") and not targets.transomd(spec):
        _start_daemon(spec, kept["daemon"])
        done.append(f"transomd started, its log is {spec.layout.logs}/transomd.log")
    _state(spec).unlink(missing_ok=True)
    return tuple(done)


def _heal_controller(spec: ClusterSpec) -> list[str]:
    pid = watch.controller(spec)
    if not pid:
        watch.start_controller(spec, START_TIMEOUT_S)
        return ["slurmctld started"]
    if processes.state(pid) != "T":
        return []
    processes.signal_each([pid], signal.SIGCONT)
    return ["slurmctld continued"]


def _controller(spec: ClusterSpec) -> int:
    pid = watch.controller(spec)
    if not pid:
        raise SandboxMissing("harm slurmctld", "it does not run")
    return pid


def _of_nodes(spec: ClusterSpec) -> set[int]:
    return {pid for node in spec.names for pid in targets.node_pids(spec, node)} if spec.namespaces else set()


def _start_daemon(spec: ClusterSpec, how: dict[str, Any]) -> None:
    argv = [f"{spec.layout.lib}/hub", "env", "-C", how["cwd"], *how["argv"]]
    spawn(argv, how["env"], spec.layout.logs / "transomd.log")


def _aside(file: Path) -> Path:
    return file.with_name(file.name + ".aside")


def _state(spec: ClusterSpec) -> Path:
    return spec.layout.hub.root / "faults.json"


def _kept(spec: ClusterSpec) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = json.loads(_state(spec).read_text())
    except FileNotFoundError:
        return {}
    return kept


def _keep(spec: ClusterSpec, **more: Any) -> None:
    kept = {**_kept(spec), **more}
    with open(os.open(_state(spec), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(kept, file)
