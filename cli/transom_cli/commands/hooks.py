"""``transom hooks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from transom_slurm.hooks.install import configuration, make_key, slurm_conf
from transom_slurm.hooks.install import install as write

from transom_cli.telling import say
from transomd.errors import TransomError, UsageError
from transomd.words import ExitCode

if TYPE_CHECKING:
    from transomd.settings import Settings


@click.group()
def hooks() -> None:
    """Prolog, epilog and health check for every node: they look at it around every job, and tell transomd."""


@hooks.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="transomd's site file.")
@click.option("--url", default="", metavar="URL", help="Where nodes reach transomd (default: as launchers do).")
@click.option("--json", "as_json", is_flag=True, help="Print what was written, and the lines for slurm.conf.")
def install(directory: Path, config: Path | None, url: str, as_json: bool) -> int:
    """Write the hooks with their configuration and key to DIRECTORY, to be copied to the same path on every node (a
    local disk: what lies on a dead mount cannot be started). Run it as root on the head node, and again after each
    upgrade and each change of the checks' limits. It prints the lines for slurm.conf.

    \b
    Examples:
      transom hooks install /etc/slurm/transom
      rsync -a /etc/slurm/transom/ gpu-7:/etc/slurm/transom/
      /etc/slurm/transom/prolog --say           on a node: try it
    """
    # Settings bring pydantic, which no other command should wait for.
    from transomd.health.scripts import PROBE, source
    from transomd.settings import load_settings

    settings = load_settings(config)
    told = configuration(url or _url(settings), json.loads(settings.health.profile().request()))
    try:
        key = make_key(settings.hooks_key)
        files = write(directory.absolute(), source(PROBE), told, key)
    except OSError as error:
        denied = isinstance(error, PermissionError)
        hint = "run it as root" if denied else f"ls -ld {directory.absolute().parent}; or name another folder"
        raise TransomError(f"writing {error.filename}: {error.strerror}", hint=hint) from None
    lines = slurm_conf(directory.absolute()).splitlines()
    if as_json:
        about = {"directory": str(directory.absolute()), "url": told["url"], "files": [str(file) for file in files]}
        print(json.dumps({**about, "slurm_conf": lines}, indent=2))
        return ExitCode.OK
    say(f"{len(files)} files in {directory.absolute()}; transomd at {told['url']}")
    print("Copy the folder to every node, then add to slurm.conf and run scontrol reconfigure:\n")
    print("\n".join(f"  {line}" for line in lines))
    return ExitCode.OK


def _url(settings: Settings) -> str:
    where = settings.daemon.listen_address
    if where is None:
        raise UsageError("transomd does not listen on TCP (daemon.listen is empty)", hint="set daemon.listen")
    kept = Path(settings.daemon.state_dir) / "port"
    port = where[1]
    if not port:
        try:
            port = int(kept.read_text())
        except (OSError, ValueError):
            raise UsageError(
                f"{kept} does not say transomd's port", hint="start transomd once, or give --url"
            ) from None
    found = settings.daemon.launcher_url(port)
    if urlsplit(found).hostname in ("localhost", "localhost.localdomain"):
        raise UsageError(f"{found} leads nowhere from a node", hint="set daemon.advertise, or give --url")
    return found
