"""Kinds of jobs: torch by srun and by torchrun, an existing sbatch file, setup lines and environment."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from jobs import RING, Site, patient

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500), patient]

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TRAIN = f"{sys.executable} train.py --steps 12 --checkpoint-every 4"
COMMON = "checkpoint: {dir: ck}\nenv: {OMP_NUM_THREADS: '1'}\nwatch: {first_step_after: 100, stall_after: 60}\n"


def losses(site: Site) -> dict[int, str]:
    """Return the exact loss of every step that rank 0 printed."""
    found = {}
    for log in sorted(site.root.glob("work/.transom/*/logs/e*/rank-00000.log")):
        for line in log.read_text().splitlines():
            words = line.split()
            if len(words) > 5 and "step" in words and "loss_hex" in words:
                found[int(words[words.index("step") + 1])] = words[words.index("loss_hex") + 1]
    return found


def submit(site: Site, text: str) -> int:
    """Submit a job file that works in a copy of the examples."""
    work = site.root / "work"
    shutil.copytree(EXAMPLES, work, dirs_exist_ok=True)
    (work / "job.yaml").write_text(text)
    return int(site.cli("submit", "job.yaml", "--json")["job"]["id"])


def test_torch_by_srun_with_the_collective(site: Site) -> None:
    job = submit(site, f"name: lm\ncommand: {TRAIN}\nnodes: 2\n{COMMON}")
    assert site.wait_state(job, "completed", "failed", within_s=400)["state"] == "completed"
    assert set(losses(site)) == set(range(1, 13))
    events = site.client.get("/v1/events", job=job)["events"]
    assert any(e["kind"] == "collective" and "passed" in e["message"] for e in events)
    assert site.job(job)["checkpoint"]["step"] == 12


def test_torch_by_torchrun(site: Site) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    setup = f"export PATH={torchrun.parent}:$PATH"
    script = TRAIN.partition(" ")[2]
    text = f"name: lm\nlauncher: torchrun\ntasks_per_node: 2\ncommand: {script}\nsetup: {setup}\nnodes: 2\n{COMMON}"
    job = submit(site, text)
    assert site.wait_state(job, "completed", "failed", within_s=400)["state"] == "completed", site.story()
    assert set(losses(site)) == set(range(1, 13))


def test_a_command_that_starts_a_container(site: Site) -> None:
    """A container to the kernel: mounts and PIDs of its own. Its ranks are found, watched, killed and started again."""
    work = site.root / "work"
    work.mkdir()
    inside = f"{sys.executable} {RING} --then 20"
    (work / "job.yaml").write_text(
        f"name: boxed\ncommand: unshare --mount --pid --fork --kill-child --mount-proc {inside}\nnodes: 2\n"
        "checkpoint: {dir: ck}\nhealth: {collective: false}\n"
    )
    job = int(site.cli("submit", "job.yaml", "--json")["job"]["id"])
    site.wait_step(job, 6)
    site.sandbox.fail("n2", "rank-kill")
    assert site.wait_state(job, "completed", "failed", within_s=400)["state"] == "completed", site.story()
    assert [launch["epoch"] for launch in site.detail(job)["launches"]] == [1, 2]
    assert site.drained() == set()


def test_existing_sbatch_file(site: Site) -> None:
    work = site.root / "work"
    work.mkdir()
    (work / "old.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\n#SBATCH -J mine\n#SBATCH --mail-type=NONE\n"
        'echo "nodes $SLURM_JOB_NODELIST tasks $SLURM_NTASKS"\n'
        "srun --label bash -c 'echo $SLURM_PROCID on $SLURMD_NODENAME of $TRANSOM_EPOCH'\n"
    )
    text = "name: old\nscript: old.sbatch\nspares: 1\nhealth: {collective: false}\n"
    job = submit(site, text)
    assert site.wait_state(job, "completed", "failed", within_s=400)["state"] == "completed", site.story()
    told = next(site.root.glob("work/.transom/*/logs/e000001/rank-00000.log")).read_text()
    assert "nodes n[1-2] tasks 4" in told
    assert sorted(line.split(": ")[1] for line in told.splitlines()[1:]) == [
        "0 on n1 of 1",
        "1 on n1 of 1",
        "2 on n2 of 1",
        "3 on n2 of 1",
    ]


def test_failing_script_is_the_programs(site: Site) -> None:
    work = site.root / "work"
    work.mkdir()
    (work / "old.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\nexit 3\n")
    job = submit(site, "name: old\nscript: old.sbatch\nhealth: {collective: false}\npolicy: {no_progress_limit: 2}\n")
    ended = site.wait_state(job, "completed", "failed")
    assert ended["state"] == "failed"
    assert site.drained() == set()
