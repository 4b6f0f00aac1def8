"""Each kind of fault has its effect, and heal undoes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import ENOUGH_S, needs_fuse
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
    made: Sandbox = make_sandbox(3, slurmd_timeout=9, message_timeout=2)
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
    running = until(lambda: len(_named(cluster, "n1", "sleep")) == 2 == len(_named(cluster, "n2", "sleep")), ENOUGH_S)
    assert running, cluster.run(["sh", "-c", f"scontrol show job {job}; sinfo -N; cat {directory}/out"]).stdout
    return job


def _named(cluster: Sandbox, node: str, name: str) -> list[int]:
    return sorted(pid for pid in targets.node_pids(cluster.spec, node) if processes.name(pid) == name)


def _ssh(cluster: Sandbox, node: str, patience_s: int = ENOUGH_S // 2) -> int:
    argv = ["ssh", "-F", str(cluster.ssh_config), "-o", f"ConnectTimeout={patience_s}", node, "true"]
    return cluster.run(argv, check=False).returncode


def _boot_id(cluster: Sandbox, node: str) -> str:
    return cluster.run(["cat", "/proc/sys/kernel/random/boot_id"], node=node).stdout


def _hardware(cluster: Sandbox, node: str) -> str:
    return cluster.run(["cat", "/sys/class/net/eth0/address"], node=node).stdout


def test_power_loss_kills_all_at_once_and_slurm_notices(cluster: Sandbox, tmp_path: Path) -> None:
    before, hardware = _boot_id(cluster, "n2"), _hardware(cluster, "n2")
    _program(cluster, tmp_path)
    pids = targets.node_pids(cluster.spec, "n2")
    cluster.fail("n2", "power")
    assert not [pid for pid in pids if processes.state(pid) not in ("", "Z")]
    assert _ssh(cluster, "n2", 1) == 255
    with pytest.raises(SandboxError, match="has no power"):
        cluster.run(["true"], node="n2")
    assert until(lambda: cluster.slurm_states().get("n2", "").startswith("down"), ENOUGH_S, 0.2)
    assert until(lambda: not _named(cluster, "n1", "sleep"), ENOUGH_S), "the step ends when one of its nodes is down"
    assert cluster.heal("n2")[0] == "booted"
    assert until(lambda: cluster.slurm_states().get("n2") == "idle", ENOUGH_S, 0.1)
    assert _boot_id(cluster, "n2") != before
    assert _hardware(cluster, "n2") == hardware, "or the other nodes do not reach it at first"
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
    assert _ssh(cluster, "n2", 1) == 255
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
    assert until(lambda: len(targets.slurmd_pids(cluster.spec, "n2")) == 1, ENOUGH_S)
    assert len(_named(cluster, "n2", "sleep")) == 2


def test_a_rank_is_killed_behind_its_shell(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    wanted = targets.find_rank(cluster.spec, "n2")
    assert processes.name(wanted) == "sleep"
    assert processes.environment(wanted)["LOCAL_RANK"] == "0"
    cluster.fail("n2", "rank-kill")
    assert until(lambda: wanted not in _named(cluster, "n2", "sleep"), ENOUGH_S)
    assert len(_named(cluster, "n1", "sleep")) == 2


def test_a_rank_is_stopped_and_goes_on(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    wanted = targets.find_rank(cluster.spec, "n1")
    cluster.fail("n1", "rank-stop")
    assert until(lambda: processes.state(wanted) == "T", ENOUGH_S)
    assert "1 stopped processes continued" in cluster.heal("n1")
    assert until(lambda: processes.state(wanted) == "S", ENOUGH_S)


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


def test_stopped_daemons_go_on_when_healed(cluster: Sandbox) -> None:
    for kind, name in (("slurmd-stop", "slurmd"), ("munge-stop", "munged")):
        cluster.fail("n2", kind)
        assert [processes.state(pid) for pid in _named(cluster, "n2", name)] == ["T"]
    assert _ssh(cluster, "n2") == 0
    assert "2 stopped processes continued" in cluster.heal("n2")
    assert cluster.run(["munge", "-n"], node="n2").returncode == 0


def test_a_killed_stepd_leaves_its_task_and_slurm_does_not_notice(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    stepds, ranks = _named(cluster, "n2", "slurmstepd"), _named(cluster, "n2", "sleep")
    cluster.fail("n2", "stepd-kill")
    assert until(lambda: _named(cluster, "n2", "slurmstepd") == [], ENOUGH_S), stepds
    assert _named(cluster, "n2", "sleep") == ranks
    with pytest.raises(SandboxMissing, match="no batch script"):
        cluster.fail("n2", "stepd-kill:batch")
    cluster.fail("n1", "stepd-kill:batch")
    assert cluster.run(["squeue", "-h", "-o", "%T"]).stdout.strip() == "RUNNING"


def _stops_and_goes_on(pid: int) -> bool:
    seen: set[str] = set()
    return until(lambda: seen.add(processes.state(pid)) or {"T", "S"} <= seen, ENOUGH_S)


def test_a_slow_node_stops_and_goes_on(cluster: Sandbox, tmp_path: Path) -> None:
    _program(cluster, tmp_path)
    cluster.fail("n2", "slow:20")
    rank = _named(cluster, "n2", "sleep")[0]
    assert _stops_and_goes_on(rank)
    assert [processes.state(pid) for pid in _named(cluster, "n1", "sleep")] == ["S", "S"]
    cluster.heal("hub")
    assert _stops_and_goes_on(rank), "only its own heal ends it"
    assert "its program has its speed back" in cluster.heal("n2")
    assert until(lambda: processes.state(rank) == "S", ENOUGH_S)
    assert not until(lambda: processes.state(rank) == "T", 1)


def test_errors_are_counted_and_nvidia_smi_hangs(cluster: Sandbox) -> None:
    cluster.fail("n2", "ecc:3")
    cluster.fail("n2", "ecc:3")
    query = "--query-gpu=ecc.errors.uncorrected.volatile.total"
    said = cluster.run(["/usr/bin/nvidia-smi", query, "--format=csv,noheader"], node="n2").stdout.split()
    assert said == ["0", "0", "0", "2", "0", "0", "0", "0"]
    cluster.fail("n2", "nvidia-smi-hang")
    assert cluster.run(["timeout", "1", "/usr/bin/nvidia-smi"], node="n2", check=False).returncode == 124
    cluster.heal("n2")
    assert cluster.run(["/usr/bin/nvidia-smi", query, "--format=csv,noheader"], node="n2").stdout.split() == ["0"] * 8


def _checkpoints(directory: Path) -> Path:
    folder = directory / "checkpoints"
    folder.mkdir()
    (folder / "old").write_text("kept")
    return folder


def _write(folder: Path) -> list[str]:
    return ["dd", "if=/dev/zero", f"of={folder}/new", "bs=1k", "count=1"]


def _mended(cluster: Sandbox, node: str, folder: Path) -> None:
    assert f"{folder} answers and has space" in cluster.heal(node)
    assert cluster.run(["ls", str(folder)], node=node).stdout.split() == ["new", "old"]


def test_a_folder_is_full_on_one_node(cluster: Sandbox, tmp_path: Path) -> None:
    folder = _checkpoints(tmp_path)
    cluster.fail("n1", f"disk-full:{folder}")
    full = cluster.run(_write(folder), node="n1", check=False)
    assert "No space left on device" in full.stderr
    assert cluster.run(["cat", f"{folder}/old"], node="n1").stdout == "kept"
    assert cluster.run(_write(folder), node="n3", check=False).returncode == 0
    _mended(cluster, "n1", folder)


@needs_fuse
def test_a_folder_is_dead_on_one_node(cluster: Sandbox, tmp_path: Path) -> None:
    folder = _checkpoints(tmp_path)
    cluster.fail("n2", f"mount-dead:{folder}")
    listed = cluster.run(["timeout", "-s", "KILL", "1", "ls", str(folder)], node="n2", check=False)
    assert listed.returncode in (-9, 137)
    assert cluster.run(_write(folder), node="n3", check=False).returncode == 0
    _mended(cluster, "n2", folder)


def test_no_checkpoint_folder_without_a_program(cluster: Sandbox) -> None:
    with pytest.raises(SandboxMissing, match="no program there has one"):
        cluster.fail("n1", "disk-full")


def test_slurmctld_stops_and_slows_and_dies(cluster: Sandbox) -> None:
    def answers() -> bool:
        return cluster.run(["timeout", "1", "sinfo"], check=False).returncode == 0

    for kind, said in (
        ("ctld-stop", "slurmctld continued"),
        ("ctld-kill", "slurmctld started"),
        ("ctld-slow", "nothing slows slurmctld or holds the database any more"),
    ):
        cluster.fail("hub", kind)
        assert kind == "ctld-slow" or not answers()
        assert said in cluster.heal("hub")
        assert until(answers, ENOUGH_S)


@pytest.mark.parametrize(("node", "kind"), [("n1", "ctld-kill"), ("hub", "power")])
def test_a_fault_belongs_to_a_node_or_to_the_hub(cluster: Sandbox, node: str, kind: str) -> None:
    with pytest.raises(SandboxUsage, match="it is a fault of"):
        cluster.fail(node, kind)


@pytest.mark.parametrize("kind", ["daemon-kill", "db-locked", "db-gone"])
def test_without_a_transomd_there_is_none_to_hurt(cluster: Sandbox, kind: str) -> None:
    with pytest.raises(SandboxMissing):
        cluster.fail("hub", kind)


@pytest.mark.parametrize(
    "kind", ["nope", "slow:0", "stepd-kill:x", "xid", "xid:abc", "power:3", "gpu-lost:99", "xid:79:99"]
)
def test_a_wrong_kind_is_refused(cluster: Sandbox, kind: str) -> None:
    with pytest.raises(SandboxUsage):
        cluster.fail("n2", kind)
    assert cluster.status()[1].gpus == 8


def test_a_node_that_does_not_exist(cluster: Sandbox) -> None:
    with pytest.raises(SandboxMissing, match="n1 to n3"):
        cluster.fail("n9", "power")
