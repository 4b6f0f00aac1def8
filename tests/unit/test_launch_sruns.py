"""What a launch that ends with exit code 0 hides: sruns of a script that failed, and the first part of a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from transomd.launch.aside import Aside
from transomd.launch.program import LaunchPlan, Program, task_script
from transomd.launch.rundir import RunDir
from transomd.launch.sruns import SCRIPT_LOG, SRUNS_LOG, Sruns
from transomd.launch.watch import LogWatch
from transomd.spec import JobSpec
from transomd.tee.progress import DEFAULT_PATTERN, Progress

ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-30T19:49:09 ***"
KILLED = f'srun sh -c \'echo "{ABORTED}"; echo "{CANCELLED}"; exit 1\''
"""As ``srun --kill-on-bad-exit`` speaks of a task that ended badly."""
BEGAN = f"until grep -q began logs/e000001/{SRUNS_LOG} 2>/dev/null; do sleep 0.05; done"
"""What a script waits with until its srun has begun."""


async def ended(root: Path, script: str) -> tuple[int, LogWatch]:
    """Run a script beside an srun that runs its command here; return its exit code, and what its logs told."""
    tools = root / "tools"
    tools.mkdir()
    for path, text in (
        (tools / "srun", '#!/bin/sh\nshift\nexec "$@"\n'),
        (root / "script", f"#!/bin/bash\n{script}\n"),
    ):
        path.write_text(text)
        path.chmod(0o700)
    spec = JobSpec(name="t", script="job.sh", nodes=1, workdir=str(root))
    env = {"PATH": f"{tools}:{os.environ['PATH']}"}
    plan = LaunchPlan(job_id=1, attempt=1, epoch=1, nodes=("n1",), resume_step=None, master_port=1, spec=spec, env=env)
    program = Program(RunDir(root), plan)
    await program.start({}, Aside(30.0))
    for _ in range(3000):
        if program.rc is not None:
            break
        await asyncio.sleep(0.02)
    assert program.rc is not None
    logs = LogWatch(program.logs, spec, ("n1",), Progress(DEFAULT_PATTERN, now=0.0, floor_s=60, first_s=60))
    logs.poll(100.0, final=True)
    return program.rc, logs


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("srun sh -c 'exit 3'\necho done", "srun --overlap sh -c 'exit 3' ended with exit code 3"),
        ("srun false | tee log", "srun --overlap false ended with exit code 1"),
        ("srun sh -c 'kill -9 $$'\ntrue", "srun --overlap sh -c 'kill -9 $$' ended with exit code -9"),
        ("srun no-such-program\ntrue", "srun --overlap no-such-program ended with exit code 127"),
        (f"echo {ABORTED!r}\nsrun true", ABORTED),
        (f"srun echo {ABORTED!r}\nsrun false || srun true", ABORTED),
        (f"{KILLED} || srun echo {CANCELLED!r}", CANCELLED),
        (f"srun echo {ABORTED!r} & {KILLED}\nwait\nsrun true", ABORTED),
        (f"srun sleep 5 &\n{BEGAN}", "srun --overlap sleep 5 has not ended"),
        (f"srun sleep 5 &\n{BEGAN}\nkill -9 $!\nwait", "srun --overlap sleep 5 has not ended"),
    ],
)
async def test_a_script_whose_srun_failed_is_not_done(tmp_path: Path, script: str, left: str) -> None:
    code, logs = await ended(tmp_path, script)
    assert (code, logs.left) == (0, left)


@pytest.mark.parametrize(
    "script",
    [
        "srun true\necho done",
        "srun false || srun true",
        f"echo begin; {KILLED} || {KILLED}\necho again\nsrun true",
        f"srun sleep 5 &\n{BEGAN}\nsrun true",
        f"srun sleep 60 &\n{BEGAN}\nsrun true\necho {ABORTED!r}\nkill $!\nwait",
        "echo no srun at all",
    ],
)
async def test_a_script_that_made_up_for_its_sruns_is_done(tmp_path: Path, script: str) -> None:
    """Also one that ended an srun of its own, of whose end srun speaks as of any other."""
    code, logs = await ended(tmp_path, script)
    assert (code, logs.left) == (0, "")


async def test_a_script_sees_its_srun_as_it_is(tmp_path: Path) -> None:
    """Its input, its output, its exit code and its signals."""
    script = "echo in | srun cat\nsrun sh -c 'exit 7'; echo code $?\n"
    script += "srun sh -c 'trap \"echo got USR1; exit 4\" USR1; echo ready; while :; do sleep 0.1; done' >told &\n"
    script += "until grep -q ready told 2>/dev/null; do sleep 0.05; done\n"
    script += "kill -USR1 $!; wait $!; echo code $?; cat told"
    await ended(tmp_path, script)
    said = (tmp_path / "logs" / "e000001" / SCRIPT_LOG).read_text()
    assert said.split("\n") == ["in", "code 7", "code 4", "ready", "got USR1", ""]


def test_only_an_srun_that_began_afterwards_makes_up_for_one_that_failed() -> None:
    def note(what: str, who: str, **more: object) -> str:
        return json.dumps({"what": what, "id": who, "call": f"srun {who}", **more}) + "\n"

    notes = Sruns()
    notes.feed(note("began", "a") + note("began", "b") + note("ended", "a", code=1) + note("ended", "b", code=0))
    assert notes.failed == "srun a ended with exit code 1"
    notes.feed("what is this\n[]\n{}\n" + note("began", "c"))
    assert notes.failed == "srun a ended with exit code 1"
    notes.feed(note("ended", "c", code=0))
    assert notes.failed == ""
    assert not notes.told


@pytest.mark.parametrize(("command", "code"), [("(exit 3) | cat", 3), ("true | cat", 0), ("cat /dev/null | true", 0)])
def test_a_pipe_ends_as_the_worst_of_its_parts(tmp_path: Path, command: str, code: int) -> None:
    script = task_script(JobSpec(name="t", command=command, nodes=1, workdir=str(tmp_path)))
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PATH": os.environ["PATH"]}
    assert subprocess.run(["bash", "-c", script], env=env, check=False, timeout=60).returncode == code
