"""A training job loses a node and goes on: ``make demo``.

Starts a private, real Slurm on this machine (only its GPUs are simulated) and transomd on it, trains a small language
model on four nodes, cuts the power of one, and shows what transom sees, decides and does. Then it proves that the loss
of every step is, bit for bit, that of the same job without the fault, and removes everything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_follow import Follower, Seen
from demo_report import Report, print_report, report
from demo_room import Interrupted, Room, Trouble, ignore_signals, interrupt_once
from demo_show import Show
from rich.console import Console
from transom_slurm.sandbox import SandboxError

from transomd.errors import TransomError

NODES, SPARES = 4, 1
DEADLINE_S = 240.0
"""How long one job may take before something is wrong."""
DRAIN_S = 30.0
"""How long after the job's end the drain may still come: slurmctld has to confirm the loss first."""
TAIL_LINES = 15
JOB = """\
name: tinylm
command: {command} --step-time {step_time:g}
nodes: {nodes}
spares: {spares}
env: {{OMP_NUM_THREADS: "1"}}
checkpoint: {{every: 1, storage_every: {every}}}
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How long the job trains: steps in all, steps between those that storage gets, seconds that a step takes at least.

    Every step is saved, in the memory of its node and of another one.
    """

    steps: int
    every: int
    step_time: float

    @property
    def command(self) -> str:
        """The program's command; a step takes what it takes."""
        return f"python train.py --steps {self.steps} --checkpoint-every 1"

    @property
    def job(self) -> str:
        """The job file."""
        return JOB.format(command=self.command, step_time=self.step_time, nodes=NODES, spares=SPARES, every=self.every)


class Demo:
    """The acts, in a room."""

    def __init__(self, room: Room, show: Show, size: Size) -> None:
        self.room, self.show, self.size = room, show, size

    def play(self) -> Report:
        """Play it from beginning to end. Raises Trouble, SandboxError or TransomError."""
        self._set_up()
        self.show.title("1. The job without a fault: its losses are those to match")
        command = f"command={self.size.command}"
        expected = self._run_job(Seen(self.size.steps), "--set", "name=no-fault", "--set", command)
        losses = {step.step: step.loss_hex for step in expected.steps}
        self.show.block(f"{len(losses)} losses noted, to the last bit")
        self.show.title("2. The same job; in the middle a node loses its power")
        seen = self._run_job(Seen(self.size.steps, expected=losses), hurt=self._cut_power)
        self.show.title("3. What transom says of it afterwards")
        self._say("status", "tinylm")
        self.show.line()
        self._say("nodes")
        found = report(seen)
        print_report(self.show, found, seen)
        return found

    def _set_up(self) -> None:
        show = self.show
        show.line()
        show.line("A training job loses a node and goes on", "bold")
        show.line()
        nodes = NODES + SPARES
        show.command("transom", "sandbox", "up", "--nodes", str(nodes))
        began = time.monotonic()
        sandbox = self.room.up(nodes)
        took, version = time.monotonic() - began, "{}.{:02d}".format(*sandbox.spec.slurm_version)
        show.block(
            f"a private, real Slurm {version} with {nodes} nodes, up in {took:.1f} s; only its GPUs are simulated"
        )
        show.command("transomd")
        self.room.start_daemon()
        show.block("watches that Slurm; its state is in SQLite")
        self.room.put_job(self.size.job)
        show.command("cat", "job.yaml")
        show.block(self.size.job)

    def _run_job(self, seen: Seen, *options: str, hurt: Callable[[Seen], None] | None = None) -> Seen:
        """Submit the job and follow it to its end. Raises Trouble unless it completes."""
        self.show.command("transom", "submit", "job.yaml", *options)
        job_id = int(json.loads(self.room.transom("submit", "job.yaml", *options, "--json"))["job"]["id"])
        follower = Follower(self.room.client(), job_id, seen, self.room.check_daemon)
        deadline = time.monotonic() + DEADLINE_S
        with self.show.following(seen):
            while not follower.ended:
                self._look(follower)
                if hurt is not None and not seen.cut:
                    hurt(seen)
                if time.monotonic() > deadline:
                    raise Trouble(f"job {job_id} has not ended after {DEADLINE_S:.0f} s: {seen.job.get('reason')}")
            self._linger(follower)
        if seen.job["state"] != "completed":
            raise Trouble(f"job {job_id} is {seen.job['state']}: {seen.job['reason']}")
        if hurt is not None and not seen.cut:
            raise Trouble(f"job {job_id} ended before a node could lose its power")
        return seen

    def _look(self, follower: Follower) -> None:
        for event in follower.poll():
            self.show.event(event)
        self.show.refresh(follower.seen)

    def _linger(self, follower: Follower) -> None:
        """See the last lines of a job that has ended, and the drain of the node that was lost."""
        until = time.monotonic() + DRAIN_S
        self._look(follower)
        while follower.seen.cut and not _drained(follower.seen) and time.monotonic() < until:
            self._look(follower)

    def _cut_power(self, seen: Seen) -> None:
        """Cut the power of a training node that does not run the launcher, once other nodes have more than storage."""
        copied = max((each["step"] for each in seen.job.get("stages") or () if each["stage"] == "replica"), default=0)
        early = seen.checkpoint < self.size.steps // 4 or seen.step < seen.checkpoint + self.size.every // 2
        if seen.job.get("state") != "running" or early or copied <= seen.checkpoint:
            return
        host = (seen.detail.get("launcher") or {}).get("host")
        node = next(name for name in seen.job["nodes"] if name != host)
        assert self.room.sandbox is not None
        seen.cut, seen.cut_at = node, time.time()
        self.room.sandbox.fail(node, "power")
        self.show.command("transom", "sandbox", "fail", node, "power")
        self.show.happened(
            "POWER CUT", f"{node} is dead, at step {seen.step}; nobody tells transom", "bold white on red"
        )

    def _say(self, *words: str) -> None:
        self.show.command("transom", *words)
        self.show.answer(self.room.transom(*words, env={"COLUMNS": str(self.show.width)}))


def _drained(seen: Seen) -> bool:
    incidents = seen.detail.get("incidents") or [{}]
    owners = {str(node["name"]): node.get("owner") for node in seen.nodes}
    return bool(incidents[0].get("drained_at")) and owners.get(seen.cut) == "transom"


def run(args: argparse.Namespace, show: Show) -> int:
    """Play the demo and clean up, whatever happens. Return the exit code."""
    room, began = Room(), time.monotonic()
    summary: dict[str, Any] = {"passed": False, "folder": str(room.root)}
    code, keep = 1, False
    try:
        try:
            interrupt_once()
            found = Demo(room, show, Size(args.steps, args.every, args.step_time)).play()
            summary.update(found.to_json())
            code, keep = 0 if found.passed else 1, args.keep
            if not found.passed:
                _complain(show, room, "not so: " + "; ".join(what for what, so in found.checks.items() if not so))
        finally:
            ignore_signals()
    except Interrupted as signal:
        code, summary["error"] = signal.exit_code, f"interrupted by {signal}"
        show.line()
        show.line(f"{summary['error']}: cleaning up", "bold yellow")
    except (Trouble, SandboxError, TransomError, OSError, subprocess.SubprocessError) as error:
        summary["error"] = str(error)
        _complain(show, room, str(error))
    finally:
        clean = _leave(show, room, keep)
    summary.update(seconds=round(time.monotonic() - began, 1), clean=clean)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    if code == 0:
        show.line(f"The demo passed, in {summary['seconds']:.0f} s.", "bold green")
    return code if clean else max(code, 1)


def _complain(show: Show, room: Room, why: str) -> None:
    """Say what went wrong, with the last lines of the logs, and keep them."""
    show.line()
    show.line(f"The demo failed: {why}", "bold red")
    if not room.root.exists():
        return
    kept = room.keep_logs()
    ranks = sorted(kept.glob("lm/.transom/*/logs/*/rank-00000.log"), key=lambda path: path.stat().st_mtime)
    for log in (kept / room.log.name, *kept.glob("lm/.transom/*/logs/launcher*.log"), *ranks[-1:]):
        if log.is_file():
            show.line()
            show.line(f"the end of {log}", "bold")
            show.block("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]))
    show.line()
    show.line(f"All logs are kept in {kept}")


def _leave(show: Show, room: Room, keep: bool) -> bool:
    """Remove everything, or say how to look at what is kept. Return whether nothing was left that should not be."""
    failure = ""
    if not keep:
        # First of all: whoever read what is printed may have gone, and printing fails then.
        try:
            room.close()
        except (SandboxError, OSError) as error:
            failure = str(error)
    show.console.show_cursor(True)
    show.line()
    if keep:
        _tell_what_is_kept(show, room)
    elif failure:
        show.line(f"Cleaning up failed: {failure}", "bold red")
        show.line(f"next: transom sandbox down --dir {room.root}; rm -r {room.root}")
    else:
        show.line(f"Cleaned up: the sandbox is down and {room.root} is removed.", "dim")
    return not failure


def _tell_what_is_kept(show: Show, room: Room) -> None:
    transom = Path(sys.executable).parent / "transom"
    show.line(f"Everything is kept, and runs, in {room.root}. To look at it:")
    show.line(f'  eval "$({transom} sandbox env --dir {room.root})"', "bold blue")
    show.line("  transom status; transom events; transom nodes; sinfo", "bold blue")
    show.line("To end it and remove everything:")
    show.line(f"  {transom} sandbox down --dir {room.root}", "bold blue")
    show.line()


def main(argv: list[str] | None = None) -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="demo", description=(__doc__ or "").replace("``", "`"), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80, help="steps that the job trains (default 80)")
    parser.add_argument("--every", type=int, default=20, help="steps between those that go to storage (default 20)")
    parser.add_argument("--step-time", type=float, default=0.4, help="seconds that a step takes at least (default 0.4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found out to FILE")
    parser.add_argument("--keep", action="store_true", help="leave the sandbox and transomd running at the end")
    args = parser.parse_args(argv)
    if args.every < 4 or args.steps < 3 * args.every:
        parser.error("--every takes 4 or more, and --steps three times as many")
    if os.geteuid() != 0:
        print("demo: cutting the power of a node needs root; next: sudo make demo", file=sys.stderr)
        return 4
    return run(args, Show(Console(highlight=False, markup=False, emoji=False)))


if __name__ == "__main__":
    sys.exit(main())
