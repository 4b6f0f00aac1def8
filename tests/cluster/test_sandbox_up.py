"""A sandbox is a real Slurm whose nodes are apart from each other and from the host."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from jobs import ENOUGH_S
from transom_slurm.sandbox import Sandbox, SandboxError
from transom_slurm.sandbox.waiting import until

pytestmark = pytest.mark.cluster


def _ssh(sandbox: Sandbox, node: str, command: str) -> str:
    return sandbox.run(["ssh", "-F", str(sandbox.ssh_config), node, command]).stdout.strip()


def _on(sandbox: Sandbox, node: str, command: str) -> str:
    return sandbox.run(["sh", "-c", command], node=node).stdout.strip()


def test_a_job_runs_on_every_node(sandbox: Sandbox) -> None:
    said = sandbox.run(["srun", "-N4", "hostname"]).stdout.split()
    assert sorted(said) == list(sandbox.nodes)


def test_slurm_commands_from_outside_mean_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    env = {**os.environ, **sandbox.env()}
    done = subprocess.run(["srun", "-N1", "pwd"], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)


def test_a_job_gets_gpus(sandbox: Sandbox) -> None:
    said = sandbox.run(["srun", "-N1", "--gres=gpu:2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout.strip()
    assert said == "0,1"


def test_ssh_reaches_each_node_by_name_with_checked_host_keys(sandbox: Sandbox) -> None:
    for node in sandbox.nodes:
        assert _ssh(sandbox, node, "hostname; echo $SLURM_CONF; nvidia-smi -L | wc -l").split() == [
            node,
            str(sandbox.directory / "etc/slurm.conf"),
            "8",
        ]


def test_ssh_to_another_nodes_address_is_refused_for_its_key(sandbox: Sandbox) -> None:
    argv = ["ssh", "-F", str(sandbox.ssh_config), "-o", "HostName=10.77.0.2", "n1", "true"]
    done = sandbox.run(argv, check=False)
    assert done.returncode == 255
    assert "host key" in done.stderr.lower()


def test_a_node_has_its_own_processes_memory_and_name(sandbox: Sandbox) -> None:
    _on(sandbox, "n1", "echo secret > /dev/shm/mine; echo x > /run/mine")
    assert "mine" not in _on(sandbox, "n2", "ls /dev/shm /run")
    assert not Path("/dev/shm/mine").exists()
    assert _on(sandbox, "n1", "cat /proc/1/comm; ls /sys/class/net").split() == ["python3", "eth0", "lo"]
    _on(sandbox, "n1", "rm /dev/shm/mine /run/mine")


def test_nodes_share_the_hosts_files(sandbox: Sandbox, tmp_path: Path) -> None:
    _on(sandbox, "n1", f"echo hello > {tmp_path}/file")
    assert _on(sandbox, "n2", f"cat {tmp_path}/file") == "hello"


def test_munge_credentials_hold_across_nodes(sandbox: Sandbox) -> None:
    credential = _on(sandbox, "n1", "munge -n")
    assert "Success" in _on(sandbox, "n2", f"echo '{credential}' | unmunge")


def test_the_host_is_left_alone(sandbox: Sandbox) -> None:
    assert str(sandbox.directory) not in Path("/proc/self/mounts").read_text()
    assert "n1" not in subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.split()
    assert "10.77." not in subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout


def test_simulated_gpus_answer_like_the_real_tool(sandbox: Sandbox) -> None:
    fields = "index,name,ecc.errors.uncorrected.volatile.total,memory.total"
    query = f"/usr/bin/nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits"
    sandbox.gpu_set("n3", 1, ecc__errors__uncorrected__volatile__total=4)
    rows = _on(sandbox, "n3", query).splitlines()
    assert rows[1] == "1, NVIDIA H100 (simulated by transom sandbox), 4, 81559"
    assert len(rows) == 8
    sandbox.heal("n3")
    assert _on(sandbox, "n3", query).splitlines()[1].split(", ")[2] == "0"


def test_a_controller_that_is_stopped_comes_back_with_its_jobs(sandbox: Sandbox) -> None:
    job = sandbox.run(["sbatch", "--parsable", "-N1", "-o/dev/null", "--wrap", "sleep 300"]).stdout.strip()
    assert until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-j", job, "-o%T"]).stdout, ENOUGH_S)
    sandbox.stop_controller()
    assert "is DOWN" in sandbox.run(["scontrol", "ping"], check=False).stdout
    sandbox.start_controller()
    assert sandbox.run(["squeue", "-h", "-j", job, "-o%T"]).stdout.strip() == "RUNNING"
    sandbox.reset()
    assert sandbox.run(["squeue", "-h"]).stdout == ""


def test_two_run_at_once(sandbox: Sandbox, make_sandbox) -> None:  # type: ignore[no-untyped-def]
    other = make_sandbox(2)
    assert sorted(other.run(["srun", "-N2", "hostname"]).stdout.split()) == ["n1", "n2"]
    assert len(sandbox.slurm_states()) == 4
    assert len(other.slurm_states()) == 2
    other.fail("n1", "power")
    assert all(report.power for report in sandbox.status())


def test_a_second_one_in_the_same_place_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="one is there") as caught:
        Sandbox.up(2, sandbox.directory)
    assert caught.value.hint == f"transom sandbox down --dir {sandbox.directory}"
    assert len(sandbox.slurm_states()) == 4


def test_it_is_found_again(sandbox: Sandbox) -> None:
    assert Sandbox.attach(sandbox.directory) == sandbox
    assert json.loads((sandbox.directory / "sandbox.json").read_text())["ready"] is True


def test_a_slurm_that_does_not_start_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "bad"
    with pytest.raises(SandboxError, match=r"fatal: .*select/nonsense"):
        Sandbox.up(2, directory, extra=["SelectType=select/nonsense"])
    assert not directory.exists()


def test_ordinary_users_submit_and_log_in(sandbox: Sandbox) -> None:
    become = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"]
    said = sandbox.run([*become, "srun", "-N2", "-D/tmp", "sh", "-c", "echo $(hostname) $(id -un)"]).stdout
    assert sorted(said.splitlines()) == ["n1 daemon", "n2 daemon"]
    done = sandbox.run(["ssh", "-F", str(sandbox.ssh_config), "-l", "daemon", "n1"], check=False)
    assert "account is currently not available" in done.stdout, "sshd let it in, to its shell, which is nologin"


def test_daemons_see_nothing_of_the_starters_environment(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    sandbox.fail("n1", "slurmd-kill")
    sandbox.heal("n1")
    slurmd = sandbox.run(["sh", "-c", "tr '\\0' '\\n' < /proc/$(pidof -s slurmd)/environ"], node="n1").stdout
    assert "SLURM_CONF=" in slurmd
    assert "TOKEN" not in slurmd
    sandbox.reset()
