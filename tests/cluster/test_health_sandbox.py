"""Probe, fence and all-reduce on a real Slurm's nodes, from where the daemon runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from health_python import interpreter
from jobs import ENOUGH_S
from transom_slurm.sandbox import Sandbox, processes, targets
from transom_slurm.sandbox.waiting import until

from transomd.health.collective import MARK

pytestmark = pytest.mark.cluster

HUB = Path(__file__).with_name("health_hub.py")
NODES = ["n1", "n2", "n3", "n4"]


@pytest.fixture(autouse=True)
def _as_new(sandbox: Sandbox) -> None:
    sandbox.reset()


def hub(sandbox: Sandbox, do: str, nodes: list[str], **more: Any) -> dict[str, Any]:
    request = {
        "do": do,
        "nodes": nodes,
        "known_hosts": str(sandbox.known_hosts),
        "config": str(sandbox.ssh_config),
        "key": str(sandbox.ssh_key),
    }
    argv = sandbox.hub_argv([sys.executable, str(HUB), json.dumps(request | more)])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def probe(sandbox: Sandbox, *nodes: str, profile: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    options = {"allocated_gpus": 8}
    return hub(sandbox, "probe", list(nodes), profile=profile or {}, options=options, **more)


def unfit(report: dict[str, Any]) -> set[str]:
    return {name for name, check in report["checks"].items() if check["outcome"] == "unfit"}


def test_well_nodes_are_fit(sandbox: Sandbox) -> None:
    for node, report in probe(sandbox, *NODES).items():
        assert report["outcome"] == "fit", (node, report)
        assert report["checks"]["gpu-count"]["value"] == "8"
        assert {"xid", "ecc", "row-remap", "throttle", "processes", "disk", "mounts", "clock"} <= set(report["checks"])


def test_faults_are_told_apart_and_cost_no_other_node(sandbox: Sandbox) -> None:
    sandbox.fail("n1", "xid:79")
    sandbox.fail("n2", "gpu-lost")
    for code in (13, 31, 43, 45, 63):
        sandbox.fail("n3", f"xid:{code}")
    sandbox.fail("n4", "net-cut")
    found = probe(sandbox, *NODES)
    assert unfit(found["n1"]) == {"xid", "gpu-count"}
    assert found["n1"]["checks"]["xid"]["signature"] == "XID-79"
    assert "fallen off the bus" in found["n1"]["checks"]["xid"]["evidence"]
    assert unfit(found["n2"]) == {"gpu-count"}
    assert found["n2"]["checks"]["gpu-count"]["value"] == "7"
    assert found["n3"]["outcome"] == "fit"
    assert (found["n4"]["outcome"], found["n4"]["reached"]) == ("unknown", False)
    assert "ssh n4" in found["n4"]["error"]


def test_what_the_gpus_say(sandbox: Sandbox) -> None:
    sandbox.gpu_set("n1", 3, remapped_rows__failure=1)
    sandbox.gpu_set("n2", 4, clocks_throttle_reasons__active="0x0000000000000080")
    sandbox.gpu_set("n3", 5, ecc__errors__uncorrected__volatile__total=2)
    argv = ["setpriv", "--reuid", "nobody", "--clear-groups", "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(sandbox.node_argv("n4", argv), stdout=subprocess.PIPE, text=True) as foreign:
        assert foreign.stdout is not None
        sandbox.gpu_process("n4", 0, int(foreign.stdout.readline()), 1000)
        found = probe(sandbox, *NODES)
        for pid in named(sandbox, "n4", "sleep"):
            os.kill(pid, 9)
    assert [unfit(found[node]) for node in NODES] == [{"row-remap"}, {"throttle"}, {"ecc"}, {"processes"}]


def named(sandbox: Sandbox, node: str, name: str) -> list[int]:
    return sorted(pid for pid in targets.node_pids(sandbox.spec, node) if processes.name(pid) == name)


def test_fence_a_job_whose_slurmd_is_dead(sandbox: Sandbox, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\nexport TRANSOM_JOB_ID=j1\nTRANSOM_EPOCH=1 srun -K0 --overlap -n2 -N2 sleep 301 &\n"
        "TRANSOM_EPOCH=2 srun -K0 --overlap -n2 -N2 tail -f /dev/null &\nwait\n"
    )
    sandbox.run(["sbatch", "--no-requeue", "--no-kill", "-N2", "-wn[1-2]", f"-o{tmp_path}/out", str(script)])
    both = until(
        lambda: all(named(sandbox, node, name) for node in ("n1", "n2") for name in ("sleep", "tail")), ENOUGH_S
    )
    assert both, (tmp_path / "out").read_text()
    sandbox.fail("n2", "slurmd-kill")
    sandbox.fail("n4", "net-cut")
    found = hub(sandbox, "fence", ["n2", "n3", "n4"], job="j1", epoch=1)
    assert found["n2"]["clean"]
    assert len(found["n2"]["killed"]) == 1
    assert found["n3"] == {"clean": True, "killed": [], "failure": None}
    assert (found["n4"]["clean"], found["n4"]["failure"]) == (False, "unreachable")
    assert not named(sandbox, "n2", "sleep")
    assert len(named(sandbox, "n2", "tail")) == 1
    assert named(sandbox, "n1", "tail")


def test_all_reduce_on_all_nodes(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")
    user, python, env = interpreter()
    options = {"python": python, "user": user, "env": env, "megabytes": 4, "iterations": 2, "timeout": 90.0}
    found = hub(sandbox, "reduce", NODES, options=options)
    assert (found["outcome"], found["backend"], found["error"]) == ("fit", "gloo", "")
    assert found["bus_gbps"] > 0


def test_all_reduce_with_a_node_cut_off_names_nobody(sandbox: Sandbox) -> None:
    user, python, env = interpreter()
    sandbox.fail("n3", "net-cut")
    options = {"python": python, "user": user, "env": env, "timeout": 20.0}
    found = hub(sandbox, "reduce", ["n1", "n2", "n3"], options=options)
    assert found["outcome"] == "unknown"
    assert found["bus_gbps"] is None
    assert not [pid for node in ("n1", "n2") for pid in targets.node_pids(sandbox.spec, node) if is_rank(pid)]


def is_rank(pid: int) -> bool:
    try:
        return f"{MARK}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
