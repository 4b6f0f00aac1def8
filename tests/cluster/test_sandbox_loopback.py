"""A sandbox on loopback addresses: for an ordinary user, without any right."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import transom_slurm
from transom_slurm.sandbox import Sandbox, SandboxError, processes

pytestmark = pytest.mark.cluster

SCRIPT = """
import getpass, sys
from transom_slurm.sandbox import Sandbox
sandbox = Sandbox.up(2, sys.argv[1], gpus=2)
try:
    print("mode", sandbox.spec.mode, getpass.getuser())
    print("srun", *sorted(sandbox.run(["srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME:$(id -un)"]).stdout.split()))
    print("gpus", sandbox.run(["srun", "-N1", "sh", "-c", "nvidia-smi -L | wc -l"]).stdout.strip())
    ssh = sandbox.run(["ssh", "-F", str(sandbox.ssh_config), "n2"], check=False)
    print("ssh", ssh.stdout.strip() or ssh.stderr.strip())
    print("fail", sandbox.fail("n2", "slurmd-kill"))
    print("heal", *sandbox.heal("n2"))
    sandbox.wait_idle()
    sandbox.run(["sbatch", "-N2", "-o/dev/null", "--wrap", "srun sleep 300"])
finally:
    sandbox.down()
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can use, with the package in it: the checkout may be out of reach for other users."""
    base = Path(tempfile.mkdtemp(prefix="tsb-"))
    base.chmod(0o1777)
    shutil.copytree(Path(transom_slurm.__file__).parent, base / "lib/transom_slurm")
    yield base
    shutil.rmtree(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming an ordinary user needs root")
def test_an_ordinary_user_has_one(public: Path) -> None:
    (public / "script.py").write_text(SCRIPT)
    become = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups", "--inh-caps=-all"]
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(public / "lib"),
        "HOME": str(public),
        "LANG": "C.UTF-8",
    }
    argv = [*become, "/usr/bin/python3", str(public / "script.py"), str(public / "s")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said["mode"] == "loopback daemon"
    assert said["srun"] == "n1:daemon n2:daemon"
    assert said["gpus"] == "2"
    assert said["ssh"] == "This account is currently not available.", "sshd let it in, to its shell, which is nologin"
    assert "slurmd started" in said["heal"]
    assert not (public / "s").exists()
    mentions = [pid for pid in processes.every_pid() if str(public / "s") in str(processes.environment(pid))]
    assert mentions == []


def test_root_may_have_one_too_and_it_has_no_power_switch(public: Path) -> None:
    before = Path("/run/sshd").exists()
    sandbox = Sandbox.up(2, public / "s", mode="loopback")
    try:
        assert sorted(sandbox.slurm_states()) == ["n1", "n2"]
        for kind in ("power", "net-cut"):
            with pytest.raises(SandboxError, match="loopback") as caught:
                sandbox.fail("n1", kind)
            assert "root" in caught.value.hint
        assert all(report.power and report.link and report.slurmd for report in sandbox.status())
        said = sandbox.run(["ssh", "-F", str(sandbox.ssh_config), "n1", "echo $SLURM_CONF"]).stdout.strip()
        assert said == str(sandbox.directory / "etc/slurm.conf")
    finally:
        sandbox.down()
    assert Path("/run/sshd").exists() == before
