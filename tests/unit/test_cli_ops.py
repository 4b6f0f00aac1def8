"""The commands of an administrator, against a server that answers as recorded; completion in a real bash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_server
import pytest
from cli_server import NOW, Recorded, a_job, a_view, an_incident, transom
from transom_cli.historypage import all_history, job_history, node_history
from transom_cli.incidentpage import incident_page
from transom_cli.joblist import job_list

FIT = {"check": "xid", "outcome": "fit", "value": "none"}
UNFIT = {"check": "xid", "outcome": "unfit", "value": "79", "limit": "none", "evidence": "NVRM: Xid 79\x1b[2J"}
UNKNOWN = {"check": "ecc", "outcome": "unknown", "value": "", "evidence": "nvidia-smi hangs"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with cli_server.serving(tmp_path) as recorded:
        yield recorded


def result(node: str, outcome: str, *checks: dict[str, str], error: str = "") -> dict[str, Any]:
    return {"node": node, "outcome": outcome, "checks": list(checks), "error": error, "reached": not error, "at": NOW}


# --- check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([result("n1", "fit", FIT), result("n2", "fit", FIT)], 0),
        ([result("n1", "fit", FIT), result("n2", "unfit", UNFIT), result("n3", "unknown", error="no route")], 6),
        ([result("n1", "fit", FIT), result("n3", "unknown", UNKNOWN)], 7),
    ],
)
def test_check_says_what_is_not_fit_and_ends_with_the_worst(
    server: Recorded, results: list[dict[str, Any]], code: int
) -> None:
    server.on("POST /v1/nodes/check", (200, {"results": results}))
    done = transom("check", "n[1-3]", "--check", "xid", socket=server.socket)
    assert done.returncode == code
    assert server.asked("POST /v1/nodes/check")[0].body == {"nodes": ["n1", "n2", "n3"], "checks": ["xid"]}
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    for one in results:
        if one["outcome"] != "fit":
            assert f"{one['node']}: {one['outcome']}" in done.stdout
    if code == 6:
        assert "  - xid: unfit, 79, limit none\n    NVRM: Xid 79\\x1b[2J" in done.stdout
        assert "  no route" in done.stdout


def test_check_json(server: Recorded) -> None:
    server.on("POST /v1/nodes/check", (200, {"results": [result("n1", "unfit", UNFIT)]}))
    done = transom("check", "n1", "--json", socket=server.socket)
    assert (done.returncode, json.loads(done.stdout)["results"][0]["outcome"]) == (6, "unfit")


# --- pause --------------------------------------------------------------------------------------------------------


def test_pause_and_resume(server: Recorded) -> None:
    server.on("POST /v1/pause", (200, {"paused": "transom is paused by ann: rack", "under_way": ["submit:3:1"]}))
    done = transom("pause", "--reason", "rack", socket=server.socket)
    assert done.returncode == 0
    assert server.asked("POST /v1/pause")[0].body == {"reason": "rack"}
    assert done.stdout.splitlines()[:2] == [
        "transom is paused by ann: rack",
        "  under way, ends by itself: submit:3:1",
    ]
    were = [{"name": "pause", "who": "ann", "reason": "rack"}]
    server.on("POST /v1/resume-actions", (200, {"were": were}))
    assert transom("resume-actions", socket=server.socket).stdout == "resumed pause: stopped by ann: rack\n"
    server.on("POST /v1/resume-actions", (200, {"were": []}))
    assert transom("resume-actions", socket=server.socket).stdout == "nothing was stopped\n"


def test_pause_and_resume_as_json(server: Recorded) -> None:
    answers = {
        "pause": {"paused": "transom is paused by ann", "under_way": ["submit:3:1"]},
        "resume-actions": {"were": [{"name": "pause", "who": "ann", "reason": ""}]},
    }
    for command, answer in answers.items():
        server.on(f"POST /v1/{command}", (200, answer))
        assert json.loads(transom(command, "--json", socket=server.socket).stdout) == answer


def test_status_says_what_a_pause_withholds(server: Recorded) -> None:
    paused = {
        **cli_server.DAEMON,
        "paused": "transom is paused by ann",
        "tripped": "drain.per_hour is tripped: 4 nodes",
    }
    held = a_job(state="recovering", withheld="start epoch 3 on n[1,4]", reason="n2 is lost")
    server.on("GET /v1/daemon", (200, paused))
    server.on("GET /v1/jobs", (200, {"jobs": [held]}))
    server.on("GET /v1/jobs/12", (200, a_view(job=held)))
    told = transom("status", socket=server.socket).stdout
    assert "transom is paused by ann; it looks on and does nothing (transom resume-actions)" in told
    assert "drain.per_hour is tripped: 4 nodes" in told
    assert "    paused, would start epoch 3 on n[1,4]; n2 is lost" in told
    assert "transom is paused; otherwise it would start epoch 3" in transom("status", "12", socket=server.socket).stdout


# --- doctor -------------------------------------------------------------------------------------------------------


def finding(level: str, text: str, section: str = "daemon", next: str = "") -> dict[str, str]:
    return {"section": section, "level": level, "text": text, "next": next}


def test_doctor_without_a_daemon_or_a_slurm_says_what_it_could_not_see(tmp_path: Path) -> None:
    done = transom("doctor", socket=tmp_path / "none", SLURM_CONF=str(tmp_path / "none.conf"))
    assert done.returncode == 6
    assert "  ok       transom " in done.stdout
    assert "  PROBLEM  asking transomd at" in done.stdout
    assert "  unknown  what only the daemon sees: its rights, stuck acts, budgets, held jobs" in done.stdout
    assert "  unknown  Slurm's settings, and jobs that are stuck" in done.stdout
    assert "           next: systemctl status transomd" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_doctor_shows_what_the_daemon_found_by_section(server: Recorded) -> None:
    told = [
        finding("ok", "Slurm answered the daemon 1 s ago"),
        finding("problem", "submit:3:1 has been tried 40 times\x1b[2J", next="transom events --job 3"),
        finding("ok", "runs as root", section="rights"),
    ]
    server.on("GET /v1/doctor", (200, {"findings": told}))
    done = transom("doctor", "--json", socket=server.socket)
    assert done.returncode == 6
    found = json.loads(done.stdout)["findings"]
    assert [one["text"] for one in found if one["section"] == "rights"] == ["runs as root"]
    shown = transom("doctor", socket=server.socket).stdout
    assert "  PROBLEM  submit:3:1 has been tried 40 times\\x1b[2J" in shown
    assert "           next: transom events --job 3" in shown


def test_doctor_for_somebody_who_is_no_administrator(server: Recorded) -> None:
    server.on("GET /v1/doctor", (403, cli_server.error("doctor: bob is no administrator of transom")))
    assert "  note     only an administrator is told more of it" in transom("doctor", socket=server.socket).stdout


def test_a_site_file_that_is_wrong_is_a_problem(server: Recorded, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("[drain]\nper_hour = -1\n")
    done = transom("doctor", socket=server.socket, TRANSOM_CONFIG=str(tmp_path / "site.toml"))
    assert "site.toml:2: drain.per_hour" in done.stdout.replace("\n           ", "")


# --- incident and history -----------------------------------------------------------------------------------------


def an_answer(**changes: Any) -> dict[str, Any]:
    event = {"id": 1, "at": NOW - 74, "kind": "drain-refused", "message": "n3 is not drained: paused", "node": "n3"}
    return {
        "incident": an_incident(job_id=12, attempt=1, epoch=1, last_step=108, detected_by="heartbeat"),
        "job": a_job(),
        "launches": [{**launch, "last_step_at": NOW - 77} for launch in a_view()["launches"]],
        "nodes": [{"node": "n3", "drained": False, "why": "not drained: xid is in mode observe"}],
        "events": [event],
        **changes,
    }


def test_an_incident_whole(server: Recorded) -> None:
    server.on("GET /v1/incidents/3", (200, an_answer()))
    done = transom("incident", "3", socket=server.socket)
    assert done.returncode == 0
    assert done.stdout.startswith("incident 3: host, blame node n3, ranks 2, confidence high -> drain\n")
    for line in (
        "     -2.0 s   last step before it: 108",
        "     +0.8 s   the verdict was reached",
        "     +1.0 s   drain-refused: n3 is not drained: paused",
        "    +15.0 s   first step that is new",
        "  n3: not drained: xid is in mode observe",
        "evidence (2)",
    ):
        assert f"\n{line}" in done.stdout
    assert "next: transom status 12; transom logs 12" in done.stdout


def test_an_incident_that_stopped_the_job_started_nothing_again() -> None:
    answer = an_answer()
    answer["incident"] |= {"action": "stop", "acted_at": NOW - 80}
    answer["events"] = []
    text = "\n".join(incident_page(answer, now=NOW, columns=100))
    assert "nothing was started again" in text
    assert "the program was started" not in text


@pytest.mark.parametrize("columns", [40, 80, 0])
def test_pages_keep_within_the_terminal(columns: int) -> None:
    view = a_view(
        intents=[{"kind": "drain", "state": "done", "args": {"node": "n3", "reason": "r" * 300}, "created_at": 1}]
    )
    incidents = [an_incident(id=number, job_id=12) for number in range(30)]
    lemons = [{"node": "n" * 60, "incidents": 3, "jobs": 2, "classes": ["host"], "last": NOW}]
    everything = {"incidents": incidents, "drains": [], "lemons": lemons}
    for lines in (
        incident_page(an_answer(), now=NOW, columns=columns),
        job_history(view, now=NOW, columns=columns),
        node_history("n3", everything, now=NOW, columns=columns),
        all_history(everything, now=NOW, columns=columns),
    ):
        assert lines
        if columns >= 80:
            assert max(map(len, lines)) <= columns


def test_history_means_a_job_before_a_node(server: Recorded) -> None:
    server.on("GET /v1/jobs", (200, {"jobs": [a_job()]}))
    server.on("GET /v1/jobs/12", (200, a_view()))
    server.on("GET /v1/history", (200, {"incidents": [an_incident(job_id=12)], "drains": [], "lemons": []}))
    server.on("GET /v1/nodes", (200, {"nodes": [], "slurm": {"ok": True}}))
    assert transom("history", "demo", socket=server.socket).stdout.startswith("job 12 demo: running\n")
    told = transom("history", "n3", socket=server.socket).stdout
    assert told.startswith("n3: blamed in 1 incident of 1 job, drained by transom 0 times\n")
    assert server.asked("GET /v1/history")[0].query == {"node": "n3"}
    server.on("GET /v1/history", (200, {"incidents": [], "drains": [], "lemons": []}))
    done = transom("history", "nonsense", socket=server.socket)
    assert (done.returncode, done.stderr.splitlines()[0]) == (5, "transom: 'nonsense' is neither a job nor a node")


def test_lemons_come_first() -> None:
    lemons = [{"node": "n7", "incidents": 3, "jobs": 2, "classes": ["gpu-memory", "host"], "last": NOW - 60}]
    lines = all_history({"incidents": [], "drains": [], "lemons": lemons}, now=NOW, columns=80)
    assert lines[0] == "nodes blamed more than once"
    assert lines[2].split() == ["n7", "3", "2", "1m00s", "ago", "gpu-memory,", "host"]


# --- many jobs, and speed -----------------------------------------------------------------------------------------


def test_five_hundred_jobs_stay_readable() -> None:
    nodes = [f"gpu-{rack:02d}-{number:03d}" for rack in range(4) for number in range(64)]
    jobs = [a_job(id=10_000 + n, name=f"a-rather-long-name-{n}", user="somebody-else", nodes=nodes) for n in range(500)]
    began = time.process_time()
    lines = [line for line, _ in job_list(jobs, now=NOW, columns=80)]
    assert len(lines) == 501
    assert max(map(len, lines)) <= 80
    assert len({line.index("running") for line in lines[1:]}) == 1
    assert time.process_time() - began < 5


@pytest.mark.parametrize(("words", "budget_ms"), [(["-h"], 100), (["status", "12"], 150), (["status"], 150)])
def test_commands_start_fast(server: Recorded, words: list[str], budget_ms: float) -> None:
    """Processor time, the least of some runs: what the command itself costs, however busy the machine is."""
    server.on("GET /v1/jobs", (200, {"jobs": [a_job()]}))
    server.on("GET /v1/jobs/12", (200, a_view()))
    spent = []
    for _ in range(7):
        before = os.times()
        assert transom(*words, socket=server.socket).returncode == 0
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) * 1000 < budget_ms


# --- completion ---------------------------------------------------------------------------------------------------

BASH = """
eval "$(transom completion bash)"
complete_line() {
  COMP_WORDS=($1)
  [ "${1: -1}" != " " ] || COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=()
  _transom_completion transom
  echo "${COMPREPLY[*]}"
}
"""


def complete(line: str, folder: Path, socket: Path | str) -> str:
    """Complete a line in a real bash, with `transom` on its PATH."""
    script = folder / "transom"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m transom_cli.main "$@"\n')
    script.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "TRANSOM_SOCKET": str(socket), "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH + f'complete_line "{line}"'],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("transom resu", "resume-actions"),
        ("transom status ", "12 demo"),
        ("transom status d", "demo"),
        ("transom logs 1", "12"),
        ("transom drain n", "n1 n2"),
        ("transom check n1 n2", "n2"),
        ("transom events --node n", "n1 n2"),
        ("transom history n1", "n1"),
        ("transom sandbox fail n1 pow", "power"),
        ("transom check --js", "--json"),
    ],
)
def test_bash_completes(server: Recorded, tmp_path: Path, line: str, words: str) -> None:
    hostile = a_job(id=13, name="$(touch never)")
    server.on("GET /v1/jobs", (200, {"jobs": [a_job(), hostile] if " 13" in line else [a_job()]}))
    server.on("GET /v1/nodes", (200, {"nodes": [{"name": "n1"}, {"name": "n2"}], "slurm": {"ok": True}}))
    assert complete(line, tmp_path, server.socket) == words


def test_names_that_a_shell_would_obey_are_not_offered(server: Recorded, tmp_path: Path) -> None:
    names = ["$(touch never)", "a;b", "fine", "a b", "x\x1b[2J", "'"]
    server.on("GET /v1/jobs", (200, {"jobs": [a_job(id=n, name=name) for n, name in enumerate(names, 1)]}))
    assert complete("transom status ", tmp_path, server.socket) == "1 2 3 4 5 6 fine"


def test_a_daemon_that_is_slow_or_away_means_no_names_and_no_wait(server: Recorded, tmp_path: Path) -> None:
    enough = threading.Event()

    def slow(_: object) -> tuple[int, object]:
        enough.wait(60)
        return 200, {"jobs": [a_job()]}

    server.on("GET /v1/jobs", slow)
    began = time.monotonic()
    assert complete("transom status ", tmp_path, server.socket) == ""
    assert time.monotonic() - began < 40
    enough.set()
    assert complete("transom status ", tmp_path, tmp_path / "none") == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str) -> None:
    script = transom("completion", shell).stdout
    assert "_TRANSOM_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
