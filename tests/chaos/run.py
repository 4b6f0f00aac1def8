"""``make chaos``: random faults of every kind on three training jobs at once, on a real Slurm, judged by an oracle.

``SEED=`` repeats the choices (not the moments, which depend on the machine), ``HOURS=`` says how long (default: ten
minutes), ``REPORT=`` where the report goes (``REPORT.md`` and ``REPORT.json``). Exit code 1 after any violation.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cluster")]

import report  # noqa: E402
from jobs import Site  # noqa: E402
from oracle import (  # noqa: E402
    BY_NAME,
    KINDS,
    Injection,
    Kind,
    causes,
    drain_is_right,
    verdict_is_right,
    was_there,
)
from ring import losses  # noqa: E402
from transom_slurm.sandbox import Sandbox, SandboxError  # noqa: E402

JOBS, NODES, RANKS, SPARES = 3, 16, 3, 1
STEPS = (500, 900)
STEP_S = 0.2
PAUSE_S = (1.0, 6.0)
OVERLAP = 0.15
"""Part of the faults that hit a job which has not recovered from the last one."""
PATIENCE_S = 240.0
"""A job that does not recover within this time counts as stuck."""
SETTINGS = "per_hour = 100000\nper_incident = 16\n[policy]\nmax_restarts = 1000\nmax_attempts = 200\n"
SLOWER = (
    ("heartbeat_timeout_s = 4", "heartbeat_timeout_s = 8"),
    ("launcher_silence_s = 8", "launcher_silence_s = 15"),
    ("stall_after_s = 8", "stall_after_s = 12"),
)
"""Three jobs and all of their faults on two processors: what is slow for that is not to look like a failure."""
POLICY = "policy: {max_restarts: 1000, max_attempts: 200, no_progress_limit: 10}\nwatch: {first_step_after: 12}\n"


class Chaos:
    """One run."""

    def __init__(self, site: Site, seed: int, until: float) -> None:
        self.site = site
        self.seed = seed
        self.until = until
        self.random = random.Random(seed)
        self.injections: list[Injection] = []
        self.violations: list[str] = []
        self.running: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.heal_at: dict[int, float] = {}
        self.next_at = dict.fromkeys(range(JOBS + 1), 0.0)
        self.slots: dict[int, int] = {}
        self.tags: dict[str, set[int]] = {}
        self.drains: dict[str, float] = {}
        self.details: dict[int, dict[str, Any]] = {}
        self.over = threading.Event()
        self.drained = 0
        self.committed = 0
        self.values = 0

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Hurt and heal until the time is over, then let everything come to its end."""
        healer = threading.Thread(target=self._keep_healing, name="healer")
        healer.start()
        try:
            self._play()
        finally:
            self.over.set()
            healer.join()

    def _keep_healing(self) -> None:
        while not self.over.wait(0.3):
            self._heal_due()

    def _play(self) -> None:
        while time.time() < self.until:
            self._turn()
            if time.time() < self.until - 5:
                self._hurt()
            time.sleep(0.3)
        print("no more faults; waiting for the jobs to end", flush=True)
        end = time.time() + PATIENCE_S
        while (self.running or self.heal_at) and time.time() < end:
            self._turn(fresh=False)
            time.sleep(0.3)
        for job in list(self.running):
            self._violation(job, "does not come to an end")
        for one in self.injections:
            self._check_noticed(one)

    def _turn(self, *, fresh: bool = True) -> None:
        if fresh:
            for slot in set(range(JOBS)) - set(self.slots.values()):
                self._submit(slot)
        self._look()

    def _submit(self, slot: int) -> None:
        steps = self.random.randint(*STEPS)
        try:
            options, folder = f"--steps {steps} --step-time {STEP_S}", f"ck-{time.time_ns()}"
            job = self.site.submit(options, nodes=RANKS, spares=SPARES, more=POLICY, folder=folder)
        except (AssertionError, OSError):
            return  # the daemon or its database is hurt at the moment
        self.running[job] = steps
        self.slots[job] = slot
        self.next_at[slot] = time.time() + 2.0

    # --- hurting ------------------------------------------------------------------------------------------------

    def _hurt(self) -> None:
        now = time.time()
        for job, slot in self.slots.items():
            if now < self.next_at[slot] or not self._ready(job):
                continue
            kinds = [kind for kind in KINDS if kind.target != "hub"]
            self._inject(self.random.choices(kinds, [kind.weight for kind in kinds])[0], job)
            self.next_at[slot] = time.time() + self.random.uniform(*PAUSE_S)
        hub_hurt = any(one.node == "hub" and one.healed_at is None for one in self.injections)
        if now >= self.next_at[JOBS] and not hub_hurt:
            kinds = [kind for kind in KINDS if kind.target == "hub"]
            self._inject(self.random.choices(kinds, [kind.weight for kind in kinds])[0], 0)
            self.next_at[JOBS] = time.time() + self.random.uniform(20.0, 45.0)

    def _ready(self, job: int) -> bool:
        """Whether the job runs and has recovered from the last fault, or is to be hit again before it has."""
        detail = self.details.get(job)
        if detail is None or not detail["launches"]:
            return False
        open_faults = [one for one in self.injections if one.job == job and self._outstanding(one)]
        if not open_faults:
            launch = detail["launches"][-1]
            return detail["job"]["state"] == "running" and (launch["last_step"] or 0) > (launch["first_step"] or 0) + 2
        young = len(open_faults) == 1 and not open_faults[0].overlaps and detail["job"]["state"] == "recovering"
        return young and self.random.random() < OVERLAP / 10

    def _outstanding(self, one: Injection) -> bool:
        if one.healed_at is None:
            return True
        return one.rules.must and one.recovered_at is None and time.time() < one.at + PATIENCE_S

    def _inject(self, kind: Kind, job: int) -> None:
        node = self._target(kind, job)
        if not node or any(one.node == node and one.healed_at is None for one in self.injections):
            return
        overlaps = any(one.job == job and self._outstanding(one) for one in self.injections) if job else False
        one = Injection(
            number=len(self.injections) + 1, kind=kind.name, node=node, job=job, at=time.time(), overlaps=overlaps
        )
        try:
            one.done = self._do(kind.name, node)
        except SandboxError as error:
            print(f"     {kind.name} on {node} was not possible: {error}", flush=True)
            return
        self.injections.append(one)
        self.heal_at[one.number] = time.time() + self.random.uniform(*kind.lasts_s)
        whom = f"job {job}" if job else "all"
        print(f"{one.number:4d} {time.strftime('%H:%M:%S')} {kind.name:16s} {node:4s} {whom}", flush=True)

    def _target(self, kind: Kind, job: int) -> str:
        if kind.target == "hub":
            return "hub"
        detail = self.details[job]
        nodes = detail["launches"][-1]["nodes"]
        if kind.target == "rank 0":
            return str(nodes[0])
        if kind.target == "batch":
            return str(detail["launcher"]["host"]) if detail["launcher"] else ""
        return str(self.random.choice(nodes))

    def _do(self, kind: str, node: str) -> str:
        if kind == "daemon-kill":
            self.site.kill_daemon()
            return "transomd killed"
        return self.site.sandbox.fail(node, kind)

    # --- healing ------------------------------------------------------------------------------------------------

    def _heal_due(self) -> None:
        for one in self.injections:
            due = self.heal_at.get(one.number)
            if due is None or time.time() < due:
                continue
            over = one.recovered_at is not None or time.time() > one.at + 60 or one.job not in self.running
            if one.rules.until_over and not over:
                continue
            self._heal(one)

    def _heal(self, one: Injection) -> None:
        del self.heal_at[one.number]
        if one.kind == "daemon-kill":
            self.site.start_daemon()
        else:
            self.site.sandbox.heal(one.node)
        one.healed_at = time.time()
        if one.node != "hub":
            self._as_new(one.node)

    def _as_new(self, node: str) -> None:
        """Do what an administrator does with a mended node: end what is left on it, and lift the drain."""
        shown = self._nodes().get(node, "")
        if "DRAIN" in shown.partition(" ")[0] or "DOWN" in shown.partition(" ")[0]:
            self.site.sandbox.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        self.drains.pop(node, None)

    def _nodes(self) -> dict[str, str]:
        """Return each node's state and reason as Slurm has them; empty without an answer."""
        done = self.site.sandbox.run(["sinfo", "-h", "-N", "-O", "NodeList:8,StateComplete:60,Reason:200"], check=False)
        rows = [line.split(None, 1) for line in done.stdout.splitlines()]
        return {row[0]: row[1].upper() if len(row) > 1 else "" for row in rows if row} if done.returncode == 0 else {}

    # --- looking ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._look_at_slurm()
        for job in list(self.running):
            try:
                self.details[job] = self.site.detail(job)
            except Exception:
                continue  # the daemon is hurt at the moment
            self._look_at_job(job, self.details[job])

    def _look_at_slurm(self) -> None:
        if any(one.kind.startswith("ctld-") and one.healed_at is None for one in self.injections):
            return
        done = self.site.sandbox.run(["squeue", "-h", "-t", "all", "-o", "%i %j %k"], check=False)
        for line in done.stdout.splitlines() if done.returncode == 0 else ():
            number, name, comment = line.split(None, 2)
            if comment.startswith("transom:"):
                ids = self.tags.setdefault(name, set())
                if ids and int(number) not in ids:
                    self._violation(int(comment.split(":")[1]), f"{name} was submitted twice: {sorted(ids)}, {number}")
                ids.add(int(number))
        for node, shown in self._nodes().items():
            if "TRANSOM[" not in shown:
                self.drains.pop(node, None)
            elif node not in self.drains:
                self.drains[node] = time.time()
                self.drained += 1
                if not drain_is_right(node, time.time(), self.injections):
                    self._violation(0, f"{node} was drained although it was well: {shown}")

    def _look_at_job(self, job: int, detail: dict[str, Any]) -> None:
        for incident in detail["incidents"]:
            self._look_at_incident(incident)
        state = detail["job"]["state"]
        waits = [one for one in self.injections if one.job == job and self._outstanding(one)]
        stuck = [one for one in waits if one.rules.must and time.time() > one.at + PATIENCE_S - 1]
        if stuck and not any("stuck" in one.faults for one in stuck):
            stuck[0].faults.append("stuck")
            self._violation(job, f"has not recovered from {stuck[0].kind} within {PATIENCE_S:.0f} s")
        if state in ("completed", "failed", "cancelled"):
            self.ended[job] = self.running.pop(job)
            self.slots.pop(job)
            for one in waits:
                one.recovered_at = one.recovered_at or (time.time() if one.detected_at else None)
            if state != "completed":
                self._violation(job, f"is lost: {state}: {detail['job']['reason']}")
            self._check_values(job, detail)

    def _look_at_incident(self, incident: dict[str, Any]) -> None:
        if not incident["diagnosed_at"] and not incident["closed_at"]:
            return
        found = causes(incident, self.injections)
        told = f"{incident['class'] or '-'}, blame {incident['blame'] or '-'}"
        key = f"incident {incident['id']}"
        if not found:
            if not any(key in text for text in self.violations):
                text = f"{key} ({told}) has no cause that was injected: {incident['summary']}"
                self._violation(incident["job_id"], text)
            return
        right = not incident["class"] or verdict_is_right(incident, found)
        if not right and not any(key in text for text in self.violations):
            names = ", ".join(f"{one.kind} on {one.node}" for one in found)
            self._violation(incident["job_id"], f"{key}: {told} for {names}: {incident['summary']}")
        for one in found:
            at = (
                max(float(incident["detected_at"]), one.at)
                if one.node in incident["nodes"]
                else incident["detected_at"]
            )
            mine = one.job == incident["job_id"] and one.rules.verdicts and at >= one.at
            if not mine or (one.detected_at is not None and one.recovered_at is not None):
                continue
            if one.detected_at is None:
                one.detected_at, one.verdict, one.right = at, told, right
            if incident["recovered_at"] and incident["recovered_at"] >= one.at:
                one.recovered_at = float(incident["recovered_at"])

    def _check_noticed(self, one: Injection) -> None:
        alone = not one.overlaps and one.kind not in ("disk-full", "mount-dead")
        detail = self.details.get(one.job)
        missed = self._too_late(one) or (detail is not None and not was_there(one, detail["launches"]))
        if one.rules.must and one.detected_at is None and alone and not missed:
            self._violation(one.job, f"{one.kind} on {one.node} was never noticed")
        if one.detected_at is None and (not one.rules.must or missed):
            one.right = True

    def _too_late(self, one: Injection) -> bool:
        """Whether the job ended before the fault had to be noticed; not while transomd itself was hurt."""
        detail = self.details.get(one.job)
        finished = detail["job"]["finished_at"] if detail else None
        hurt = [x for x in self.injections if x.kind.startswith(("daemon", "db")) and x.active(one.at + 60, 60)]
        return bool(finished and finished < one.at + 60 + 20 * len(hurt))

    # --- values -------------------------------------------------------------------------------------------------

    def _check_values(self, job: int, detail: dict[str, Any]) -> None:
        steps = self.ended[job]
        wanted, seen, saved = losses(RANKS, steps), set(), 0
        for folder in sorted(Path(detail["job"]["run_dir"]).glob("logs/e*")):
            saved = max(saved, self._check_rank0(job, folder / "rank-00000.log", saved))
            for log in folder.glob("rank-*.log"):
                for step, value in _steps(log):
                    seen.add(step)
                    self.values += 1
                    if wanted.get(step) != value:
                        self._violation(job, f"{log}: step {step} has loss {value}, not {wanted.get(step)}")
        missing = sorted(set(wanted) - seen)
        if missing and detail["job"]["state"] == "completed":
            self._violation(job, f"steps were never computed: {missing[:10]}")

    def _check_rank0(self, job: int, log: Path, before: int) -> int:
        """Return the newest step that a launch has saved; it must go on from the newest before it."""
        saved = 0
        for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
            words = line.split()
            if line.startswith("going on after") and int(words[3]) < before:
                self._violation(job, f"{log}: goes on after step {words[3]}, but {before} was saved")
            elif line.startswith("saved "):
                saved = int(words[1])
                self.committed += 1
        return saved

    def _violation(self, job: int, text: str) -> None:
        whom = f"job {job}" if job else "fleet"
        self.violations.append(f"{whom}: {text}")
        print(f"\nVIOLATION (SEED={self.seed}): {whom}: {text}\n{self._timeline(job)}", flush=True)

    def _timeline(self, job: int) -> str:
        """Everything that was done to a job and that it said, in the order of time."""
        told = [(one.at, f"INJECTED {one.number} {one.kind} {one.node} (job {one.job})") for one in self.injections]
        told += [
            (one.healed_at, f"HEALED {one.number} {one.kind} {one.node}") for one in self.injections if one.healed_at
        ]
        try:
            events = self.site.client.get("/v1/events", **({"job": job} if job else {}))["events"]
        except Exception:
            events = []
        told += [(e["at"], f"{e['kind']}: {e['message']}") for e in events]
        recent = [line for line in sorted(told) if line[0] > time.time() - 300]
        return "\n".join(f"  {time.strftime('%H:%M:%S', time.localtime(at))} {text}" for at, text in recent)


def _steps(log: Path) -> Iterable[tuple[int, str]]:
    """The steps and losses of a log; a line that was cut by a kill does not count."""
    text = log.read_text(errors="replace")
    for line in text[: text.rfind("\n") + 1].splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "step" and words[2] == "loss" and words[1].isdigit():
            yield int(words[1]), words[3]


def main() -> int:
    """Run, report, and say whether everything was as it must be."""
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(1_000_000))
    seconds = float(os.environ.get("HOURS") or 1 / 6) * 3600
    root = Path(tempfile.mkdtemp(prefix="tchaos-"))
    root.chmod(0o755)
    print(f"SEED={seed}, {seconds / 60:.0f} minutes, {len(BY_NAME)} kinds of faults, in {root}", flush=True)
    began = time.time()
    sandbox = Sandbox.up(NODES, root / "s", slurmd_timeout=12, message_timeout=3)
    site = Site(sandbox, root, SETTINGS)
    site.client.timeout_s = 3.0
    for old, new in SLOWER:
        toml = root / "transomd.toml"
        toml.write_text(toml.read_text().replace(old, new))
    chaos = Chaos(site, seed, began + seconds)
    try:
        site.start_daemon()
        chaos.run()
    finally:
        site.stop_daemon()
        sandbox.down()
        written = report.write(chaos, Path(os.environ.get("REPORT") or root / "chaos"), time.time() - began)
        print(written, flush=True)
        if not chaos.violations and not os.environ.get("KEEP"):
            shutil.rmtree(root, ignore_errors=True)
    return 1 if chaos.violations else 0


if __name__ == "__main__":
    sys.exit(main())
