"""``transomd db``: upgrade, back up, restore and check the daemon's database."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from sqlalchemy import URL
from transom_sql.connect import parse_url, sqlite_file
from transom_sql.copies import copy_file
from transom_sql.dump import dump, restore_by_hand
from transom_sql.inspection import look_over
from transom_sql.owner import own, owned_by, owner_name
from transom_sql.restore import restore_file
from transom_sql.store import StoreError
from transom_sql.upgrade import Half, Upgraded, connected, steps, upgrade_engine, verified

from transomd.errors import RefusedError, UsageError
from transomd.modes import load
from transomd.settings import Settings
from transomd.words import ExitCode


def run(words: list[str], config: Path | None = None) -> int:
    """Do what ``transomd db WORDS`` asks for, and return the exit code. Raises TransomError and StoreError."""
    args = _parser(config).parse_args(words)
    settings = load(args.config)
    code: int = args.verb(settings, args)
    return code


def _parser(config: Path | None) -> argparse.ArgumentParser:
    # Before and after the verb; what is not said after it must not undo what was said before.
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, default=argparse.SUPPRESS, help="site file, as transomd's")
    parser = argparse.ArgumentParser(prog="transomd db", description="Work on the daemon's database.")
    parser.add_argument("--config", type=Path, default=config, help="site file, as transomd's")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    upgrade = verbs.add_parser("upgrade", parents=[common], help="bring the schema up to date, after a copy (SQLite)")
    half = upgrade.add_mutually_exclusive_group()
    half.add_argument(
        "--pre",
        action="store_const",
        dest="half",
        const="pre",
        help="only what a running transomd of the last release can live with",
    )
    half.add_argument(
        "--post",
        action="store_const",
        dest="half",
        const="post",
        help="everything (the default); transomd must be stopped",
    )
    upgrade.set_defaults(verb=_upgrade, half="post")

    backup = verbs.add_parser("backup", parents=[common], help="copy the database to FILE, also while transomd runs")
    backup.add_argument("file", type=Path, metavar="FILE", help="a new file")
    backup.set_defaults(verb=_backup)

    restore = verbs.add_parser(
        "restore", parents=[common], help="put a backup in the place of the database; the old one is kept beside"
    )
    restore.add_argument("file", type=Path, metavar="FILE", help="what `transomd db backup` or an upgrade wrote")
    restore.set_defaults(verb=_restore)

    check = verbs.add_parser("check", parents=[common], help="look the database over; exit 1 when something is wrong")
    check.set_defaults(verb=_check)
    return parser


def _upgrade(settings: Settings, args: argparse.Namespace) -> int:
    half: Half = args.half
    with connected(settings.daemon.database_url, create=True) as engine:
        ownership = None
        if any(step.endswith("_post") for step in steps(verified(engine), half)):
            ownership = own(engine, owner_name("transomd db upgrade"))
        try:
            done = upgrade_engine(engine, half=half)
        finally:
            if ownership:
                ownership.release()
        left = steps(done.reached)
    _tell_upgrade(done, left)
    return int(ExitCode.OK)


def _tell_upgrade(done: Upgraded, left: list[str]) -> None:
    if done.found == done.reached:
        print(f"the schema is at {done.reached}; nothing was to be done")
    else:
        print(f"upgraded the schema: {done.found or 'a new database'} → {done.reached}")
    if done.backup:
        print(f"the database as it was before: {done.backup}")
    if left:
        print(
            f"left for when transomd of this release runs or is stopped: {', '.join(left)} (transomd db upgrade --post)"
        )


def _backup(settings: Settings, args: argparse.Namespace) -> int:
    url, target = parse_url(settings.daemon.database_url), args.file.absolute()
    file = sqlite_file(url)
    if target.exists():
        raise UsageError(f"back up to {target}: there is such a file already", hint="name a new file")
    if file is None:
        dump(url, target)
    elif not file.exists():
        raise UsageError(f"back up {file}: there is no such file", hint=f"ls -l {file.parent}")
    else:
        copy_file(file, target)
    print(f"wrote {target}, {target.stat().st_size / 1e6:.1f} MB, verified")
    return int(ExitCode.OK)


def _restore(settings: Settings, args: argparse.Namespace) -> int:
    url, source = parse_url(settings.daemon.database_url), args.file.absolute()
    file = sqlite_file(url)
    if file is None:
        raise _postgres_restore(settings, url, source)
    now = time.time()
    done = restore_file(source, file, now=now, stamp=time.strftime("%Y%m%d-%H%M%S", time.localtime(now)))
    print(f"{file} is now what {source} holds, at revision {done.revision}")
    if done.kept:
        print(f"the old database: {done.kept}")
    print(
        "jobs submitted since that backup are not known any more; those that still run in Slurm are named transom:..."
    )
    print("next: systemctl start transomd; transom status")
    return int(ExitCode.OK)


def _postgres_restore(settings: Settings, url: URL, source: Path) -> RefusedError:
    """Another program's server is not ours to turn around; the commands for it are told, and who is in the way."""
    try:
        with connected(settings.daemon.database_url, create=False) as engine:
            owner = owned_by(engine)
    except StoreError:
        owner = ""
    why = f"{owner} owns it; stop it first" if owner else "transom does not replace a database on a Postgres server"
    return RefusedError(f"restore {source} on Postgres: {why}", hint=restore_by_hand(url, source))


def _check(settings: Settings, args: argparse.Namespace) -> int:
    facts = look_over(settings.daemon.database_url)
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        print(f"{fact.name:{width}}  {fact.value}")
        if fact.wrong:
            print(f"{'':{width}}  ! {fact.wrong}")
    return int(ExitCode.ERROR if any(fact.wrong for fact in facts) else ExitCode.OK)
