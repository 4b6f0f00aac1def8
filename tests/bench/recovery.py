"""How long a training job stands still after a node loses power: transom beside plain ``sbatch --requeue``, in one run.

    .venv/bin/python tests/bench/recovery.py [--rounds N] [--slurmd-timeout S]

Every way gets a sandbox of its own with the same SlurmdTimeout and the same program, checkpoints as often, and the same
fault at the same step. Times are seconds after the fault, medians over the rounds, split where the way shows it:
detect (somebody knows), diagnose (the verdict stands), fence (nothing of the old launch is left), start (the program is
started again), load (it has its checkpoint), recompute (the first *new* step, past those done before the fault).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "cluster"))

from jobs import SETTINGS, Site  # noqa: E402
from transom_slurm.sandbox import Sandbox  # noqa: E402

NODES, FAULT_AT, STEPS, EVERY, STEP_TIME = 3, 17, 60, 5, 0.3
STAGES = ("detect", "diagnose", "fence", "start", "load", "recompute")
TRAIN = f"{sys.executable} {{program}} --steps {STEPS} --checkpoint-every {EVERY} --step-time {STEP_TIME}"
BATCH = """\
#!/bin/bash
export RUN={run} MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
export TRANSOM_CHECKPOINT_DIR={run}/ck OMP_NUM_THREADS=1 WORLD_SIZE={nodes} PYTHONPATH={examples}:{here}
date +%s.%N >> {run}/started
srun --kill-on-bad-exit=1 --output={run}/log.$SLURM_RESTART_COUNT.%t bash -c 'export RANK=$SLURM_PROCID; exec {train}'
"""


def last_step(text: str) -> int:
    """Return the newest step in a log."""
    return max((int(n) for n in re.findall(r"^step (\d+) loss", text, re.M)), default=0)


def until(ready: Callable[[], bool], within_s: float = 400.0) -> float:
    """Poll, and return the time at which ``ready()`` became true."""
    end = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("the job did not come that far")
        time.sleep(0.05)
    return time.time()


def by_requeue(sandbox: Sandbox, run: Path, hurry: bool) -> dict[str, float]:
    """One round of plain Slurm; with ``hurry`` somebody types ``StartTime=now`` as soon as the job is pending again."""
    train = TRAIN.format(program=HERE / "plain_train.py")
    examples = ROOT / "docs" / "examples"
    text = BATCH.format(run=run, nodes=NODES, examples=examples, here=HERE, train=train)
    (run / "job.sh").write_text(text)
    sandbox.run(["sbatch", "--requeue", f"-N{NODES}", "--exclusive", f"--output={run}/out", str(run / "job.sh")])

    def read(pattern: str) -> str:
        return "".join(p.read_text(errors="replace") for p in run.glob(pattern))

    until(lambda: last_step(read("log..0")) >= FAULT_AT)
    sandbox.fail("n2", "power")
    fault, before = time.time(), last_step(read("log..0"))
    state = ["squeue", "-h", "-o", "%T"]
    times = {"detect": until(lambda: "RUNNING" not in sandbox.run(state).stdout) - fault}
    if hurry:
        until(lambda: "PENDING" in sandbox.run(state).stdout)
        sandbox.run(["scontrol", "update", "jobid=1", "StartTime=now"])
    times["start"] = until(lambda: len(read("started").split()) > 1) and float(read("started").split()[1]) - fault
    times["load"] = until(lambda: "resumed from step" in read("log.1.0")) - fault
    times["recompute"] = until(lambda: last_step(read("log.1.0")) > before) - fault
    return times


def by_transom(sandbox: Sandbox, run: Path, spares: int) -> dict[str, float]:
    """One round of transom: restart in place on a spare, or, without one, a new attempt."""
    site = Site(sandbox, run)
    (run / "transomd.toml").write_text(
        SETTINGS.format(root=run, hub="10.77.0.254", key=sandbox.ssh_key, known_hosts=sandbox.known_hosts)
    )
    site.start_daemon()
    try:
        return _transom_round(site, run, spares)
    finally:
        site.stop_daemon()


def _transom_round(site: Site, run: Path, spares: int) -> dict[str, float]:
    work = run / "work"
    work.mkdir()
    train = TRAIN.format(program=ROOT / "docs" / "examples" / "train.py")
    (work / "job.yaml").write_text(
        f"name: lm\ncommand: {train}\nnodes: {NODES}\nspares: {spares}\nenv: {{OMP_NUM_THREADS: '1'}}\n"
        "watch: {stall_after: 60, first_step_after: 120}\n"
    )
    job = int(site.cli("submit", "job.yaml", "--json")["job"]["id"])
    site.wait_step(job, FAULT_AT, 120)
    site.sandbox.fail("n2", "power")
    fault = time.time()

    def recovered() -> bool:
        return any(i["recovered_at"] for i in site.detail(job)["incidents"])

    until(recovered)
    detail = site.detail(job)
    incident = next(i for i in detail["incidents"] if i["recovered_at"])
    launch = detail["launches"][-1]
    return {
        "detect": incident["detected_at"] - fault,
        "diagnose": incident["diagnosed_at"] - fault,
        "fence": max(incident["fenced_at"], incident["detected_at"]) - fault,
        "start": launch["started_at"] - fault,
        "load": launch["first_step_at"] - fault,
        "recompute": incident["recovered_at"] - fault,
    }


WAYS: dict[str, Callable[[Sandbox, Path], dict[str, float]]] = {
    "transom, in place on a spare": lambda s, r: by_transom(s, r, 1),
    "transom, new attempt": lambda s, r: by_transom(s, r, 0),
    "sbatch --requeue, StartTime=now": lambda s, r: by_requeue(s, r, True),
    "sbatch --requeue, as Slurm does it": lambda s, r: by_requeue(s, r, False),
}


def one(way: str, slurmd_timeout: int) -> dict[str, float]:
    """Run one round in a sandbox of its own."""
    base = Path(tempfile.mkdtemp(prefix="tbench-"))
    base.chmod(0o755)
    sandbox = Sandbox.up(NODES + 1, base / "s", slurmd_timeout=slurmd_timeout)
    run = base / "run"
    run.mkdir()
    try:
        return WAYS[way](sandbox, run)
    finally:
        sandbox.down()
        shutil.rmtree(base, ignore_errors=True)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the medians as a Markdown table."""
    lines = ["| way | " + " | ".join(STAGES) + " | times transom in place |", "|---" * (len(STAGES) + 2) + "|"]
    best = statistics.median(r["recompute"] for r in next(iter(found.values())))
    for way, rounds in found.items():
        cells = []
        for stage in STAGES:
            told = [r[stage] for r in rounds if stage in r]
            cells.append(f"{statistics.median(told):.1f}" if told else "")
        ratio = statistics.median(r["recompute"] for r in rounds) / best
        lines.append(f"| {way} | {' | '.join(cells)} | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table and the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slurmd-timeout", type=int, default=10)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            print(f"round {number + 1}: {way} ...", file=sys.stderr, flush=True)
            found[way].append(one(way, options.slurmd_timeout))
    print(f"{options.rounds} rounds, SlurmdTimeout {options.slurmd_timeout} s, {os.cpu_count()} cores\n")
    print(table(found))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
