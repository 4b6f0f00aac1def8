"""``transom submit``."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from transom_cli.ask import Json, client, finished
from transom_cli.commands.events import event_lines
from transom_cli.follow import follow_events
from transom_cli.room import notes
from transom_cli.telling import say, tell
from transom_cli.text import plain, safe, width
from transomd.api.client import Client, NoAnswerError
from transomd.errors import SpecError, TransomError, UnreachableError
from transomd.launch.stage import Staged, path_faults, planned_run_dir, stage, unstage
from transomd.script import read_options
from transomd.spec import JobSpec, load_job
from transomd.words import ExitCode, JobState


@click.command()
@click.argument("job", metavar="JOB.yaml", type=click.Path())
@click.argument("sbatch", metavar="[-- SBATCH OPTIONS]", nargs=-1)
@click.option(
    "--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Instead of what the file says; repeatable."
)
@click.option(
    "--dry-run", is_flag=True, help="Print the batch script, the sbatch call and the gate's plan; submit nothing."
)
@click.option("--watch", is_flag=True, help="Show the job's events until it ends: exit code 0 or 8.")
@click.option("--json", "as_json", is_flag=True, help="Print what the daemon answers.")
def submit(
    job: str, sbatch: tuple[str, ...], overrides: tuple[str, ...], dry_run: bool, watch: bool, as_json: bool
) -> int:
    """Submit the job that JOB.yaml (or - for standard input) describes. What follows -- goes to sbatch, but for what
    transom itself must set. Your environment is kept in the job's run folder and nowhere else.

    \b
    The shortest job.yaml:
      name: demo
      nodes: 4
      command: python train.py

    \b
    Examples:
      transom submit job.yaml --dry-run
      transom submit job.yaml --watch
      transom submit job.yaml --set nodes=8 -- --constraint=h100
    """
    spec = _spec(job, sbatch, overrides)
    api = client()
    if dry_run:
        return _dry_run(api, spec, as_json)
    accepted = _submit(api, spec)
    if os.geteuid() == 0:
        _notes(["the job runs as root, as you do now; submit as yourself unless it must"])
    print(json.dumps({"job": accepted}, indent=2) if as_json else _accepted(spec, accepted), flush=True)
    _notes(notes(spec))
    return _watch(api, accepted) if watch else ExitCode.OK


def _spec(job: str, sbatch: tuple[str, ...], overrides: tuple[str, ...]) -> JobSpec:
    cwd = _cwd()
    source: Path | str = sys.stdin.read() if job == "-" else Path(job)
    spec = load_job(source, overrides=overrides, sbatch=sbatch, cwd=cwd).resolve(cwd)
    faults = path_faults(spec)
    if faults:
        message = f"{job}: the job's folders cannot be used; nothing was submitted"
        raise SpecError(message, faults, hint=f"name other folders, then: transom submit {shlex.quote(job)} --dry-run")
    if spec.script:
        _notes(f"{spec.script}: {replaced}" for replaced in read_options(Path(spec.script)).replaced)
    return spec


def _notes(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        tell(f"note: {sentence}")


def _cwd() -> Path:
    """Return the current folder as the user sees it (``$PWD``), which a node finds by the same name."""
    shown = Path(os.environ.get("PWD", ""))
    try:
        if shown.is_absolute() and shown.samefile("."):
            return shown
    except OSError:
        pass
    return Path.cwd()


def _body(spec: JobSpec, run_dir: Path, token: str, *, dry_run: bool) -> dict[str, object]:
    """What is sent: of the token its digest only, so that it never leaves the run folder until its launcher uses it."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    stored = spec.model_dump(mode="json")
    return {"spec": stored, "run_dir": str(run_dir), "cwd": spec.workdir, "token_sha256": digest, "dry_run": dry_run}


def _submit(api: Client, spec: JobSpec) -> Json:
    """Stage and hand over. The run folder is removed only when it is certain that the daemon did not take the job."""
    api.get("/v1/daemon")
    staged = stage(spec, os.environ)
    try:
        answer: Json = api.post("/v1/jobs", _body(spec, staged.run_dir, staged.token, dry_run=False))["job"]
    except NoAnswerError as error:
        return _looked_for(api, staged, error)
    except TransomError:
        if _surely_not_recorded(api, staged):
            unstage(staged)
        raise
    except KeyboardInterrupt:
        tell(f"transom: interrupted; whether the job was recorded: transom status (its run folder: {staged.run_dir})")
        raise
    return answer


def _recorded(api: Client, staged: Staged) -> Json | None:
    """Return the job that was recorded with this run folder; None if there is none. Raises TransomError."""
    jobs: list[Json] = api.get("/v1/jobs", all=1)["jobs"]
    return next((job for job in jobs if job.get("run_dir") == str(staged.run_dir)), None)


def _surely_not_recorded(api: Client, staged: Staged) -> bool:
    try:
        return _recorded(api, staged) is None
    except TransomError:
        return False


def _looked_for(api: Client, staged: Staged, error: NoAnswerError) -> Json:
    """Return the job of a request that was not answered, if it was carried out; else raise UnreachableError."""
    hint = f"transom status; the run folder is {staged.run_dir}, remove it if no job has it"
    try:
        found = _recorded(api, staged)
    except TransomError:
        raise UnreachableError(f"{error}; whether the job was recorded is not known", hint=hint) from None
    if found is None:
        raise UnreachableError(f"{error}; the job is not recorded so far", hint=hint)
    return found


def _accepted(spec: JobSpec, job: Mapping[str, Any]) -> str:
    spares = f" and {spec.spares} spare" if spec.spares else ""
    nodes = "1 node" if spec.nodes == 1 else f"{spec.nodes} nodes"
    return (
        f"submitted job {job['id']} {plain(job['name'])}: {nodes}{spares}\n"
        f"  run folder {plain(job.get('run_dir'))}\n"
        f"  next: transom status {job['id']}; transom logs {job['id']} -f"
    )


def _watch(api: Client, job: Mapping[str, Any]) -> int:
    number = int(job["id"])

    def ended() -> bool:
        return finished(api.get(f"/v1/jobs/{number}")["job"])

    try:
        for event in follow_events(api, job=number, after=0, until=ended):
            print(event_lines(event, width()), flush=True)
    except KeyboardInterrupt:
        tell("")
        tell(f"job {number} goes on; to end it: transom cancel {number}")
        raise
    end = api.get(f"/v1/jobs/{number}")["job"]
    say(f"job {number} {end['name']}: {end['state']}, {end['reason']}")
    return ExitCode.OK if end["state"] == JobState.COMPLETED else ExitCode.JOB_FAILED


def _dry_run(api: Client, spec: JobSpec, as_json: bool) -> int:
    answer = api.post("/v1/jobs", _body(spec, planned_run_dir(spec), "", dry_run=True))
    _notes(notes(spec))
    if as_json:
        print(json.dumps(answer, indent=2))
        return ExitCode.OK
    plan = answer["plan"]
    call = shlex.join(str(word) for word in plan["sbatch"])
    gate = "\n".join(str(sentence) for sentence in plan["gate"])
    for title, text in (("batch script", plan["script"]), ("sbatch call", call), ("gate", gate)):
        print(f"# {title}\n{safe(text).rstrip()}\n")
    print("nothing was submitted")
    return ExitCode.OK
