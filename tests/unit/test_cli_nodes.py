"""transom nodes, drain, undrain and cancel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_server import NOW, Recorded, Request, a_job, error, serving, transom

FIT = [{"check": "disk", "outcome": "fit", "value": "900 GiB", "limit": "1 GiB", "evidence": ""}]


def a_node(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "IDLE",
        "reason": "",
        "reason_user": "",
        "reason_time": None,
        "owner": "",
        "jobs": [],
        "checked_at": NOW,
        "checks": FIT,
        **changes,
    }


SICK = a_node(
    "n3",
    state="IDLE+DRAIN",
    reason="transom[xid]: Xid 79\x1b[2J",
    reason_user="root",
    reason_time=NOW,
    owner="transom",
    jobs=[4711],
    checks=[
        *FIT,
        {"check": "xid", "outcome": "unfit", "value": "79", "limit": "none", "evidence": "NVRM: Xid (PCI:0000:3b): 79"},
        {"check": "clock", "outcome": "unknown", "value": "", "limit": "", "evidence": "no answer"},
    ],
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    with serving(tmp_path) as recorded:
        nodes = [a_node("n1"), a_node("n2"), SICK, *(a_node(f"gpu-{n:04d}") for n in range(1, 2001))]
        recorded.on("GET /v1/nodes", (200, {"nodes": nodes, "slurm": {"ok": True, "at": NOW, "error": ""}}))
        yield recorded


def test_nodes_alike_are_shown_together(server: Recorded) -> None:
    done = transom("nodes", socket=server.socket)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["NODES", "STATE", "OWNER", "CHECKS", "REASON"],
        ["gpu-[0001-2000],n[1-2]", "IDLE", "-", "fit", "-"],
        ["n3", "IDLE+DRAIN", "transom", "unfit:", "xid", "transom[xid]:", "Xid", "79\\x…"],
    ]
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_a_node_that_is_named_shows_its_evidence(server: Recorded) -> None:
    done = transom("nodes", "n[1,3]", socket=server.socket)
    assert "n3: IDLE+DRAIN, jobs 4711, checked " in done.stdout
    assert "  - xid: unfit, 79, limit none\n    NVRM: Xid (PCI:0000:3b): 79\n" in done.stdout
    assert "  - clock: unknown, no value\n    no answer\n" in done.stdout
    assert "\x1b" not in done.stdout
    assert "disk" not in done.stdout


def test_nodes_that_there_are_not(server: Recorded) -> None:
    done = transom("nodes", "n[1-9]", socket=server.socket)
    assert (done.returncode, done.stderr.splitlines()[0]) == (5, "transom: Slurm has no node n[4-9]")


def test_nodes_as_json(server: Recorded) -> None:
    answer = json.loads(transom("nodes", "n3", "--json", socket=server.socket).stdout)
    assert answer["nodes"] == [SICK]
    assert answer["slurm"]["ok"] is True


def test_slurm_does_not_answer(server: Recorded) -> None:
    server.on("GET /v1/nodes", (200, {"nodes": [], "slurm": {"ok": False, "error": "scontrol: timed out"}}))
    done = transom("nodes", socket=server.socket)
    assert done.stdout.splitlines() == [
        "Slurm has not answered since transomd was started: scontrol: timed out",
        "no nodes are known yet",
    ]
    assert transom("nodes", "n1", socket=server.socket).returncode == 0, "that there is no such node is not known"


def test_what_was_last_known_of_nodes_is_marked(server: Recorded) -> None:
    slurm = {"ok": False, "at": time.time() - 90, "error": "scontrol: timed out"}
    server.on("GET /v1/nodes", (200, {"nodes": [a_node("n1", stale=True)], "slurm": slurm}))
    lines = transom("nodes", "n1", socket=server.socket).stdout.splitlines()
    assert lines[0].startswith("Slurm does not answer; this was so 1m3")
    assert lines[2].split()[:3] == ["n1", "was", "IDLE"]
    assert lines[4].startswith("n1: was IDLE, checked ")


def results(done: dict[str, bool], message: str = "") -> dict[str, Any]:
    command = "scontrol update NodeName={} State=DRAIN Reason='transom[admin]: fan'"
    return {
        "results": [
            {"node": node, "done": ok, "message": "" if ok else message, "command": command.format(node)}
            for node, ok in done.items()
        ]
    }


def test_drain(server: Recorded) -> None:
    server.on("POST /v1/nodes/drain", (200, results({"n1": True, "n2": True})))
    done = transom("drain", "n[1-2]", "n2", "--reason", "fan 2", socket=server.socket)
    assert (done.returncode, done.stdout) == (0, "n[1-2]: drained\n")
    assert server.requests[0].body == {"nodes": ["n1", "n2"], "reason": "fan 2", "dry_run": False}


def test_a_dry_run_prints_the_exact_commands(server: Recorded) -> None:
    server.on("POST /v1/nodes/drain", (200, results({"n1": False}, "would be drained")))
    done = transom("drain", "n1", "--reason", "fan", "--dry-run", socket=server.socket)
    assert done.stdout == (
        "scontrol update NodeName=n1 State=DRAIN Reason='transom[admin]: fan'\nn1: would be drained\n"
    )
    assert server.requests[0].body["dry_run"] is True


def test_what_was_not_drained_is_said_and_fails(server: Recorded) -> None:
    answer = results({"n1": True, "n2": False, "n3": False}, "drained by bob before: maintenance\x1b[2J")
    server.on("POST /v1/nodes/drain", (200, answer))
    done = transom("drain", "n[1-3]", "--reason", "x", socket=server.socket)
    assert done.returncode == 1
    assert done.stdout == "n1: drained\nn[2-3]: not drained: drained by bob before: maintenance\\x1b[2J\n"
    assert done.stderr == "transom: 2 of 3 nodes were not drained\n  next: transom nodes n[2-3]\n"


def test_undrain(server: Recorded) -> None:
    server.on("POST /v1/nodes/undrain", (200, results({"n1": True})))
    assert transom("undrain", "n1", socket=server.socket).stdout == "n1: undrained\n"


def test_a_result_is_not_said_twice(server: Recorded) -> None:
    told = {"node": "n1", "done": True, "message": "undrained", "command": ""}
    server.on("POST /v1/nodes/undrain", (200, {"results": [told]}))
    assert transom("undrain", "n1", socket=server.socket).stdout == "n1: undrained\n"
    server.on("POST /v1/nodes/undrain", (200, {"results": [{**told, "message": "undrained; it was DOWN"}]}))
    assert transom("undrain", "n1", socket=server.socket).stdout == "n1: undrained: it was DOWN\n"
    assert server.requests[0].body == {"nodes": ["n1"], "dry_run": False}


@pytest.mark.parametrize(("command", "more"), [("drain", ("--reason", "x")), ("undrain", ())])
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_a_node_that_slurm_does_not_know_is_not_found(
    server: Recorded, command: str, more: tuple[str, ...], dry_run: tuple[str, ...]
) -> None:
    missing = {"node": "n99", "done": False, "message": "Slurm does not know this node", "missing": True}
    server.on(f"POST /v1/nodes/{command}", (200, {"results": [missing]}))
    done = transom(command, "n99", *more, *dry_run, socket=server.socket)
    assert done.returncode == 5
    assert done.stderr == "transom: Slurm has no node n99\n  next: transom nodes\n"


def test_only_administrators_drain(server: Recorded) -> None:
    server.on("POST /v1/nodes/drain", (403, error("draining n1: alice is no administrator of transom", "ask one")))
    done = transom("drain", "n1", "--reason", "x", socket=server.socket)
    assert done.returncode == 4
    assert done.stderr == "transom: draining n1: alice is no administrator of transom\n  next: ask one\n"


@pytest.mark.parametrize("words", [["n[1-"], ["n1;reboot"], ["@all"], [""], ["n[1-3]/x"]])
def test_what_is_no_host_list(server: Recorded, words: list[str]) -> None:
    done = transom("drain", *words, "--reason", "x", socket=server.socket)
    assert done.returncode == 2
    assert "  next: write nodes as gpu-[1-4,7], in quotes" in done.stderr
    assert server.requests == []


def test_cancel(server: Recorded) -> None:
    def cancelled(request: Request) -> tuple[int, Any]:
        number = int(request.path.split("/")[3])
        return 200, {"job": a_job(id=number, state="cancelled", reason="cancelled by alice")}

    server.on("GET /v1/jobs", (200, {"jobs": [a_job()]}))
    server.on("POST /v1/jobs/12/cancel", cancelled)
    server.on("POST /v1/jobs/14/cancel", cancelled)
    done = transom("cancel", "demo", "14", socket=server.socket)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "job 12 demo: cancelled, cancelled by alice",
        "job 14 demo: cancelled, cancelled by alice",
    ]


def test_cancel_goes_on_after_one_that_cannot_be(server: Recorded) -> None:
    server.on("POST /v1/jobs/1/cancel", (403, error("cancelling job 1: it is bob's", hint="transom status 1")))
    server.on("POST /v1/jobs/12/cancel", (200, {"job": a_job(state="cancelled", reason="by alice")}))
    done = transom("cancel", "1", "12", socket=server.socket)
    assert done.returncode == 4
    assert done.stderr == "transom: 1: cancelling job 1: it is bob's\n  next: transom status 1\n"
    assert done.stdout == "job 12 demo: cancelled, by alice\n"


def test_cancel_as_json(server: Recorded) -> None:
    server.on("POST /v1/jobs/1/cancel", (403, error("cancelling job 1: it is bob's", hint="transom status 1")))
    server.on("POST /v1/jobs/12/cancel", (200, {"job": a_job(state="cancelled", reason="by alice")}))
    done = transom("cancel", "1", "12", "--json", socket=server.socket)
    assert done.returncode == 4
    told = json.loads(done.stdout)
    assert [job["id"] for job in told["jobs"]] == [12]
    fault = {"job": "1", "error": "cancelling job 1: it is bob's", "hint": "transom status 1", "code": 4}
    assert told["errors"] == [fault]
    server.on("POST /v1/jobs/1/cancel", (0, None))
    lost = transom("cancel", "12", "1", "--json", socket=server.socket)
    assert (lost.returncode, len(json.loads(lost.stdout)["jobs"])) == (3, 1), "what was done before is told"


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(("command", "more"), [("drain", ("--reason", "x")), ("undrain", ())])
def test_drain_and_undrain_as_json(
    server: Recorded, command: str, more: tuple[str, ...], dry_run: tuple[str, ...]
) -> None:
    answer = results({"n1": True, "n2": False}, "alice drained it")
    server.on(f"POST /v1/nodes/{command}", (200, answer))
    done = transom(command, "n[1-2]", *more, *dry_run, "--json", socket=server.socket)
    assert json.loads(done.stdout) == {"dry_run": bool(dry_run), **answer}
    assert done.returncode == (0 if dry_run else 1)


def test_what_is_said_of_nodes_breaks_between_words(server: Recorded) -> None:
    why = "root drained it on 2026-11-30 at 13:25:27: the rack moves on Tuesday, and nobody works in it; left as it is"
    server.on("POST /v1/nodes/drain", (200, results({"n2": False}, why)))
    lines = transom("drain", "n2", "--reason", "x", socket=server.socket).stdout.splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == f"n2: not drained: {why}"
