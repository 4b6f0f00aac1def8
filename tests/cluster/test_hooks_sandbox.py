"""Prolog, epilog and health check on a real Slurm: they tell what they see, and are in nobody's way."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hooksite import HUB, SAID, SOON_S, HookSite, history
from jobs import needs_fuse
from transom_slurm.commands import CommandClient
from transom_slurm.runner import clean_env
from transom_slurm.stuck import stuck_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
NODES = 3


@pytest.fixture(scope="module")
def hook_site(make_sandbox: Any) -> Iterator[HookSite]:
    folder = Path(tempfile.mkdtemp(prefix="hooks-"))
    folder.chmod(0o755)
    extra = [f"{word}={folder}/{word.lower()}" for word in ("Prolog", "Epilog")]
    try:
        yield HookSite(make_sandbox(NODES, extra=(*extra, "PrologFlags=Alloc")), folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def hooks(hook_site: HookSite) -> Iterator[HookSite]:
    yield hook_site
    hook_site.sandbox.reset()
    for node in hook_site.sandbox.nodes:
        hook_site.sandbox.run(["scontrol", "update", f"nodename={node}", "comment="])
        hook_site.sandbox.run(["rm", "-rf", "/run/transom-hooks"], node=node)


def test_a_job_goes_through_and_its_node_is_known(hooks: HookSite) -> None:
    with hooks.daemon() as site:
        hooks.ended_well(hooks.submit("n1", "--gpus=8"))

        def known() -> bool:
            found = {n["name"]: n for n in site.client.get("/v1/nodes")["nodes"]}["n1"]
            return {"gpu-count", "xid", "disk"} <= {c["check"] for c in found["checks"] if c["outcome"] == "fit"}

        site.wait(known, "what the prolog saw of n1")
        assert history(site, "n1") == [], "nothing happened"
        assert hooks.spooled("n1") == []


def test_a_daemon_that_is_not_there_costs_two_seconds_and_no_job(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "drain"}) as site:
        right = f"http://{HUB}:{(site.root / 'state/port').read_text()}"
        _goes_through(hooks, f"http://{HUB}:9")
        _goes_through(hooks, "http://10.77.0.99:7077")
        _goes_through(hooks, "http://no-such-head.invalid:7077")
        for port, program in ((7998, "deaf"), (7999, "web")):
            with hooks.other(program, port):
                _goes_through(hooks, f"http://{HUB}:{port}")
        assert len([name for name in hooks.spooled("n1") if "prolog" in name]) == 10
        assert hooks.node("n1")["State"] == "IDLE"
        hooks.point(right)
        # What was put aside is told by and by, some at a time.
        site.wait(lambda: "told" in hooks.say("n1", "prolog")[0] and not hooks.spooled("n1"), "all is told")


def _goes_through(hooks: HookSite, url: str) -> None:
    """A job runs as if there were no hooks, and a hook says by hand what is wrong."""
    hooks.point(url)
    began = time.monotonic()
    hooks.ended_well(hooks.submit("n1"))
    assert time.monotonic() - began < SOON_S, "the job's prolog and the probe's and the answer's time at most"
    said, took = hooks.say("n1", "prolog")
    assert f"transomd at {url} was not told" in said
    assert took < SOON_S


def test_a_hanging_nvidia_smi_is_unknown_and_drains_nothing(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "drain", "ecc": "drain"}) as site:
        hooks.patient()
        hooks.sandbox.fail("n1", "nvidia-smi-hang")
        began = time.monotonic()
        hooks.ended_well(hooks.submit("n1"))
        assert time.monotonic() - began < SOON_S
        said, took = hooks.say("n1", "prolog")
        assert said.startswith("prolog: told transomd: unknown (gpu-count")
        assert took < SOON_S
        site.wait(lambda: _outcomes(site, "n1").get("gpu-count") == "unknown", "unknown")
        assert hooks.node("n1")["State"] == "IDLE"
        assert history(site, "n1", "drained", "unfit") == []


@needs_fuse
def test_nothing_of_the_node_can_be_written_and_a_mount_is_dead(hooks: HookSite) -> None:
    with hooks.daemon() as site:
        hooks.sandbox.run(["mkdir", "-p", f"{hooks.folder}/mnt"])
        config = site.root / "transomd.toml"
        config.write_text(config.read_text().replace("[health]\n", f'[health]\nmounts = ["{hooks.folder}/mnt"]\n'))
        hooks.install(config, "9")
        hooks.sandbox.fail("n2", f"mount-dead:{hooks.folder}/mnt")
        hooks.sandbox.run(["mkdir", "-p", "/run/transom-hooks"], node="n2")
        hooks.sandbox.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", "/run/transom-hooks"], node="n2")
        try:
            hooks.ended_well(hooks.submit("n2"))
            said, took = hooks.say("n2", "healthcheck")
        finally:
            hooks.sandbox.run(["umount", "/run/transom-hooks"], node="n2")
        assert "the report is lost: OSError: [Errno 30]" in said, said
        assert took < SOON_S
        hooks.install(config, (site.root / "state/port").read_text())
        hooks.patient()
        said, took = hooks.say("n2", "prolog")
        assert "told transomd" in said
        assert took < SOON_S
    hooks.sandbox.heal("n2")


def test_observe_tells_and_drains_nothing(hooks: HookSite) -> None:
    with hooks.daemon(hooks={"enforce": True}) as site:
        hooks.sandbox.fail("n1", "gpu-lost")
        hooks.ended_well(hooks.submit("n1"))
        site.wait(lambda: history(site, "n1", "unfit"), "it is told")
        hooks.ended_well(hooks.submit("n1"))
        assert len(history(site, "n1", "unfit")) == 1, "once, however many jobs see it"
        assert hooks.node("n1") == {"State": "IDLE", "Reason": "", "Comment": ""}


def test_comment_is_written_and_taken_out_again_but_never_over_a_persons(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "comment"}) as site:
        hooks.sandbox.run(["scontrol", "update", "nodename=n2", "comment=on loan to Eve"])
        for node in ("n1", "n2"):
            hooks.sandbox.fail(node, "gpu-lost")
            hooks.say(node, "healthcheck")
        site.wait(lambda: hooks.node("n1")["Comment"].startswith("transom[gpu-count] nvidia-smi"), "a comment")
        hooks.sandbox.heal("n1")
        hooks.say("n1", "healthcheck")
        site.wait(lambda: not hooks.node("n1")["Comment"], "taken out")
        assert hooks.node("n2")["Comment"] == "on loan to Eve"
        assert {hooks.node(node)["State"] for node in ("n1", "n2")} == {"IDLE"}


def test_drained_once_and_what_a_person_decides_stays(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "drain"}) as site:
        hooks.sandbox.run(["scontrol", "update", "nodename=n2", "state=drain", "reason=fan 2"])
        hooks.sandbox.fail("n1", "gpu-lost")
        hooks.sandbox.fail("n2", "gpu-lost")
        hooks.ended_well(hooks.submit("n1"))
        hooks.say("n2", "healthcheck")
        site.wait(lambda: "DRAIN" in hooks.node("n1")["State"], "n1 is drained")
        assert hooks.node("n1")["Reason"].startswith("transom[gpu-count] nvidia-smi shows")
        assert hooks.node("n2")["Reason"] == "fan 2"
        hooks.sandbox.run(["scontrol", "update", "nodename=n1", "state=resume"])
        site.wait(lambda: hooks.node("n1")["State"] == "IDLE", "a person gives it back")
        hooks.ended_well(hooks.submit("n1"))
        site.kill_daemon()
        site.start_daemon()
        hooks.say("n1", "prolog")
        site.client.get("/v1/nodes")
        assert hooks.node("n1")["State"] == "IDLE", "the trouble is the same, and a person has decided"
        assert len(history(site, "n1", "drained")) == 1
        assert history(site, "n2", "drained", "drain-refused") == []


async def test_enforced_a_prolog_fails_and_the_reason_names_the_check(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "drain"}, hooks={"enforce": True}) as site:
        hooks.patient()
        hooks.sandbox.fail("n2", "gpu-lost")
        job = hooks.submit("n2", "--requeue")
        reason = f"transom[gpu-count] Prolog error job={job}: nvidia-smi shows "
        # What was recorded to be done is told as done once it was.
        site.wait(lambda: hooks.node("n2")["Reason"].startswith(reason), "the reason names the check")
        site.wait(lambda: history(site, "n2", "drained"), "it is told")
        assert hooks.wait_job(job, "PENDING")["Reason"] == "launch_failed_requeued_held"
        assert not (hooks.folder / f"{job}.out").exists()
        assert len(history(site, "n2", "drained")) == 1
        client = CommandClient(env=clean_env(hooks.sandbox.env()))
        told = stuck_jobs((await client.jobs()).values(), await client.nodes(), now=time.time())
        assert [(str(one.job.job_id), "n2" in one.cause) for one in told] == [(job, True)]
        hooks.sandbox.heal("n2")
        site.cli("undrain", "n2")
        hooks.sandbox.run(["sh", "-c", told[0].command])
        hooks.ended_well(job)


def test_enforced_but_the_budget_is_used_up(hooks: HookSite) -> None:
    with hooks.daemon(modes={"gpu-count": "drain"}, hooks={"enforce": True}, drain={"per_hour": 0}) as site:
        hooks.sandbox.fail("n1", "gpu-lost")
        hooks.ended_well(hooks.submit("n1"))
        site.wait(lambda: history(site, "n1", "drain-refused"), "told why not")
        assert hooks.node("n1")["State"] == "IDLE"


def test_a_prolog_error_of_somebody_else_keeps_its_reason(hooks: HookSite) -> None:
    """Only Slurm's own words are ever replaced, and only on a node that transom may drain itself."""
    with hooks.daemon(modes={"gpu-count": "drain"}, hooks={"enforce": True}, drain={"enabled": False}) as site:
        hooks.sandbox.fail("n1", "gpu-lost")
        hooks.sandbox.run(["scontrol", "update", "nodename=n1", "state=drain", "reason=Prolog error"])
        hooks.say("n1", "prolog")
        site.wait(lambda: history(site, "n1", "unfit"), "it is told")
        assert hooks.node("n1")["Reason"] == "Prolog error"


def test_what_a_job_leaves_behind_is_told_and_left_alone(hooks: HookSite) -> None:
    with hooks.daemon() as site:
        mine = hooks.sandbox.run(["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], node="n3").stdout.strip()
        # Out of Slurm's reach (a session of its own, reparented), but it still bears the job's mark.
        left = "setsid sh -c 'echo $$ >left.pid; exec sleep 300' >/dev/null 2>&1 &"
        job = hooks.submit("n3", command=f"{left}\nuntil [ -s left.pid ]; do sleep 0.1; done\necho {SAID}")
        hooks.wait_job(job, "COMPLETED", "COMPLETING")
        site.wait(lambda: history(site, "n3", "leftover"), "what it left")
        (event,) = history(site, "n3", "leftover")
        assert f"job {job} left 1 processes: sleep" in event["message"]
        pid = (hooks.folder / "left.pid").read_text().strip()
        for one in (pid, mine):
            assert hooks.sandbox.run(["kill", "-9", one], node="n3", check=False).returncode == 0, "report only"


def test_transoms_own_job_goes_on_without_the_node(hooks: HookSite) -> None:
    """To Slurm the attempt was cancelled; it was no person."""
    with hooks.daemon(modes={"gpu-count": "drain"}, hooks={"enforce": True}) as site:
        hooks.patient()
        hooks.sandbox.fail("n2", "gpu-lost")
        job = site.submit("--steps 10 --step-time 0.05", nodes=2, spares=0)
        site.wait_state(job, "completed", "failed", "cancelled")
        detail = site.detail(job)
        assert detail["job"]["state"] == "completed", detail["job"]["reason"]
        assert [sorted(a["nodes"]) for a in detail["attempts"]][-1] == ["n1", "n3"]
        (incident,) = detail["incidents"]
        assert (incident["blame"], incident["nodes"]) == ("node", ["n2"])
        assert incident["class"] in ("host", "gpu-hardware"), "the prolog's failure, or what the probe found behind it"
        reason = "transom[gpu-count] Prolog error job="
        # What was recorded to be done is told as done once it was.
        site.wait(lambda: hooks.node("n2")["Reason"].startswith(reason), "the reason names the check")
        site.wait(lambda: history(site, "n2", "drained"), "it is told")
        assert len(history(site, "n2", "drained")) == 1


def _outcomes(site: Any, node: str) -> dict[str, str]:
    found = {n["name"]: n for n in site.client.get("/v1/nodes")["nodes"]}[node]
    return {check["check"]: check["outcome"] for check in found["checks"]}
