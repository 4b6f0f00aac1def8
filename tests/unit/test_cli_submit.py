"""transom submit: nothing is submitted with a fault, and nothing is left behind or lost when the daemon fails."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_server import NOW, Recorded, Request, a_job, a_view, error, serving, start, transom

LEAST = "name: demo\nnodes: 4\nspares: 1\ncommand: python train.py\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorded]:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "job.yaml").write_text(LEAST)
    with serving(tmp_path) as recorded:
        recorded.on("GET /v1/jobs", (200, {"jobs": []}))
        recorded.on("POST /v1/jobs", accept)
        yield recorded


def accept(request: Request) -> tuple[int, object]:
    return 200, {"job": a_job(state="submitted", run_dir=request.body["run_dir"])}


def run_folders(workdir: Path) -> list[Path]:
    folder = workdir / ".transom"
    return list(folder.iterdir()) if folder.exists() else []


def test_a_job_is_handed_over(server: Recorded, tmp_path: Path) -> None:
    work = tmp_path / "w"
    done = transom("submit", "job.yaml", "--", "--constraint=h100", socket=server.socket, cwd=work, SECRET="s3cret")
    told = "note: the job runs as root, as you do now; submit as yourself unless it must\n" if os.geteuid() == 0 else ""
    assert (done.returncode, done.stderr) == (0, told)
    (run_dir,) = run_folders(work)
    assert done.stdout == (
        f"submitted job 12 demo: 4 nodes and 1 spare\n  run folder {run_dir}\n"
        "  next: transom status 12; transom logs 12 -f\n"
    )
    (request,) = server.asked("POST /v1/jobs")
    assert request.body["spec"]["sbatch"] == ["--constraint=h100"]
    assert request.body["run_dir"] == str(run_dir)
    assert request.body["cwd"] == str(work)
    token = (run_dir / "token").read_bytes()
    assert request.body["token_sha256"] == hashlib.sha256(token).hexdigest()
    assert token.decode() not in str(request.body)
    assert request.body["dry_run"] is False
    assert json.loads((run_dir / "env.json").read_text())["SECRET"] == "s3cret"
    assert "s3cret" not in json.dumps([r.body for r in server.requests])
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_a_dry_run_shows_the_plan_and_makes_nothing(server: Recorded, tmp_path: Path) -> None:
    call = ["sbatch", "--parsable", "--comment=a b"]
    plan = {"script": "#!/bin/sh\nexec x\x1b[2J\n", "sbatch": call, "gate": ["waits for 5 nodes", "starts on 4"]}
    server.on("POST /v1/jobs", (200, {"plan": plan}))
    done = transom("submit", "job.yaml", "--dry-run", socket=server.socket, cwd=tmp_path / "w")
    assert done.stdout == (
        f"# batch script\n#!/bin/sh\nexec x\\x1b[2J\n\n# sbatch call\n{shlex.join(call)}\n\n"
        "# gate\nwaits for 5 nodes\nstarts on 4\n\nnothing was submitted\n"
    )
    (request,) = server.asked("POST /v1/jobs")
    assert request.body["dry_run"] is True
    assert request.body["dry_run"] is True
    assert run_folders(tmp_path / "w") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: demo\nnodes: [1\n", ["job.yaml:3: is not YAML: "]),
        (
            "name: demo\nnodes: 0\n",
            ["job.yaml:1: command: is required", "job.yaml:2: nodes: must be at least 1, got 0"],
        ),
        (LEAST + "partiton: x\n", ["job.yaml:5: partiton: is no field; did you mean `partition`?"]),
    ],
)
def test_faults_submit_nothing(server: Recorded, tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "w" / "job.yaml").write_text(text)
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 2
    _, *told, hint = [line.strip() for line in done.stderr.splitlines()]
    assert len(told) == len(expected)
    assert all(line.startswith(begin) for line, begin in zip(told, expected, strict=True))
    assert hint.startswith("next: correct it and submit again")
    assert server.requests == []
    assert run_folders(tmp_path / "w") == []


def test_no_such_file(server: Recorded, tmp_path: Path) -> None:
    done = transom("submit", "none.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert (done.returncode, done.stderr.splitlines()[0]) == (5, "transom: reading none.yaml: there is no such file")


def test_a_checkpoint_folder_that_cannot_be_used(server: Recorded, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "w" / "job.yaml").write_text(LEAST + f"checkpoint: {{dir: {tmp_path}/file}}\n")
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 2
    assert f"checkpoint.dir: {tmp_path}/file is in the way and no folder; name another" in done.stderr
    assert "\n  next: name other folders, then: transom submit " in done.stderr
    assert server.requests == []


def test_options_that_transom_owns_are_refused(server: Recorded, tmp_path: Path) -> None:
    done = transom("submit", "job.yaml", "--", "--requeue", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 2
    assert "after `--`: --requeue: transom restarts jobs itself; two owners would run two copies" in done.stderr


def test_from_standard_input_with_overrides(server: Recorded, tmp_path: Path) -> None:
    done = transom("submit", "-", "--set", "nodes=9", socket=server.socket, cwd=tmp_path / "w", stdin=LEAST)
    assert done.returncode == 0
    assert server.asked("POST /v1/jobs")[0].body["spec"]["nodes"] == 9


def test_a_script_is_submitted_and_what_is_replaced_is_said(server: Recorded, tmp_path: Path) -> None:
    (tmp_path / "w" / "t.sh").write_text("#!/bin/sh\n#SBATCH -J old -N 2 --requeue\nsrun ./a\n")
    (tmp_path / "w" / "job.yaml").write_text("script: t.sh\n")
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 0
    assert "note: " in done.stderr
    assert "--requeue: transom restarts jobs itself" in done.stderr
    assert server.asked("POST /v1/jobs")[0].body["spec"]["name"] == "old"
    (run_dir,) = run_folders(tmp_path / "w")
    assert (run_dir / "script").read_text().endswith("srun ./a\n")


def test_the_daemon_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(LEAST)
    done = transom("submit", "job.yaml", socket=tmp_path / "none", cwd=tmp_path)
    assert done.returncode == 3
    assert "systemctl status transomd" in done.stderr
    assert run_folders(tmp_path) == []


def test_a_refusal_leaves_no_run_folder(server: Recorded, tmp_path: Path) -> None:
    fault = error(
        "submitting demo: invalid partition specified: gpuu", "sinfo -s", ["partition: there is none called gpuu"]
    )
    server.on("POST /v1/jobs", (400, fault))
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "transom: submitting demo: invalid partition specified: gpuu",
        "  partition: there is none called gpuu",
        "  next: sinfo -s",
    ]
    assert run_folders(tmp_path / "w") == []


def test_a_refusal_of_a_job_that_was_recorded_after_all_keeps_its_run_folder(server: Recorded, tmp_path: Path) -> None:
    def record_and_fail(request: Request) -> tuple[int, object]:
        server.on("GET /v1/jobs", (200, {"jobs": [a_job(run_dir=request.body["run_dir"])]}))
        return 400, error("not understood")

    server.on("POST /v1/jobs", record_and_fail)
    assert transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w").returncode == 2
    assert len(run_folders(tmp_path / "w")) == 1


def test_an_answer_that_got_lost_is_looked_for(server: Recorded, tmp_path: Path) -> None:
    def record_and_die(request: Request) -> tuple[int, object]:
        server.on("GET /v1/jobs", (200, {"jobs": [a_job(run_dir=request.body["run_dir"])]}))
        return 0, None

    server.on("POST /v1/jobs", record_and_die)
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 0
    assert done.stdout.startswith("submitted job 12 demo")
    assert len(run_folders(tmp_path / "w")) == 1


def test_an_unknown_end_keeps_the_run_folder(server: Recorded, tmp_path: Path) -> None:
    server.on("POST /v1/jobs", (0, None))
    server.on("GET /v1/jobs", (200, {"jobs": []}))
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 3
    (run_dir,) = run_folders(tmp_path / "w")
    assert "the job is not recorded so far" in done.stderr
    assert str(run_dir) in done.stderr


def test_a_workdir_that_cannot_be_written(server: Recorded, tmp_path: Path) -> None:
    (tmp_path / "w" / "job.yaml").write_text(LEAST + "workdir: /proc/1\ncheckpoint: {dir: /tmp}\n")
    done = transom("submit", "job.yaml", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == 2
    assert "workdir: you cannot write in /proc/1, where the run folder and its logs go; name another" in done.stderr
    assert server.requests == []


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("failed", 8)])
def test_watching_shows_the_events_to_the_end(server: Recorded, tmp_path: Path, state: str, code: int) -> None:
    events = [
        {"id": n, "at": NOW, "kind": "state", "message": f"m{n}\x1b[2J", "job_id": 12, "node": None} for n in (1, 2)
    ]

    def answer(request: Request) -> tuple[int, object]:
        after = int(request.query["after"])
        return 200, {"events": [event for event in events if int(str(event["id"])) > after], "last": 2}

    server.on("GET /v1/events", answer)
    server.on("GET /v1/jobs/12", (200, a_view(job=a_job(state=state, reason="so it is"))))
    done = transom("submit", "job.yaml", "--watch", socket=server.socket, cwd=tmp_path / "w")
    assert done.returncode == code
    *_, first, second, last = done.stdout.splitlines()
    assert first.endswith(" state [job 12] m1\\x1b[2J")
    assert second.endswith(" m2\\x1b[2J")
    assert last == f"job 12 demo: {state}, so it is"


def test_ctrl_c_while_watching_ends_the_watching_alone(server: Recorded, tmp_path: Path) -> None:
    server.on("GET /v1/events", (200, {"events": [], "last": 0}))
    server.on("GET /v1/jobs/12", (200, a_view()))
    process = start("submit", "job.yaml", "--watch", socket=server.socket, cwd=tmp_path / "w")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("submitted job 12")
    while not server.asked("GET /v1/events"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "job 12 goes on; to end it: transom cancel 12" in told
    assert "Traceback" not in told
