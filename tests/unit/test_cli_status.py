"""transom status: all jobs within 80 columns; one job and why."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cli_server
import pytest
from cli_server import Recorded, a_job, a_view, an_incident, serving, transom
from transom_cli.joblist import job_list
from transom_cli.jobpage import job_page, next_command

NOW = cli_server.NOW

PAGE = """\
job 12 demo (alice): running
  epoch 2 runs on n[1-2,4-5]

  nodes       n[1-2,4-5] (4)
  spares      1
  attempt     1: Slurm job 4711 on n[1-5], barred n3, started 1h05m ago
  step        140, 3s ago
  checkpoint  step 120 (epoch 2), 40s ago
  restarts    1
  run folder  /home/alice/.transom/demo-1
  submitted   1h06m ago

launches
  epoch 1 on n[1-4]: steps 1 to 108, ended after 1h02m: n3 was lost
  epoch 2 on n[1-2,4-5]: steps 101 to 140, started 1m02s ago

incident 3: host, blame node n3, ranks 2, confidence high -> drain
  n3 does not answer Slurm or SSH: it has no power or no network
  detected 1m15s ago, diagnosed +0.8s, drained +2s, fenced +5s, acted +5.5s,
  recovered +15s
  - root  SLURM-NODE-DOWN  n3
    n3 DOWN*+DRAIN Not responding
  - victim  NCCL-REMOTE-CLOSED  n1 rank 0  rank-0.log:88 (seen 14 times)
    Connection closed by peer n3

under way
  drain (drain:n3), wanted 5s ago, tried 2 times

next: transom logs 12 -f"""

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 3, in <module>
    main()
ValueError: x\x1b[2J"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        recorded.on("GET /v1/jobs", (200, {"jobs": [a_job()]}))
        recorded.on("GET /v1/jobs/12", (200, a_view()))
        yield recorded


def test_the_page_of_a_job() -> None:
    drain = {"key": "drain:n3", "kind": "drain", "state": "pending", "tries": 2, "created_at": NOW - 5}
    done = {"key": "fence:1", "kind": "fence", "state": "done", "tries": 1, "created_at": NOW - 9}
    assert "\n".join(job_page(a_view(intents=[drain, done]), now=NOW, columns=80)) == PAGE


def test_the_page_says_who_holds_copies_and_what_keeps_them_away() -> None:
    pairs = {f"n{i}": f"n{i % 10 + 1}" for i in range(1, 11)}
    job = {"id": 1, "copies": pairs, "copies_trouble": "n2: n3 does not take it\x1b[2J"}
    page = " ".join("\n".join(job_page({"job": job}, now=1.0, columns=80)).split())
    assert "copies n1's on n2, n10's on n1, n2's on n3," in page
    assert "and 2 more (all with --json) n2: n3 does not take it" in page
    assert "\x1b" not in page
    ended = "\n".join(job_page({"job": {**job, "finished_at": 1.0}}, now=1.0, columns=80))
    assert "copies" not in ended


def test_the_page_says_how_often_storage_gets_a_step() -> None:
    stages = [{"stage": "memory", "step": 9, "at": 1.0}, {"stage": "storage", "step": 8, "at": 1.0, "every": 64}]
    job = {"id": 1, "checkpoint": {"step": 8, "epoch": 1, "at": 1.0}, "stages": stages}
    page = " ".join("\n".join(job_page({"job": job}, now=1.0, columns=80)).split())
    assert "in memory: step 9, 0s ago; storage gets one in every 64 steps (auto)" in page
    stages[1].update(write_s=2.13, step_s=0.5, mttf_s=207_720.0)
    page = " ".join("\n".join(job_page({"job": job}, now=1.0, columns=80)).split())
    assert "steps (auto: a write takes 2.1s, a step 0.5s, and the job's MTTF is 2d09h)" in page
    stages.append({"stage": "replica", "step": 7, "at": 1.0, "every": 20})
    page = " ".join("\n".join(job_page({"job": job}, now=1.0, columns=80)).split())
    assert "on another node: step 7, 0s ago (one in every 20 steps)" in page
    del stages[1]["every"]
    assert "storage gets" not in "\n".join(job_page({"job": job}, now=1.0, columns=80))


def test_a_fault_of_the_program_shows_its_traceback_harmless() -> None:
    evidence = [
        {"role": "root", "signature": "PY-EXCEPTION", "text": TRACEBACK, "file": "rank-0.log", "line": 9, "rank": 0}
    ]
    incident = an_incident(
        **{"class": "user-code", "blame": "program", "action": "stop", "nodes": [], "evidence": evidence}
    )
    page = "\n".join(job_page(a_view(job=a_job(state="failed"), incidents=[incident]), now=NOW, columns=80))
    assert '    Traceback (most recent call last):\n      File "/home/a/train.py", line 3, in <module>\n' in page
    assert "    ValueError: x\\x1b[2J\n" in page
    assert "\x1b" not in page
    assert page.endswith("next: transom logs 12 --rank 2; correct the program, then submit again")


def test_a_page_of_a_job_of_which_little_is_known() -> None:
    view = {"job": {"id": 1, "name": "x", "state": "submitted"}}
    page = job_page(view, now=NOW, columns=80)
    assert page[:2] == ["job 1 x (): submitted", "  no reason is recorded"]
    assert page[-1] == "next: transom events --job 1 -f"


def test_hostile_words_stay_within_the_page() -> None:
    evil = "\x1b[2J\u202e" + "x" * 300 + "\nnext: rm -rf /"
    job = a_job(name=evil, user=evil, reason=evil, run_dir=evil, nodes=[evil], state=evil)
    incident = an_incident(
        summary=evil, nodes=[evil], evidence=[{"text": evil, "node": evil, "signature": evil, "role": evil}]
    )
    launches = [{"epoch": 1, "nodes": [evil], "started_at": 0, "ended_at": 1, "end_reason": evil}]
    page = job_page(a_view(job=job, incidents=[incident], launches=launches), now=NOW, columns=80)
    assert max(len(line) for line in page) <= 80
    assert not any(char in "".join(page) for char in "\x1b\u202e")
    assert not any(line.startswith("next: rm") for line in page)


@pytest.mark.parametrize(
    ("job", "incidents", "expected"),
    [
        (a_job(state="queued"), [], "squeue --start -j 4711"),
        (a_job(state="queued", slurm_job_id=None), [], "transom events --job 12 -f"),
        (a_job(state="recovering"), [], "transom events --job 12 -f"),
        (a_job(state="completed"), [], "transom ckpt list 12"),
        (a_job(state="held"), [], "what is said above; or give the job up: transom cancel 12"),
        (
            a_job(state="cancelled", checkpoint=None, epoch=0),
            [],
            "nothing of it has run; to run it after all: transom submit JOB.yaml",
        ),
        (a_job(state="cancelled"), [], "transom ckpt list 12"),
        (a_job(state="cancelled", checkpoint=None), [], "transom events --job 12"),
        (a_job(state="failed"), [an_incident()], "transom events --job 12"),
    ],
)
def test_the_next_command(job: cli_server.Any, incidents: cli_server.Any, expected: str) -> None:
    assert next_command(job, incidents) == expected


def test_500_jobs_take_a_line_each_within_80_columns() -> None:
    jobs = [
        a_job(
            id=1000 + n,
            name=f"pretrain-{n:04d}-large-model",
            step=1234567,
            nodes=[f"gpu-{i:04d}" for i in range(n, n + 64, 2)],
        )
        for n in range(500)
    ]
    lines = [line for line, _ in job_list(jobs, now=NOW, columns=80)]
    assert len(lines) == 501
    assert max(len(line) for line in lines) <= 80


def test_below_a_job_that_needs_a_person_stands_why() -> None:
    held = a_job(state="held", reason="waits for a person: /data/ck cannot be written")
    lines = [line for line, _ in job_list([held], now=NOW, columns=80)]
    assert lines[2] == "    waits for a person: /data/ck cannot be written"
    (_, wide) = job_list([held], now=NOW, columns=0)
    assert wide[0].endswith("waits for a person: /data/ck cannot be written")


def test_status_of_all(server: Recorded) -> None:
    done = transom("status", socket=server.socket)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["ID", "NAME", "USER", "STATE"],
        ["12", "demo", "alice", "running"],
    ]
    assert server.asked("GET /v1/jobs")[0].query == {}
    transom("status", "--all", "--user", "bob", socket=server.socket)
    assert server.asked("GET /v1/jobs")[1].query == {"all": "1", "user": "bob"}


def test_no_colour_into_a_pipe(server: Recorded) -> None:
    assert "\x1b" not in transom("status", "12", socket=server.socket, FORCE_COLOR="1").stdout


def test_no_jobs(server: Recorded) -> None:
    server.on("GET /v1/jobs", (200, {"jobs": []}))
    assert "transom submit job.yaml" in transom("status", socket=server.socket).stdout


def test_slurm_is_silent_and_transom_is_paused(server: Recorded) -> None:
    slurm = {"ok": False, "error": "squeue: Unable to contact slurm controller" * 9}
    server.on("GET /v1/daemon", (200, {**cli_server.DAEMON, "paused": "transom is paused by ann: x", "slurm": slurm}))
    lines = transom("status", socket=server.socket).stdout.splitlines()
    assert lines[0].startswith("Slurm does not answer, so this is what was last known: ")
    assert [len(line) <= 80 for line in lines[:2]] == [True, True]
    assert lines[1].endswith("…")
    assert lines[2] == "transom is paused by ann: x; it looks on and does nothing"
    assert lines[3] == "(transom resume-actions)"


@pytest.mark.parametrize("word", ["12", "demo"])
def test_one_job_by_id_or_name(server: Recorded, word: str) -> None:
    done = transom("status", word, socket=server.socket)
    assert done.returncode == 0
    assert done.stdout.startswith("job 12 demo (alice): running\n")


def test_json_is_what_the_server_said(server: Recorded) -> None:
    assert json.loads(transom("status", "--json", socket=server.socket).stdout) == {"jobs": [a_job()]}
    assert json.loads(transom("status", "12", "--json", socket=server.socket).stdout) == a_view()


def test_a_name_that_nobody_has(server: Recorded) -> None:
    done = transom("status", "nope\x1b[2J", socket=server.socket)
    assert done.returncode == 5
    assert done.stderr == "transom: there is no job called 'nope\\x1b[2J'\n  next: transom status --all\n"


def test_a_name_that_two_jobs_have(server: Recorded) -> None:
    ended = [a_job(id=n, state="completed") for n in (3, 5)]
    server.on("GET /v1/jobs", (200, {"jobs": ended}))
    done = transom("status", "demo", socket=server.socket)
    assert done.returncode == 2
    assert done.stderr == "transom: 2 jobs are called 'demo': 3, 5\n  next: name one by its id: 5\n"
    server.on("GET /v1/jobs", (200, {"jobs": [*ended, a_job()]}))
    assert transom("status", "demo", socket=server.socket).stdout.startswith("job 12 ")


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 8), ("cancelled", 8)])
def test_watching_ends_with_the_job(server: Recorded, state: str, code: int) -> None:
    server.on("GET /v1/jobs/12", (200, a_view(job=a_job(state=state))))
    done = transom("status", "12", "--watch", socket=server.socket)
    assert done.returncode == code
    assert f"(alice): {state}" in done.stdout


def test_watching_outlives_a_daemon_that_is_restarted(server: Recorded) -> None:
    answers = iter([(0, None), (200, a_view(job=a_job(state="completed")))])
    server.on("GET /v1/jobs/12", lambda _: next(answers))
    done = transom("status", "12", "--watch", socket=server.socket)
    assert done.returncode == 0
    assert "broke off its answer; trying again" in done.stderr


def test_it_is_fast_enough_to_be_typed_often(server: Recorded) -> None:
    jobs = [a_job(id=n, name=f"job-{n}") for n in range(500)]
    server.on("GET /v1/jobs", (200, {"jobs": jobs}))

    def took() -> float:
        start = time.monotonic()
        assert len(transom("status", socket=server.socket).stdout.splitlines()) == 501
        return time.monotonic() - start

    assert any(took() < 5 for _ in range(3)), "three times in a row it was not the machine"


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal_unless_told_not_to(server: Recorded, variables: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TRANSOM_SOCKET": str(server.socket), "TERM": "xterm", **variables}
    try:
        subprocess.run(
            [sys.executable, "-m", "transom_cli.main", "status"], stdout=theirs, env=environment, check=True, timeout=30
        )
        assert ("\x1b[32mrunning\x1b[0m" in os.read(ours, 1 << 16).decode()) is coloured
    finally:
        os.close(ours)
        os.close(theirs)
