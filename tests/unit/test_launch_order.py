"""Ranks stay where they are when a node is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from transomd.launch.order import arrange
from transomd.launch.program import LaunchPlan, hosts, srun_argv, task_script
from transomd.spec import JobSpec

SLURM = ("n1", "n2", "n3", "n4", "n5")


@pytest.mark.parametrize(
    ("nodes", "before", "found"),
    [
        (["n3", "n1", "n2"], [], ["n1", "n2", "n3"]),
        (["n1", "n3", "n4"], ["n1", "n2", "n3"], ["n1", "n4", "n3"]),
        (["n4", "n3", "n2"], ["n1", "n2", "n3"], ["n4", "n2", "n3"]),
        (["n4", "n3", "n5"], ["n4", "n2", "n3"], ["n4", "n5", "n3"]),
        (["n1", "n4", "n5"], ["n1", "n2", "n3"], ["n1", "n4", "n5"]),
        (["n1", "n2"], ["n1", "n2", "n3"], ["n1", "n2"]),
        (["n1", "gone"], ["n1", "gone"], ["n1"]),
    ],
)
def test_who_is_left_keeps_its_place_and_the_new_take_those_of_the_lost(
    nodes: list[str], before: list[str], found: list[str]
) -> None:
    assert arrange(nodes, before, SLURM) == found


def plan(launcher: str, *, arranged: bool) -> LaunchPlan:
    spec = JobSpec(name="t", command="true", nodes=3, workdir="/", tasks_per_node=2, launcher=launcher)
    nodes = ("n1", "n4", "n3")
    return LaunchPlan(
        job_id=1, attempt=1, epoch=2, nodes=nodes, resume_step=None, master_port=1, spec=spec, env={}, arranged=arranged
    )


def test_slurm_is_told_the_node_of_every_task_where_the_order_is_not_its_own() -> None:
    argv = srun_argv(plan("srun", arranged=True), Path("/run/task.sh"), Path("/run"))
    assert {"--distribution=arbitrary", "--nodelist=/run/hosts", "--ntasks=6"} <= set(argv)
    assert not [one for one in argv if one.startswith("--nodes")], "srun of 24.11 refuses both"
    assert hosts(plan("srun", arranged=True)).split() == ["n1", "n1", "n4", "n4", "n3", "n3"]
    assert hosts(plan("torchrun", arranged=True)).split() == ["n1", "n4", "n3"]
    plain = srun_argv(plan("srun", arranged=False), Path("/run/task.sh"), Path("/run"))
    assert {"--nodes=3", "--nodelist=n1,n4,n3"} <= set(plain)
    assert "--distribution=arbitrary" not in plain


@pytest.mark.parametrize(("launcher", "a_node"), [("srun", 2), ("torchrun", 1)])
def test_the_rank_of_a_node_is_that_of_its_tasks(launcher: str, a_node: int) -> None:
    spec = plan(launcher, arranged=True).spec
    assert f'NODE_RANK="$((SLURM_PROCID / {a_node}))"' in task_script(spec)
    assert "SLURM_NODEID" not in task_script(spec)
