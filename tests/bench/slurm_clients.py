"""What one cycle of jobs() and nodes() costs through Slurm's commands and through pyslurm, on a real slurmctld.

    python tests/bench/slurm_clients.py [--nodes 10000] [--jobs 2000] [--cycles 20] [--pyslurm PYTHON]

Starts a slurmctld of its own with nodes that exist on paper only (State=CLOUD), fills it with jobs, and asks. PYTHON is
the interpreter that has pyslurm; without it only the commands are measured. Needs slurmctld and munged; any user.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pwd
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transom_slurm.client import SlurmClient
from transom_slurm.commands import CommandClient, Deadlines
from transom_slurm.pyslurm_client import PyslurmClient, choose_client
from transom_slurm.pyslurm_process import worker_argv
from transom_slurm.runner import clean_env

CONF = """\
ClusterName=paper
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/ctld.pid
SlurmctldLogFile={dir}/ctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,default_queue_depth=100000,sched_interval=2,sched_min_interval=0,max_sched_time=60
SlurmctldParameters=cloud_dns
PrivateData=cloud
ResumeProgram=/bin/true
SuspendProgram=/bin/true
ResumeTimeout=65000
SuspendTime=INFINITE
MaxArraySize={arrays}
MaxJobCount=100000
NodeName=n[1-{nodes}] State=CLOUD CPUs=64 RealMemory=500000 Gres=gpu:8
GresTypes=gpu
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODES_PER_JOB = 4
TICK = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def controller(nodes: int, jobs: int) -> Iterator[tuple[dict[str, str], int]]:
    """The environment of a Slurm with so many nodes and jobs, and the pid of its slurmctld."""
    folder = Path(tempfile.mkdtemp(prefix="tbench-"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if _release() >= (23, 11) else "")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        user = pwd.getpwuid(os.geteuid()).pw_name
        text = CONF.format(dir=folder, port=port, user=user, nodes=nodes, arrays=jobs + 1)
        (folder / "slurm.conf").write_text(text)
        munged = [f"--{kind}={folder}/munge.{kind.split('-')[0]}" for kind in ("key-file", "socket", "pid-file")]
        munged += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
        daemons.append(_spawn(["munged", *munged], folder))
        _until(lambda: (folder / "munge.socket").exists(), "munged")
        os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
        daemons.append(_spawn(["slurmctld", "-D", "-f", f"{folder}/slurm.conf"], folder))
        env = clean_env()
        _until(lambda: _slurm(env, "scontrol", "ping").returncode == 0, "slurmctld")
        _fill(env, jobs)
        yield env, daemons[-1].pid
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
        shutil.rmtree(folder)


def _release() -> tuple[int, int]:
    said = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    major, minor = said.split(".")[:2]
    return int(major), int(minor)


def _spawn(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    program = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or argv[0]
    with open(folder / f"{argv[0]}.out", "wb") as out:
        return subprocess.Popen([program, *argv[1:]], stdout=out, stderr=out)


def _slurm(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def _until(true: Any, what: str, seconds: float = 900.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not ready within {seconds:g} s")
        time.sleep(0.5)


def _fill(env: dict[str, str], jobs: int) -> None:
    """Two arrays with long comments; each of their tasks that has started is a record of its own."""
    for half in (jobs // 2, jobs - jobs // 2):
        words = (
            f"--array=1-{half}",
            f"-N{NODES_PER_JOB}",
            "--exclusive",
            "-o/dev/null",
            "--comment=transom:17:3",
            "-H",
        )
        done = _slurm(env, "sbatch", *words, "-J", "transom-17-3", "--wrap=true")
        if done.returncode:
            raise SystemExit(done.stderr)
        _slurm(env, "scontrol", "release", done.stdout.split()[-1])
    argv = ("squeue", "-h", "-a", "-t", "configuring,running", "-o", "%i")
    _until(lambda: len(_slurm(env, *argv).stdout.split()) >= jobs, "the jobs")


def _cpu(pid: int) -> float:
    """Seconds of processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def _rss(pid: int) -> float:
    """MiB of memory of a process now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _peak(*argv: str) -> float:
    """MiB that a command has at its height, looked at while it runs (wait4 would count this process before exec)."""
    height = 0
    with subprocess.Popen(argv, env=clean_env(), stdout=subprocess.DEVNULL) as command:
        while command.poll() is None:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{command.pid}/status").read_text().splitlines()
                height = max(height, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
    return height / 1024


def _used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


async def measure(client: SlurmClient, cycles: int, ctld: int) -> dict[str, float]:
    """Costs of one cycle: milliseconds of wall and processor time, by process; MiB of memory."""
    pid = (lambda: client.worker.pid) if isinstance(client, PyslurmClient) else (lambda: None)
    for _ in range(3):
        jobs, nodes = await client.jobs(), await client.nodes()
    worker = pid()
    first = _rss(worker) if worker else 0.0
    began, before = time.perf_counter(), [_used(resource.RUSAGE_SELF), _used(resource.RUSAGE_CHILDREN), _cpu(ctld)]
    asked = _cpu(worker) if worker else 0.0
    walls = []
    for _ in range(cycles):
        start = time.perf_counter()
        await client.jobs()
        await client.nodes()
        walls.append(time.perf_counter() - start)
    if worker != pid():
        raise SystemExit("the worker was lost on the way")
    spent = [_used(resource.RUSAGE_SELF), _used(resource.RUSAGE_CHILDREN), _cpu(ctld)]
    helper = _cpu(worker) - asked if worker else spent[1] - before[1]
    return {
        "jobs": len(jobs),
        "nodes": len(nodes),
        "wall_ms_median": 1000 * sorted(walls)[len(walls) // 2],
        "wall_ms_worst": 1000 * max(walls),
        "daemon_cpu_ms": 1000 * (spent[0] - before[0]) / cycles,
        "helper_cpu_ms": 1000 * helper / cycles,
        "slurmctld_cpu_ms": 1000 * (spent[2] - before[2]) / cycles,
        "daemon_rss_mib": _rss(os.getpid()),
        "helper_rss_mib": _rss(worker) if worker else _peak("scontrol", "-o", "-a", "show", "nodes"),
        "helper_rss_growth_mib": _rss(worker) - first if worker else 0.0,
        "seconds": time.perf_counter() - began,
    }


async def _one(name: str, python: str, cycles: int, ctld: int) -> dict[str, float]:
    commands = CommandClient(deadlines=Deadlines(query=60.0))
    argv = worker_argv(python)
    client, _ = await choose_client(
        commands, "pyslurm" if name == "pyslurm" else "commands", argv=argv, deadline_s=60.0
    )
    try:
        return await measure(client, cycles, ctld)
    finally:
        if isinstance(client, PyslurmClient):
            await client.close()


def main() -> None:
    """Print a table of both clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--pyslurm", default="", metavar="PYTHON")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asyncio.run(_one(args.one[0], args.pyslurm, args.cycles, int(args.one[1])))))
        return
    table = {}
    with controller(args.nodes, args.jobs) as (_env, ctld):
        for name in ("commands", "pyslurm") if args.pyslurm else ("commands",):
            # A process of its own each: memory is measured, too.
            argv = [sys.executable, __file__, "--one", name, str(ctld), "--cycles", str(args.cycles)]
            done = subprocess.run([*argv, "--pyslurm", args.pyslurm], stdout=subprocess.PIPE, check=True)
            table[name] = json.loads(done.stdout)
    print(f"{'':24}" + "".join(f"{name:>12}" for name in table))
    for key in next(iter(table.values())):
        print(f"{key:24}" + "".join(f"{table[name][key]:12.1f}" for name in table))


if __name__ == "__main__":
    main()
