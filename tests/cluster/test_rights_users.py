"""Jobs of ordinary users on a site: whose rights everything runs with, and what each user sees and may do."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import check_end, site_on
from people import Person
from usersite import UserSite

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEP = 'echo "$(id -u) $(id -g) $(id -G)" > ids.$SLURM_PROCID; '
SEND = """
import http.client, json, sys
host, port = sys.argv[1].split("//")[1].split(":")
answers = []
for method, path, headers, body in json.load(sys.stdin):
    c = http.client.HTTPConnection(host, int(port), timeout=20)
    c.request(method, path, body.encode(), headers)
    r = c.getresponse()
    answers.append([r.status, r.read().decode()])
    c.close()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def town(persons: list[Person], make_sandbox: Any) -> Iterator[UserSite]:
    with site_on(make_sandbox(5), UserSite) as site:
        site.start_daemon()
        yield site


@pytest.fixture
def site(town: UserSite) -> Iterator[UserSite]:
    """The shared site, with idle nodes."""
    yield town
    for job in town.client.get("/v1/jobs")["jobs"]:
        if job["state"] not in ("completed", "failed", "cancelled"):
            town.client.post(f"/v1/jobs/{job['id']}/cancel")
    for node in town.drained():
        town.client.post("/v1/nodes/undrain", {"nodes": node})
    town.sandbox.reset()


@pytest.fixture
def alice(persons: list[Person]) -> Person:
    return persons[0]


@pytest.fixture
def bob(persons: list[Person]) -> Person:
    return persons[1]


def processes(word: str) -> list[tuple[int, str]]:
    """The uid and command line of every process with ``word`` in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                uid = entry.stat().st_uid
            except OSError:
                continue
            if word in command:
                found.append((uid, command))
    return found


def secrets_of(site: UserSite, alice: Person, job: int) -> tuple[str, str]:
    """A job's run folder and token, read with its owner's rights."""
    run_dir = site.job(job)["run_dir"]
    return run_dir, alice.run(["cat", f"{run_dir}/token"]).stdout.strip()


def test_all_of_a_job_runs_as_its_user_and_survives_its_batch_host(site: UserSite, alice: Person) -> None:
    """The home is closed to everybody, and to this daemon, which has no power over files."""
    known = len(site.ids.read_text().splitlines())
    text = f"name: mine\ncommand: |\n  {STEP}exec "
    ring = Path(__file__).with_name("ring.py")
    text += f"{sys.executable} {ring} --then 20\nnodes: 2\nspares: 1\ntasks_per_node: 1\n"
    text += "checkpoint: {dir: checkpoints}\nhealth: {collective: true}\n"
    done = site.submit_yaml(alice, text)
    assert done.returncode == 0, done.stderr
    job = int(json.loads(done.stdout)["job"]["id"])
    site.wait_step(job, 7)
    run_dir, token = secrets_of(site, alice, job)
    found = processes(run_dir)
    assert any("launcher" in command for _, command in found)
    assert sum("agent" in command for _, command in found) >= 3
    assert {uid for uid, command in found if "srun" not in command} == {alice.uid}
    groups = " ".join(str(gid) for gid in sorted(alice.who.groups, key=lambda gid: gid != alice.who.gid))
    assert alice.run(["cat", "ids.0"]).stdout.split() == [str(alice.uid), str(alice.who.gid), *groups.split()]
    slurm = site.slurm_job(job)
    assert slurm["UserId"] == f"{alice.name}({alice.uid})"
    assert slurm["GroupId"].endswith(f"({alice.who.gid})")

    host = slurm["BatchHost"]
    site.sandbox.fail(host, "power")
    detail = check_end(site, job, drained={host})
    assert host not in detail["launches"][-1]["nodes"]
    told = [e["message"] for e in site.client.get("/v1/events", job=job)["events"] if e["kind"] == "collective"]
    ran = site.ids.read_text().splitlines()[known:]
    assert len(ran) >= 4, f"the first launcher, an all-reduce on two nodes, the launcher that took over: {told}"
    assert {entry.split()[0] for entry in ran} == {str(alice.uid)}
    assert all("0" not in entry.split()[1:] for entry in ran), "no group of root's"
    no_secret_anywhere(site, token, job)


def bytes_of(path: Path) -> bytes:
    """What is in a file; nothing if it is gone, as slurmd writes its own anew."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def no_secret_anywhere(site: UserSite, token: str, job: int) -> None:
    """The token is in the run folder and nowhere else, and what the daemon keeps is closed."""
    assert len(token) > 30
    raw = token.encode()
    kept = [p for p in (*site.root.rglob("*"), *site.sandbox.directory.rglob("*")) if p.is_file()]
    assert [str(p) for p in kept if raw in bytes_of(p)] == []
    assert token not in json.dumps(site.detail(job)) + json.dumps(site.client.get("/v1/events", job=job))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            assert raw not in told, told[:200]
    state = site.root / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in state.rglob("*") if p.is_file()} == {0}


def test_users_see_and_touch_their_own_jobs_only(site: UserSite, alice: Person, bob: Person) -> None:
    job = site.submit_as(alice, "--steps 2000", spares=0)
    site.wait_step(job, 3)
    own = f"/v1/jobs/{job}"

    def status(person: Person, method: str, path: str, body: Any = None) -> int:
        return person.ask(site.socket, method, path, body)[0]

    refused = [
        ("GET", own, None), ("POST", f"{own}/cancel", None), ("GET", f"/v1/events?job={job}", None),
        ("GET", "/v1/events", None), ("GET", f"/v1/events?job={job}&node=n1", None),
        ("POST", "/v1/nodes/drain", {"nodes": "n5", "reason": "x"}), ("POST", "/v1/nodes/undrain", {"nodes": "n5"}),
        ("POST", "/v1/nodes/check", {"nodes": "n5"}), ("POST", "/v1/pause", {}), ("POST", "/v1/resume-actions", {}),
        ("GET", "/v1/doctor", None), ("GET", "/v1/history", None), ("GET", "/metrics", None),
        ("POST", "/v1/launcher", {"job_id": job}), ("POST", "/v1/hooks", {}),
    ]  # fmt: skip
    assert {path: status(bob, method, path, body) for method, path, body in refused} == dict.fromkeys(
        (path for _, path, _ in refused), 403
    )
    assert bob.ask(site.socket, "GET", "/v1/jobs?all=1")[1]["jobs"] == []
    assert bob.ask(site.socket, "GET", f"/v1/jobs?all=1&user={alice.name}")[1]["jobs"] == []
    assert bob.ask(site.socket, "GET", "/v1/daemon")[1]["withheld"] == []
    for person, seen in ((bob, []), (alice, [job])):
        nodes = person.ask(site.socket, "GET", "/v1/nodes")[1]["nodes"]
        assert sorted({j for node in nodes for j in node["jobs"]}) == seen
    assert status(bob, "GET", "/v1/jobs/99999999999999999999") == 404
    assert status(bob, "GET", "/v1/jobs/424242") == 404
    assert bob.run(["ls", site.job(job)["run_dir"]]).returncode != 0
    logs = bob.transom("--socket", site.socket, "logs", str(job))
    assert (logs.returncode, "not yours" in logs.stderr) == (4, True)

    assert [j["id"] for j in alice.ask(site.socket, "GET", "/v1/jobs")[1]["jobs"]].count(job) == 1
    assert status(alice, "GET", f"/v1/events?job={job}&wait=nan&limit=-1") == 200
    assert status(alice, "POST", "/v1/nodes/drain", {"nodes": "n5", "reason": "x"}) == 403
    assert site.drained() == set()
    assert "epoch" in alice.transom("--socket", site.socket, "status", str(job)).stdout
    assert site.job(job)["state"] == "running"
    assert status(alice, "POST", f"{own}/cancel") == 200
    site.wait_state(job, "cancelled")


def test_no_option_of_sbatch_gets_a_right_that_the_user_lacks(site: UserSite, alice: Person) -> None:
    base = "name: opt\ncommand: sleep 600\nnodes: 1\ntasks_per_node: 1\nhealth: {probe: false, collective: false}\n"
    script = alice.home / "job.sh"
    for option in ("--uid=0", "--gid=0", "--nice=-5000", "--get-user-env", "--export=ALL", "--requeue", "--array=1-9"):
        if option != "--requeue":
            script.write_text(f"#!/bin/sh\n#SBATCH {option}\nsleep 600\n")
            text = "name: opt\nscript: job.sh\nnodes: 1\n"
            assert site.submit_yaml(alice, text).returncode == 2, option
        assert site.submit_yaml(alice, f"{base}sbatch: ['{option}']\n").returncode == 2, option
        assert site.submit_yaml(alice, base, "--", option).returncode == 2, option
        stored = {"name": "opt", "command": "x", "nodes": 1, "tasks_per_node": 1, "sbatch": [option]}
        body = {"spec": stored, "run_dir": str(alice.home), "cwd": str(alice.home), "token_sha256": "0" * 64}
        assert alice.ask(site.socket, "POST", "/v1/jobs", body)[0] == 400, "whoever does not use our command"
    env = {
        "SBATCH_REQUEUE": "1", "SBATCH_WAIT": "1", "SBATCH_EXCLUSIVE": "user", "SBATCH_COMMENT": "mine",
        "SBATCH_JOB_NAME": "mine", "SBATCH_GET_USER_ENV": "1", "SBATCH_NO_KILL": "off", "SBATCH_PRIORITY": "4294967294",
        "SLURM_JOB_UID": "0",
    }  # fmt: skip
    wanted = f"{base}sbatch: ['--priority=4294967290', '--reboot', '--core-spec=0']\n"
    done = site.submit_yaml(alice, wanted, **env)
    assert done.returncode == 0, done.stderr
    job = int(json.loads(done.stdout)["job"]["id"])
    site.wait(lambda: site.job(job)["slurm_job_id"] or site.job(job)["state"] == "failed", "an answer of sbatch")
    if site.job(job)["state"] != "failed":
        told = site.slurm_job(job)
        assert told["UserId"].startswith(alice.name)
        assert int(told["Priority"]) < 4_294_967_000
        assert (told["Requeue"], told["JobName"][:7], told["Comment"][:8]) == ("0", "opt.tr-", "transom:")
        assert told["Nice"] == "0"


def test_a_job_of_roots_is_possible_and_warned_about(site: UserSite) -> None:
    job = site.submit("--steps 10", nodes=1, spares=0)
    site.wait_state(job, "completed")
    warned = [e for e in site.client.get("/v1/events", job=job)["events"] if e["kind"] == "warning"]
    assert "root" in warned[0]["message"]


def test_users_elsewhere_come_by_munge(site: UserSite, alice: Person, bob: Person) -> None:
    job = site.submit_as(alice, "--steps 2000", spares=0)
    site.wait_step(job, 3)
    words = [sys.executable, "-m", "transom_cli.main", "status", str(job), "--json"]
    argv = alice.argv(["env", f"TRANSOM_URL={site.url}", *words])
    told = json.loads(site.sandbox.run(argv, node="n1").stdout)
    assert told["job"]["id"] == job

    forge = """
import json, sys, http.client
from transomd.api import munge
host, port = sys.argv[1].split("//")[1].split(":")
def send(method, path, body, credential):
    c = http.client.HTTPConnection(host, int(port), timeout=20)
    headers = {"Authorization": "Munge " + credential} if credential else {}
    c.request(method, path, body, headers)
    r = c.getresponse(); return [r.status, r.read().decode()]
cancel = f"/v1/jobs/{sys.argv[2]}/cancel"
once = munge.credential("GET", "/v1/daemon", b"")
answers = {
    "none": send("GET", "/v1/daemon", b"", ""),
    "good": send("GET", "/v1/daemon", b"", once),
    "again": send("GET", "/v1/daemon", b"", once),
    "path": send("POST", cancel, b"{}", munge.credential("POST", "/v1/jobs/1/cancel", b"{}")),
    "method": send("POST", cancel, b"{}", munge.credential("GET", cancel, b"{}")),
    "query": send("GET", "/v1/jobs?all=1", b"", munge.credential("GET", "/v1/jobs", b"")),
    "body": send("POST", cancel, b"{ }", munge.credential("POST", cancel, b"{}")),
    "rubbish": send("GET", "/v1/daemon", b"", "MUNGE:" + "A" * 40 + ":"),
    "other": send("POST", cancel, b"{}", munge.credential("POST", cancel, b"{}")),
}
print(json.dumps(answers))
"""
    answers = site.in_hub(forge, site.url, str(job), person=bob, node="n2")
    assert {key: status for key, (status, _) in answers.items()} == {
        "none": 403, "good": 200, "again": 403, "path": 403, "method": 403, "query": 403, "body": 403, "rubbish": 403,
        "other": 403,
    }  # fmt: skip
    assert "Replayed" in answers["again"][1]
    assert "not yours" in answers["other"][1], "bob is known, and it is alice's job"
    assert site.job(job)["state"] == "running"


def test_a_launchers_token_is_good_for_its_own_job_while_that_lasts(site: UserSite, alice: Person, bob: Person) -> None:
    first, second = (site.submit_as(person, "--steps 2000", nodes=1, spares=0) for person in (alice, bob))
    for job in (first, second):
        site.wait_step(job, 3)
    _, token = secrets_of(site, alice, first)
    report = {
        "job_id": first, "attempt": 1, "slurm_job_id": site.job(first)["slurm_job_id"], "generation": 1, "host": "n1",
        "phase": "failed", "at": 1.0, "message": "forged",
    }  # fmt: skip
    theirs = {**report, "job_id": second, "slurm_job_id": site.job(second)["slurm_job_id"]}

    def sent(body: dict[str, Any], bearer: str, told: int | str = "") -> list[Any]:
        headers = {"Authorization": f"Bearer {bearer}", **({"Transom-Job": str(told)} if told != "" else {})}
        return ["POST", "/v1/launcher", headers, json.dumps(body)]

    bad = [
        sent(report, "x" * 43), sent(report, "x" * 43, first), sent(theirs, token), sent(theirs, token, second),
        sent(theirs, token, first), sent(report, token, second), sent(report, "", first), sent(report, token, -1),
        sent(report, token, "9" * 400), ["POST", "/v1/launcher", {}, "{}"],
        ["POST", f"/v1/jobs/{first}/cancel", {"Authorization": f"Bearer {token}"}, "{}"],
    ]  # fmt: skip
    statuses = [status for status, _ in site.in_hub(SEND, site.url, stdin=json.dumps(bad))]
    assert statuses[:7] == [403] * 7
    assert set(statuses[7:9]) <= {200, 403}, "no job is named, so the token's own is meant"
    assert statuses[9:] == [403, 403]
    assert site.job(second)["state"] == "running"

    alice.ask(site.socket, "POST", f"/v1/jobs/{first}/cancel")
    site.wait_state(first, "cancelled")
    before = site.detail(first)
    late = [sent({**report, "phase": phase}, token, first) for phase in ("done", "running", "failed", "gate")]
    answers = site.in_hub(SEND, site.url, stdin=json.dumps(late))
    assert all(status == 403 or json.loads(text)["launch"] is None for status, text in answers)
    after = site.detail(first)
    assert (after["job"], after["launches"], after["incidents"]) == (
        before["job"],
        before["launches"],
        before["incidents"],
    )


FORGER = """\
import os, signal, socket, subprocess, sys, time
xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
rank, epoch = os.environ["RANK"], int(os.environ["TRANSOM_EPOCH"])
for step in range(1, 4 if epoch < 3 else 12):
    print(f"step {10 * epoch + step}", flush=True)
    time.sleep(0.3)
if epoch < 3 and rank == "1":
    print("srun: error: Node failure on n2", flush=True)
    print("slurmstepd: error: *** STEP 1.0 ON n2 CANCELLED AT now DUE TO NODE FAILURE ***", flush=True)
    print(f"[12345.678901] {xid}", flush=True)
    print(xid, file=sys.stderr, flush=True)
    subprocess.run(["logger", "-p", "kern.crit", "-t", "kernel", xid], check=False)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
            log.connect("/dev/log")
            log.send(f"<2>kernel: {xid}".encode())
    except OSError:
        pass
    mount = ["mount", "-t", "tmpfs", "-o", xid.partition(",")[0], "none", "/mnt"]
    subprocess.run(["unshare", "-Urm", *mount], check=False)
    if epoch == 2:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    agent = b"transomd.launch.agent" in file.read()
                if agent:
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass
    time.sleep(1)
    sys.exit(1)
time.sleep(2 if epoch < 3 else 0)
"""


def test_what_a_user_forges_drains_nothing(site: UserSite, alice: Person) -> None:
    """A job that fakes a lost node and a broken GPU in its logs, in syslog and the kernel's log, and kills an agent."""
    (alice.home / "forge.py").write_text(FORGER)
    text = f"name: forger\ncommand: {sys.executable} {alice.home}/forge.py\nnodes: 2\nspares: 2\ntasks_per_node: 1\n"
    text += "health: {collective: false}\npolicy: {max_user_restarts: 5, max_restarts: 9, no_progress_limit: 9}\n"
    done = site.submit_yaml(alice, text)
    assert done.returncode == 0, done.stderr
    job = int(json.loads(done.stdout)["job"]["id"])
    ended = site.wait_state(job, "completed", "failed", within_s=150)
    detail = site.detail(job)
    assert len(detail["incidents"]) >= 2, ended["reason"]
    assert site.drained() == set()
    intents = [intent["kind"] for intent in detail["intents"]]
    assert "drain" not in intents, "no drain was even asked for"
    assert all(node["owner"] != "transom" for node in site.client.get("/v1/nodes")["nodes"])


def test_hostile_things_in_a_run_folder(site: UserSite, alice: Person) -> None:
    """Nothing is followed, waited for or shown raw: links to secrets, pipes, devices, endless lines, escapes."""
    trap = """\
import os, sys, time
from pathlib import Path
logs = Path(sys.argv[1])
mine = logs / "e000001"
os.symlink("/etc/shadow", mine / "rank-00007.log")
os.mkfifo(mine / "rank-00008.log")
os.symlink("/dev/zero", mine / "rank-00009.log")
os.symlink("/", logs / "e000099")
os.symlink("/proc/self/mem", mine / "rank-00010.log")
(mine / "rank-00011.log").mkdir()
with open(mine / "rank-00012.log", "wb") as file:
    file.write(b"x" * (40 << 20) + b"\\n" + b"\\x1b]0;owned\\x07\\x1b[2J" * 1000)
for step in range(1, 20):
    print(f"step {step}\\n\\x1b]0;owned\\x07\\x1b[31mwords\\x1b[2J\\u202e", flush=True)
    time.sleep(0.2)
raise SystemExit("\\x1b]2;owned\\x07 the end")
"""
    (alice.home / "trap.py").write_text(trap)
    text = "name: trap\nnodes: 1\ntasks_per_node: 1\nhealth: {collective: false}\npolicy: {max_restarts: 0}\n"
    text += "command: >-\n"
    text += f"  {sys.executable} {alice.home}/trap.py $(dirname $(ls -td .transom/trap-*/logs/e* | head -1))\n"
    done = site.submit_yaml(alice, text)
    assert done.returncode == 0, done.stderr
    job = int(json.loads(done.stdout)["job"]["id"])
    assert site.wait_state(job, "failed", "completed", within_s=150)["state"] == "failed"
    told = site.detail(job)
    assert told["job"]["step"] == 19, "the honest log was read to its end"
    shown = [site.cli(*words) for words in (["status", str(job)], ["status"], ["events", "--job", str(job)])]
    logs = alice.transom("--socket", site.socket, "logs", str(job), "-n", "5")
    assert logs.returncode == 0, logs.stderr
    assert "root:" not in logs.stdout
    assert "step 19" in logs.stdout
    for text in (*shown, json.dumps(told, ensure_ascii=False)):
        assert not [c for c in text if not c.isprintable() and c not in "\n"], text
