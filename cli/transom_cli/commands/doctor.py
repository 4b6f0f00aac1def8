"""``transom doctor``."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transom_cli.ask import client
from transom_cli.findings import finding_lines, summary
from transom_cli.progress import working
from transom_cli.text import paint, plain, width
from transomd import __version__
from transomd.api.client import Client
from transomd.doctor import Finding, exit_code, slurm_findings
from transomd.errors import RefusedError, TransomError
from transomd.words import Level

if TYPE_CHECKING:
    from transom_slurm.types import SlurmJob, SlurmNode

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
STYLES = {Level.PROBLEM: "failed", Level.UNKNOWN: "recovering", Level.NOTE: "checking"}
SLURM_DEADLINE_S = 10.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings for programs.")
def doctor(as_json: bool) -> int:
    """Look at all that transom rests on: the installation, the daemon and its rights, Slurm and what its settings mean
    here, jobs that are stuck or held and why. Each line is ok, a note, unknown or a PROBLEM, with what to type next.
    Works without a daemon, and then says what could not be seen.

    Exit code: 0 if all is well, 6 if there is a problem, 7 if something could not be found out.

    \b
    Examples:
      transom doctor
      transom doctor --json | jq '.findings[] | select(.level == "problem")'
    """
    with working("looking"):
        found = [*_installation(), *_daemon(client()), *asyncio.run(_slurm())]
    if as_json:
        print(
            json.dumps({"findings": [finding.to_json() for finding in found], "code": int(exit_code(found))}, indent=2)
        )
        return exit_code(found)
    for line, level in finding_lines(found, width()):
        print(paint(line, STYLES.get(level, "")))
    print(f"\n{summary(found)}")
    return exit_code(found)


# --- installation -------------------------------------------------------------------------------------------------


def _installation() -> list[Finding]:
    def told(level: Level, text: str, next: str = "") -> Finding:
        return Finding(section="installation", level=level, text=text, next=next)

    found = [told(Level.OK, f"transom {__version__}, Python {platform.python_version()} in {sys.executable}")]
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        said = f"not found on PATH: {', '.join(missing)}"
        found.append(told(Level.PROBLEM, said, "run it where Slurm's commands are: echo $PATH"))
    else:
        found.append(told(Level.OK, f"Slurm's commands are in {Path(str(shutil.which('scontrol'))).parent}"))
    return [*found, *_site_file(told)]


def _site_file(told: object) -> list[Finding]:
    from transomd.modes import site_file
    from transomd.settings import load_settings

    assert callable(told)
    file = site_file()
    if file is None and os.geteuid():
        # A site's own is root's: its folder is closed, and no settings of an ordinary user's are in it.
        return [told(Level.OK, "you have no site file and need none; root's transom doctor checks the site's")]
    if file is None:
        return [told(Level.OK, "there is no site file: everything has its default")]
    try:
        load_settings(file)
    except TransomError as error:
        faults = "; ".join(getattr(error, "faults", ()))
        said = f"the site file: {error}{': ' + faults if faults else ''}"
        return [told(Level.PROBLEM, said, error.hint)]
    return [told(Level.OK, f"the site file {file} is good")]


# --- the daemon ---------------------------------------------------------------------------------------------------


def _daemon(api: Client) -> list[Finding]:
    def told(level: Level, text: str, next: str = "") -> Finding:
        return Finding(section="daemon", level=level, text=text, next=next)

    try:
        answer = api.get("/v1/daemon")
    except TransomError as error:
        said = "what only the daemon sees: its rights, stuck acts, budgets, held jobs"
        return [told(Level.PROBLEM, str(error), error.hint), told(Level.UNKNOWN, said, "start it, then transom doctor")]
    version = str(answer.get("version"))
    found = [told(Level.OK, f"transomd {version} answers at {api.address} ({answer.get('mode')} mode)")]
    if version != __version__:
        found.append(
            told(Level.NOTE, f"this command is transom {__version__}, the daemon {version}", "install one of them")
        )
    try:
        more = api.get("/v1/doctor")["findings"]
    except RefusedError:
        found.append(told(Level.NOTE, "only an administrator is told more of it", "sudo transom doctor"))
    except TransomError as error:
        found.append(told(Level.UNKNOWN, f"what only the daemon sees: {error}", error.hint))
    else:
        found += [Finding.from_json(item) for item in more]
    order = [finding.section for finding in found]
    return sorted(found, key=lambda finding: order.index(finding.section))


# --- Slurm --------------------------------------------------------------------------------------------------------


async def _slurm() -> list[Finding]:
    """Ask Slurm itself, as the user who asks."""
    from transom_slurm.commands import CommandClient, Deadlines
    from transom_slurm.errors import SlurmError

    commands = CommandClient(deadlines=Deadlines(query=SLURM_DEADLINE_S))
    try:
        config, nodes = await asyncio.gather(commands.config(), commands.nodes())
    except SlurmError as error:
        hint = plain(error.hint) or "scontrol ping"
        return [
            Finding(section="slurm", level=Level.PROBLEM, text=str(error), next=hint),
            Finding(section="slurm", level=Level.UNKNOWN, text="Slurm's settings, and jobs that are stuck", next=hint),
        ]
    answers = Finding(section="slurm", level=Level.OK, text=f"Slurm answers: {len(nodes)} nodes")
    try:
        jobs = await commands.jobs()
    except SlurmError as error:
        stuck = [Finding(section="slurm jobs", level=Level.UNKNOWN, text=str(error), next=error.hint or "squeue")]
    else:
        stuck = _stuck(jobs.values(), nodes)
    return [answers, *slurm_findings(config), *stuck]


def _stuck(jobs: Iterable[SlurmJob], nodes: Mapping[str, SlurmNode]) -> list[Finding]:
    """Say which of Slurm's jobs will not go on by themselves, whoever's they are."""
    from transom_slurm.stuck import stuck_jobs

    def told(level: Level, text: str, next: str = "") -> Finding:
        return Finding(section="slurm jobs", level=level, text=text, next=next)

    found = stuck_jobs(jobs, nodes, now=time.time())
    if not found:
        return [told(Level.OK, "no job is stuck or held for what only a person can change")]
    return [
        told(Level.PROBLEM, f"Slurm job {one.job.job_id} {one.job.name} of {one.job.user}: {one.cause}", one.command)
        for one in found
    ]
