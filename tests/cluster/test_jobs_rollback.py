"""A program whose loss is no number goes on from an older checkpoint than the newest, and everybody can see which."""

from __future__ import annotations

import sys

import pytest
from jobs import Site, patient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), patient]

PROGRAM = """
import os, sys, time
import torch
from transomd.tce import CheckpointEngine

state = {"x": torch.zeros(4)}
with CheckpointEngine.from_env() as engine:
    start = engine.load(state) or 0
    print(f"going on after {start} with {int(state['x'][0])}", flush=True)
    for step in range(start + 1, 25):
        state["x"] += 1
        time.sleep(0.1)
        if step == 18 and os.environ["TRANSOM_EPOCH"] == "1":
            print("iteration 18/ 24 | lm loss: NAN | number of nan iterations: 1 |", flush=True)
            sys.exit(1)
        print(f"step {step} loss 1.0", flush=True)
        if step % 5 == 0:
            engine.save(step, state).wait()
print(f"ended with {int(state['x'][0])}", flush=True)
"""
JOB = """\
name: nan
command: {python} nan.py
nodes: 1
spares: 0
health: {{collective: false}}
checkpoint: {{dir: ck}}
env: {{OMP_NUM_THREADS: '1'}}
watch: {{first_step_after: 100, stall_after: 60}}
"""


def test_a_loss_that_is_no_number_goes_back_one_checkpoint(site: Site) -> None:
    work = site.root / "work"
    work.mkdir()
    (work / "nan.py").write_text(PROGRAM)
    (work / "job.yaml").write_text(JOB.format(python=sys.executable))
    job = int(site.cli("submit", "job.yaml", "--json")["job"]["id"])
    assert site.wait_state(job, "completed", "failed", within_s=200)["state"] == "completed", site.story()
    detail = site.detail(job)
    assert [x["resume_step"] for x in detail["launches"]] == [None, 10], site.story()
    (incident,) = detail["incidents"]
    assert (incident["class"], incident["action"]) == ("numeric", "rollback")
    assert site.events(job, "rollback") == ["going back to the checkpoint of step 10, before that of step 15"]
    told = [p.read_text() for p in sorted(site.root.glob("work/.transom/*/logs/e*/rank-00000.log"))]
    assert "going on after 10 with 10\n" in told[1]
    assert told[1].endswith("ended with 24\n")
    assert detail["job"]["rollback_step"] is None, "the new epoch has checkpoints of its own"
