"""Each kind of fault has its effect, and heal undoes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transom_slurm.sandbox import Sandbox, SandboxError, processes, targets
from transom_slurm.sandbox.errors import SandboxMissing, SandboxUsage
from transom_slurm.sandbox.waiting import until

pytestmark = pytest.mark.cluster

RANK = """#!/bin/bash
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID TRANSOM_EPOCH=1
bash -c "sleep 300 & wait \\$!"
true
"""


@pytest.fixture(scope="module")
def cluster(make_sandbox) -> Sandbox:  # type: ignore[no-untyped-def]
    made: Sandbox = make_sandbox(3, slurmd_timeout=5, message_timeout=2)
    return made


@pytest.fixture(autouse=True)
def _as_new(cluster: Sandbox) -> None:
    cluster.reset()


def _submit(cluster: Sandbox, directory: Path, nodes: int, line: str) -> str:
    script = directory / "job.sh"
    script.write_text(f"#!/bin/bash\n{line}\n")
    options = ["--no-requeue", "--no-kill", "--exclusive", "-w", f"n[1-{nodes}]", f"-N{nodes}", f"-o{directory}/out"]
    return cluster.run(["sbatch", "--parsable", *options, str(script)]).stdout.strip()


def _program(cluster: Sandbox, directory: Path) -> str:
    """A job with two ranks on each of two nodes, running; each rank is a sleep behind two shells."""
    (directory / "rank.sh").write_text(RANK)
    job = _submit(cluster, directory, 2, f"srun -K0 --overlap -n4 --ntasks-per-node=2 bash {directory}/rank.sh")
    running = until(lambda: len(_named(cluster, "n1", "sleep")) == 2 == len(_named(cluster, "n2", "sleep")), 15)
    assert running, cluster.run(["sh", "-c", f"scontrol show job {job}; sinfo -N; cat {directory}/out"]).stdout
    return job


def _named(cluster: Sandbox, node: str, name: str) -> list[int]:
    return sorted(pid for pid in targets.node_pids(cluster.spec, node) if processes.name(pid) == name)


def _ssh(cluster: Sandbox, node: str) -> int:
    argv = ["ssh", "-F", str(cluster.ssh_config), "-o", "ConnectTimeout=1", node, "true"]
    return cluster.run(argv, check=False).returncode


def _boot_id(cluster: Sandbox, node: str) -> str:
    return cluster.run(["cat", "/proc/sys/kernel/random/boot_id"], node=node).stdout


def test_power_loss_kills_all_at_once_and_slurm_notices(cluster: Sandbox, tmp_path: Path) -> None:
    before = _boot_id(cluster, "n2")
    _program(cluster, tmp_path)
    pids = targets.node_pids(cluster.spec, "n2")
    cluster.fail("n2", "power")
    assert not [pid for pid in pids if processes.state(pid) not in ("", "Z")]
    assert _ssh(cluster, "n2") == 255
    with pytest.raises(SandboxError, match="has no power"):
        cluster.run(["true"], node="n2")
    assert until(lambda: cluster.slurm_states().get("n2", "").startswith("down"), 40, 0.2)
    assert until(lambda: not _named(cluster, "n1", "sleep"), 20), "the step ends when one of its nodes is down"
    assert cluster.heal("n2")[0] == "booted"
    assert until(lambda: cluster.slurm_states().get("n2") == "idle", 20, 0.1)
    assert _boot_id(cluster, "n2") != before
    assert _ssh(cluster, "n2") == 0


def test_power_of_a_dead_node_cannot_be_cut(cluster: Sandbox) -> None:
    cluster.fail("n3", "power")
    with pytest.raises(SandboxError, match="has none"):
        cluster.fail("n3", "power")
    with pytest.raises(SandboxError, match="no power"):
        cluster.fail("n3", "net-cut")


def test_a_cut_cable_leaves_the_program_running(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    cluster.fail("n2", "net-cut")
    assert _ssh(cluster, "n2") == 255
    assert len(_named(cluster, "n2", "sleep")) == 2
    assert [report.link for report in cluster.status()] == [True, False, True]
    assert "cable mended" in cluster.heal("n2")
    assert _ssh(cluster, "n2") == 0


def test_a_killed_slurmd_leaves_its_job_running(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    cluster.fail("n2", "slurmd-kill")
    assert not targets.slurmd_pids(cluster.spec, "n2")
    assert len(_named(cluster, "n2", "sleep")) == 2
    with pytest.raises(SandboxError, match="does not run"):
        cluster.fail("n2", "slurmd-kill")
    assert "slurmd started" in cluster.heal("n2")
    assert until(lambda: len(targets.slurmd_pids(cluster.spec, "n2")) == 1, 5)
    assert len(_named(cluster, "n2", "sleep")) == 2


def test_a_rank_is_killed_behind_its_shell(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    wanted = targets.find_rank(cluster.spec, "n2")
    assert processes.name(wanted) == "sleep"
    assert processes.environment(wanted)["LOCAL_RANK"] == "0"
    cluster.fail("n2", "rank-kill")
    assert until(lambda: wanted not in _named(cluster, "n2", "sleep"), 5)
    assert len(_named(cluster, "n1", "sleep")) == 2


def test_a_rank_is_stopped_and_goes_on(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    wanted = targets.find_rank(cluster.spec, "n1")
    cluster.fail("n1", "rank-stop")
    assert until(lambda: processes.state(wanted) == "T", 5)
    assert "1 stopped processes continued" in cluster.heal("n1")
    assert until(lambda: processes.state(wanted) == "S", 5)


def test_without_a_program_there_is_no_rank(cluster: Sandbox, tmp_path: Path) -> None:
    _submit(cluster, tmp_path, 1, "export RANK=0; sleep 300")
    with pytest.raises(SandboxMissing, match="no process of a training program"):
        cluster.fail("n1", "rank-kill")


def test_xid_79_is_in_the_kernel_log_and_the_gpu_is_gone(cluster: Sandbox) -> None:
    cluster.fail("n2", "xid:79:3")
    line = cluster.run(["tail", "-n1", "/var/log/kern.log"], node="n2").stdout
    assert " n2 kernel: [" in line
    assert "NVRM: Xid (PCI:0000:52:00): 79," in line
    said = cluster.run(["/usr/bin/dmesg", "--time-format=iso"], node="n2").stdout
    assert "NVRM: Xid (PCI:0000:52:00): 79," in said
    listed = cluster.run(["/usr/bin/nvidia-smi", "-L"], node="n2").stdout
    assert [line.split(":")[0] for line in listed.splitlines()] == [f"GPU {i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    assert "Xid" not in cluster.run(["cat", "/var/log/kern.log"], node="n1").stdout
    cluster.heal("n2")
    assert "Xid" not in cluster.run(["dmesg"], node="n2").stdout
    assert "Xid" in cluster.run(["cat", "/var/log/kern.log.1"], node="n2").stdout
    assert len(cluster.run(["nvidia-smi", "-L"], node="n2").stdout.splitlines()) == 8


def test_other_xids_leave_the_gpu(cluster: Sandbox) -> None:
    cluster.fail("n2", "xid:48")
    assert "): 48, " in cluster.run(["dmesg"], node="n2").stdout
    assert cluster.status()[1].gpus == 8


def test_a_lost_gpu_says_nothing(cluster: Sandbox) -> None:
    cluster.fail("n2", "gpu-lost")
    assert cluster.status()[1].gpus == 7
    assert "Xid" not in cluster.run(["dmesg"], node="n2").stdout


@pytest.mark.parametrize("kind", ["nope", "xid", "xid:abc", "power:3", "gpu-lost:99", "xid:79:99"])
def test_a_wrong_kind_is_refused(cluster: Sandbox, kind: str) -> None:
    with pytest.raises(SandboxUsage):
        cluster.fail("n2", kind)
    assert cluster.status()[1].gpus == 8


def test_a_node_that_does_not_exist(cluster: Sandbox) -> None:
    with pytest.raises(SandboxMissing, match="n1 to n3"):
        cluster.fail("n9", "power")
