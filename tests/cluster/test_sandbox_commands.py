"""``transom sandbox`` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from transom_slurm.sandbox import Sandbox

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def place(make_sandbox) -> Iterator[Path]:  # type: ignore[no-untyped-def]
    """A directory with a sandbox of three nodes, started by the command; ``make_sandbox`` is here to skip or fail."""
    # Not below pytest's own folder, which other users cannot enter, however deep it lies there.
    base = Path(tempfile.mkdtemp(prefix="tsb-cli-"))
    base.chmod(0o755)
    directory = base / "s"
    done = _transom("up", "--nodes", "3", "--gpus", "4", directory=directory)
    assert done.returncode == 0, done.stderr
    assert "3 nodes n1-n3 (a namespace each)" in done.stdout
    shell, daemon, job = (line for line in done.stdout.splitlines() if line.startswith("  ") and "node," not in line)
    assert (shell, daemon) == (f'  eval "$(transom sandbox env --dir {directory})"', "  transomd > transomd.log 2>&1 &")
    assert job == "  transom submit job.yaml"
    yield directory
    assert _transom("down", directory=directory).stdout == f"ended: {directory}\n"
    assert not directory.exists()
    assert _transom("down", directory=directory).returncode == 0
    base.rmdir()


def _transom(command: str, *words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "transom_cli.main", "sandbox", command, "--dir", str(directory), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def _nodes(place: Path) -> dict[str, dict[str, object]]:
    about = json.loads(_transom("status", "--json", directory=place).stdout)
    return {node["name"]: node for node in about["nodes"]}


def test_status_shows_what_is_broken(place: Path) -> None:
    done = _transom("fail", "n[2-3]", "gpu-lost", directory=place)
    assert done.stdout == "n2: GPU 0 is gone from nvidia-smi\nn3: GPU 0 is gone from nvidia-smi\n"
    assert _transom("fail", "n3", "power", directory=place).returncode == 0
    rows = {line.split()[0]: line.split() for line in _transom("status", directory=place).stdout.splitlines()[2:]}
    assert rows["n1"][:6] == ["n1", "10.77.0.1", "yes", "yes", "yes", "4/4"]
    assert rows["n2"][:6] == ["n2", "10.77.0.2", "yes", "yes", "yes", "3/4"]
    assert rows["n3"][:6] == ["n3", "10.77.0.3", "NO", "NO", "NO", "3/4"]
    assert "n3: booted" in _transom("heal", "n[1-3]", directory=place).stdout
    assert [node["gpus"] for node in _nodes(place).values()] == [4, 4, 4]
    assert _nodes(place)["n3"]["power"] is True


def test_programs_are_told_what_was_broken_and_mended(place: Path) -> None:
    done = _transom("fail", "n[2-3]", "gpu-lost", "--json", directory=place)
    said = "GPU 0 is gone from nvidia-smi"
    assert json.loads(done.stdout) == {"results": [{"node": name, "message": said} for name in ("n2", "n3")]}
    healed = json.loads(_transom("heal", "n[1-3]", "--json", directory=place).stdout)["results"]
    assert [one["node"] for one in healed] == ["n1", "n2", "n3"]
    assert all("as after a reboot" in one["message"] for one in healed)
    refused = _transom("fail", "n1", "rank-kill", "--json", directory=place)
    assert (refused.returncode, json.loads(refused.stdout)) == (5, {"results": []})


def test_programs_are_told_what_is_up_and_how_to_get_in(place: Path) -> None:
    directory = place.with_name("json")
    told = json.loads(_transom("up", "--nodes", "1", "--json", directory=directory).stdout)
    try:
        assert (told["directory"], told["slurm_answers"]) == (str(directory), True)
        assert [node["name"] for node in told["nodes"]] == ["n1"]
        assert told["env"]["TRANSOM_SANDBOX"] == str(directory)
    finally:
        ended = json.loads(_transom("down", "--json", directory=directory).stdout)
    assert ended == {"directory": str(directory), "ended": True}


def test_the_shell_lines_make_slurms_words_mean_the_sandbox(place: Path) -> None:
    exports = _transom("env", directory=place).stdout
    script = f"{exports}\nsrun -N3 hostname | sort; munge -n | unmunge | grep -c Success; scontrol ping"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split()[:4] == ["n1", "n2", "n3", "1"]
    assert "Slurmctld(primary) at hub is UP" in done.stdout


def test_the_sandbox_command_inside_such_a_shell_finds_its_own(place: Path) -> None:
    script = f"{_transom('env', directory=place).stdout}\n{sys.executable} -m transom_cli.main sandbox status"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert str(place) in done.stdout


def test_exec_passes_output_and_exit_code_on(place: Path, tmp_path: Path) -> None:
    done = _transom("exec", "--node", "n2", "--", "sh", "-c", "hostname; exit 7", directory=place)
    assert (done.stdout, done.returncode) == ("n2\n", 7)
    done = _transom("exec", "--", "hostname", "-s", directory=place)
    assert (done.stdout, done.returncode) == ("hub\n", 0)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["fail", "n9", "power"], 5, "no node n9"),
        (["fail", "n[1-9]", "power"], 5, "no node n4, n5"),
        (["fail", "n[1-", "power"], 2, "bracket is not closed"),
        (["fail", "n1", "fire"], 2, "use one of: power, net-cut"),
        (["fail", "n1", "rank-kill"], 5, "no process of a training program"),
        (["exec", "--node", "n9", "true"], 5, "no such node"),
        (["up"], 1, "transom sandbox down"),
    ],
)
def test_errors_say_what_to_do(place: Path, words: list[str], code: int, said: str) -> None:
    done = _transom(*words, directory=place)
    assert done.returncode == code
    assert said in done.stderr
    assert len(_nodes(place)) == 3


def test_another_user_is_told_to_become_root(place: Path) -> None:
    script = f"exec {place}/bin/squeue"
    become = ["setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"]
    done = subprocess.run([*become, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 125
    assert "needs root" in done.stderr
    assert Sandbox.attach(place).slurm_states()
