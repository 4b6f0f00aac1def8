"""One launch of the user's program: start it by srun, read what it prints, notice how it ends."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transom_slurm.nodesets import fold

from transomd.launch import sruns
from transomd.launch.aside import Aside
from transomd.launch.rundir import RunDir
from transomd.spec import JobSpec
from transomd.tce.memory.place import job_socket

TASK_SCRIPT = """\
#!/bin/bash
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" NODE_RANK="$((SLURM_PROCID / {a_node}))"
cd {workdir} || exit 1
{setup}
exec {command}
"""
SRUN_WRAPPER = """\
#!/bin/sh
# Steps of a job's own script stay on the nodes of this launch and beside the agents, and it is noted how they end.
exec {noting} {srun} --overlap {exclude}"$@"
"""
SRUN_LOG = "srun.log"
HOSTS = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that a launch is made of. ``nodes`` are in the order of their ranks: rank 0 runs on the first.

    ``arranged``: that is not Slurm's own order.
    """

    job_id: int
    attempt: int
    epoch: int
    nodes: tuple[str, ...]
    resume_step: int | None
    master_port: int
    spec: JobSpec
    env: Mapping[str, str] = field(repr=False)
    left_out: tuple[str, ...] = ()
    arranged: bool = False


def tasks_a_node(spec: JobSpec) -> int:
    """Return how many tasks srun starts on a node: one a rank, or one where torchrun makes the ranks."""
    return spec.tasks_per_node if spec.launcher == "srun" else 1


def log_of_srun(spec: JobSpec) -> str:
    """Return the name of the log that srun itself writes to: one of its own, or that of the job's script."""
    return sruns.SCRIPT_LOG if spec.script else SRUN_LOG


def slurm_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for srun in which only the configuration and the job's id are left of Slurm's variables.

    A launcher that was started inside another step would else hand that step's shape on to its own.
    """
    keep = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID")
    return {k: v for k, v in environ.items() if k in keep or not k.startswith(("SLURM_", "SBATCH_", "SRUN_", "PMI"))}


def program_env(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: the user's at submit time, the job's own, then what transom promises."""
    spec = plan.spec
    tasks = len(plan.nodes) * spec.tasks_per_node
    promised = {
        "TRANSOM_JOB_ID": str(plan.job_id),
        "TRANSOM_ATTEMPT": str(plan.attempt),
        "TRANSOM_EPOCH": str(plan.epoch),
        "TRANSOM_CHECKPOINT_DIR": spec.checkpoint.dir,
        "TRANSOM_CHECKPOINT_KEEP": str(spec.checkpoint.keep),
        "TRANSOM_CHECKPOINT_STORAGE_EVERY": str(spec.checkpoint.storage_every or ""),
        "TRANSOM_CHECKPOINT_REPLICA_EVERY": str(spec.checkpoint.replica_every or ""),
        "TRANSOM_CHECKPOINT_NODE_MTTF": str(spec.checkpoint.node_mttf or ""),
        "TRANSOM_RESUME_STEP": "" if plan.resume_step is None else str(plan.resume_step),
        "MASTER_ADDR": plan.nodes[0],
        "MASTER_PORT": str(plan.master_port),
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(spec.tasks_per_node),
        "NNODES": str(len(plan.nodes)),
        "PYTHONUNBUFFERED": "1",
    }
    slurm = {k: v for k, v in slurm_env(environ).items() if k.startswith("SLURM_")}
    return {**plan.env, **slurm, **spec.env, **promised}


def srun_argv(plan: LaunchPlan, task: Path, logs: Path) -> list[str]:
    """Return the srun call; it reads ``logs/hosts`` (:func:`hosts`) where the nodes are not in Slurm's own order.

    ``--kill-on-bad-exit=0``: when one rank fails, the others may still say why; the launcher ends them itself.
    """
    a_node = tasks_a_node(plan.spec)
    where = [f"--nodes={len(plan.nodes)}", f"--nodelist={','.join(plan.nodes)}"]
    if plan.arranged:  # the file says how many nodes there are; srun of 24.11 refuses to be told twice
        where = ["--distribution=arbitrary", f"--nodelist={logs / HOSTS}"]
    return [
        "srun",
        "--overlap",
        f"--ntasks={len(plan.nodes) * a_node}",
        f"--ntasks-per-node={a_node}",
        *where,
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mem=0",
        "--unbuffered",
        f"--job-name=epoch-{plan.epoch}",
        f"--output={str(logs).replace('%', '%%')}/rank-%5t.log",
        str(task),
    ]


def hosts(plan: LaunchPlan) -> str:
    """Return the node of every task, a line each.

    Slurm sorts the names of nodes. Only with ``--distribution=arbitrary`` are tasks where a file says (srun(1));
    SLURM_NODEID is by the sorted names even then (seen with 22.05).
    """
    return "".join(f"{node}\n" * tasks_a_node(plan.spec) for node in plan.nodes)


def task_script(spec: JobSpec) -> str:
    """Return the script that becomes one task: the job's setup lines, then its command.

    With ``pipefail``: the exit code of ``train | tee log`` would else be that of ``tee``, and a crash the end.
    """
    command = f"bash -o pipefail -c {shlex.quote(spec.command)}"
    if spec.launcher == "torchrun":
        rendezvous = (
            f'--nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node={spec.tasks_per_node}'
            ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0'
        )
        command = f"bash -o pipefail -c {shlex.quote(f'exec torchrun {rendezvous} {spec.command}')}"
    return TASK_SCRIPT.format(
        a_node=tasks_a_node(spec), workdir=shlex.quote(spec.workdir), setup="\n".join(spec.setup), command=command
    )


def script_env(plan: LaunchPlan) -> dict[str, str]:
    """Return Slurm's variables as a batch script that was given exactly this launch's nodes would see them."""
    nodes, a_node = len(plan.nodes), plan.spec.tasks_per_node
    return {
        "SLURM_JOB_NODELIST": fold(plan.nodes),
        "SLURM_NODELIST": fold(plan.nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * a_node),
        "SLURM_NPROCS": str(nodes * a_node),
        "SLURM_NTASKS_PER_NODE": str(a_node),
        "SLURM_TASKS_PER_NODE": f"{a_node}(x{nodes})" if nodes > 1 else str(a_node),
    }


class Program:
    """A running launch. ``rc`` is srun's exit code, None while it runs."""

    def __init__(self, run_dir: RunDir, plan: LaunchPlan) -> None:
        self.plan = plan
        self.logs = run_dir.logs(plan.epoch)
        self._run_dir = run_dir
        self._script_file = run_dir.root / "script"
        self.rc: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._waiter: asyncio.Task[None] | None = None

    async def start(self, environ: Mapping[str, str], disk: Aside) -> None:
        """Start the program. Raises OSError when srun, or the job's script, cannot be executed, or ``disk`` hangs."""
        argv, env, log = await disk.ask(self._prepare, environ)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
        self._waiter = asyncio.create_task(self._wait())

    def _prepare(self, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str], int]:
        """Write what the launch is made of; return the call, its environment, and where its output goes."""
        env = program_env(self.plan, environ)
        env["TRANSOM_AGENT"] = job_socket(self._run_dir.root, environ.get("SLURM_JOB_ID", ""))
        argv = self._script(env) if self.plan.spec.script else self._tasks()
        log = self.logs / log_of_srun(self.plan.spec)
        return argv, env, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _tasks(self) -> list[str]:
        task = self.logs / "task.sh"
        _executable(task, task_script(self.plan.spec))
        (self.logs / HOSTS).write_text(hosts(self.plan))
        return srun_argv(self.plan, task, self.logs)

    def _script(self, env: dict[str, str]) -> list[str]:
        """A job's own sbatch file runs here, once; the sruns in it see the nodes of this launch as their allocation."""
        tools = self.logs / "bin"
        tools.mkdir(exist_ok=True)
        srun = shutil.which("srun", path=env.get("PATH")) or "/usr/bin/srun"
        exclude = shlex.quote(f"--exclude={fold(self.plan.left_out)}") + " " if self.plan.left_out else ""
        noting = shlex.join([sys.executable, "-I", "-S", sruns.__file__, str(self.logs / sruns.SRUNS_LOG)])
        _executable(tools / "srun", SRUN_WRAPPER.format(noting=noting, srun=shlex.quote(srun), exclude=exclude))
        env.update(script_env(self.plan), PATH=f"{tools}:{env.get('PATH', os.defpath)}")
        return ["/bin/bash", "-c", 'cd "$1" && exec "$2"', "bash", self.plan.spec.workdir, str(self._script_file)]

    async def _wait(self) -> None:
        assert self._process is not None
        self.rc = await self._process.wait()

    async def stop(self) -> None:
        """End srun itself, which ends its step; ranks on nodes that answer are ended by their agents before."""
        if self._process is None or self.rc is not None:
            return
        self._signal(signal.SIGTERM)
        if not await self._ended(2.0):
            self._signal(signal.SIGKILL)
            await self._ended(2.0)

    def abandon(self) -> None:
        """Kill srun alone: its tasks are somebody else's to end."""
        if self._process is not None and self.rc is None:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    async def _ended(self, within_s: float) -> bool:
        assert self._waiter is not None
        done, _ = await asyncio.wait([self._waiter], timeout=within_s)
        return bool(done)


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)
