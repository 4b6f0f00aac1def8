"""``transomd --check``: looks at all that the daemon will need, says every fault at once, and changes nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pwd
import socket
from collections.abc import Iterable
from pathlib import Path

from transom_slurm.client import SlurmClient
from transom_slurm.commands import CommandClient, Deadlines
from transom_slurm.errors import SlurmDenied, SlurmError, SlurmRejected
from transom_slurm.pyslurm_client import PyslurmClient, PyslurmUnusable, choose_client
from transom_slurm.pyslurm_process import worker_argv
from transom_slurm.types import SlurmNode
from transom_sql.store import StoreError
from transom_sql.upgrade import current, newest

from transomd.doctor import Finding, slurm_findings
from transomd.errors import TransomError
from transomd.health.ssh import SshPool
from transomd.health.sshfailure import SshFailure
from transomd.rights import ssh_settings
from transomd.settings import Settings
from transomd.tee.catalogue import ready
from transomd.words import Level

NO_NODE = "transom-no-such-node"
"""A node that no cluster has. slurmctld looks at the right to change nodes before it looks for the node."""


def _told(section: str, level: Level, text: str, next: str = "") -> Finding:
    return Finding(section=section, level=level, text=text, next=next)


async def examine(settings: Settings) -> list[Finding]:
    """Look at everything."""
    found = [*places(settings), *_ports(settings), *database(settings), *keys(settings), signatures()]
    return found + await _slurm(settings)


# --- files and sockets --------------------------------------------------------------------------------------------


def places(settings: Settings) -> list[Finding]:
    """Look at the state directory and the socket's folder."""
    state, sock = Path(settings.daemon.state_dir), Path(settings.daemon.socket)
    found = [_folder("state directory", state), _folder("socket's folder", sock.parent)]
    running = _running(state / "lock")
    if running:
        found.append(_told("daemon", Level.NOTE, f"a transomd runs on {state} already", "systemctl status transomd"))
    elif os.path.exists(sock) and not sock.is_socket():
        found.append(_told("daemon", Level.PROBLEM, f"{sock} is no socket", f"rm {sock}"))
    return found


def _folder(what: str, path: Path) -> Finding:
    """Say whether a folder can be written, or made."""
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK, effective_ids=True)
    if not writable:
        said = f"the {what} {path} cannot be written by {_me()}"
        return _told("daemon", Level.PROBLEM, said, f"ls -ld {there}; id")
    if there != path:
        return _told("daemon", Level.OK, f"the {what} {path} will be made")
    if what.startswith("state") and path.stat().st_mode & 0o077:
        return _told("daemon", Level.NOTE, f"others may look into the {what} {path}", f"chmod 0700 {path}")
    return _told("daemon", Level.OK, f"the {what} {path} can be written")


def _running(lock: Path) -> bool:
    try:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _ports(settings: Settings) -> list[Finding]:
    asked = (("listen", settings.daemon.listen_address), ("metrics", settings.daemon.metrics_address))
    return [_port(name, where) for name, where in asked if where is not None and where[1]]


def _port(name: str, where: tuple[str, int]) -> Finding:
    host, number = where
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            said = f"daemon.{name}: port {number} of {host or 'this host'}: {error.strerror}"
            return _told("daemon", Level.NOTE, f"{said} (a running transomd?)", f"ss -ltnp 'sport = :{number}'")
    return _told("daemon", Level.OK, f"daemon.{name}: port {number} of {host or 'every address'} is free")


def database(settings: Settings) -> list[Finding]:
    """Look at the database: whether it can be reached, and its revision."""
    url = settings.daemon.database_url
    shown = url.split("@")[-1]
    file = Path(url.partition(":///")[2]) if url.startswith("sqlite:///") else None
    if file is not None and not os.path.exists(file):
        return [_told("database", Level.OK, f"{shown} will be made")]
    try:
        revision, wanted = current(url), newest()
    except StoreError as error:
        return [_told("database", Level.PROBLEM, str(error), error.hint)]
    if revision in (None, wanted):
        return [_told("database", Level.OK, f"{shown} at revision {revision or 'none yet: it is empty'}")]
    said = f"{shown} is at revision {revision}, this transom's is {wanted}"
    return [_told("database", Level.NOTE, said, "docs/database.md: upgrade")]


def signatures() -> Finding:
    """Look at the data file of what failures look like, all of it."""
    try:
        count = len(ready().signatures)
    except TransomError as error:
        return _told("daemon", Level.PROBLEM, str(error), error.hint)
    return _told("daemon", Level.OK, f"{count} failure signatures are read")


def keys(settings: Settings) -> list[Finding]:
    """Look at what is needed to reach nodes: key and known hosts."""
    ssh = ssh_settings(settings)
    found = [_readable("known hosts", ssh.known_hosts, "ssh-keyscan -H NODES, looked through by a person")]
    found += [_readable("SSH key", key, f"ssh-keygen -t ed25519 -f {key}") for key in ssh.client_keys]
    if ssh.config is not None:
        found.append(_readable("SSH configuration", ssh.config, "set ssh.config in transomd.toml"))
    for key in ssh.client_keys:
        if os.path.exists(key) and key.stat().st_mode & 0o077:
            found.append(_told("ssh", Level.PROBLEM, f"others may read the SSH key {key}", f"chmod 0600 {key}"))
    return found


def _readable(what: str, path: Path, remedy: str) -> Finding:
    if not os.path.lexists(path) and os.access(path.parent, os.X_OK, effective_ids=True):
        return _told("ssh", Level.PROBLEM, f"the {what} {path}: there is no such file", remedy)
    if not os.access(path, os.R_OK, effective_ids=True):
        return _told("ssh", Level.PROBLEM, f"the {what} {path} cannot be read by {_me()}", f"ls -l {path}; id")
    return _told("ssh", Level.OK, f"the {what} {path} can be read")


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


# --- Slurm, rights, nodes -----------------------------------------------------------------------------------------


def command_client(settings: Settings) -> CommandClient:
    """Return the client that asks through Slurm's commands, with the site's deadlines."""
    wish = settings.slurm
    return CommandClient(deadlines=Deadlines(query=wish.query_timeout_s, submit=wish.submit_timeout_s))


async def _slurm(settings: Settings) -> list[Finding]:
    commands, wish = command_client(settings), settings.slurm
    try:
        client, why = await choose_client(
            commands, wish.client, argv=worker_argv(wish.pyslurm_python), deadline_s=wish.query_timeout_s
        )
    except PyslurmUnusable as error:
        return [_told("slurm", Level.PROBLEM, str(error), error.hint)]
    except SlurmError as error:
        return [_told("slurm", Level.PROBLEM, str(error), error.hint or "scontrol ping")]
    try:
        return [_told("slurm", Level.OK, why), *await _answers(client, commands, settings)]
    finally:
        if isinstance(client, PyslurmClient):
            await client.close()


async def _answers(client: SlurmClient, commands: CommandClient, settings: Settings) -> list[Finding]:
    try:
        nodes, config = await asyncio.gather(client.nodes(), client.config())
    except SlurmError as error:
        return [_told("slurm", Level.PROBLEM, str(error), error.hint or "scontrol ping")]
    found = [_told("slurm", Level.OK, f"Slurm answers: {len(nodes)} nodes"), *slurm_findings(config)]
    async with SshPool(ssh_settings(settings)) as pool:
        return [*found, *await rights(commands), await ssh_works(pool, nodes.values(), settings)]


async def rights(commands: CommandClient) -> list[Finding]:
    """Look at what this process may do, by a change of a node that does not exist: nothing is changed."""
    root = os.geteuid() == 0
    may = "runs as root: jobs run as their own users, nodes can be fenced"
    less = f"runs as {_me()}: it starts {_me()}'s own jobs only (personal mode)"
    found = [_told("rights", Level.OK if root else Level.NOTE, may if root else less)]
    try:
        await commands.drain(NO_NODE, "transom: may this user drain nodes?")
    except SlurmDenied:
        said = f"Slurm does not let {_me()} change nodes, so none is drained (jobs recover by leaving nodes out)"
        return [*found, _told("rights", Level.PROBLEM if root else Level.NOTE, said, _GRANT.format(user=_me()))]
    except SlurmRejected:
        return [*found, _told("rights", Level.OK, "Slurm lets this user change nodes")]
    except SlurmError as error:
        return [*found, _told("rights", Level.UNKNOWN, f"whether nodes may be changed: {error}", error.hint)]
    return [*found, _told("rights", Level.UNKNOWN, f"Slurm accepted a change of {NO_NODE}: is there such a node?")]


_GRANT = "sacctmgr modify user {user} set adminlevel=Administrator; or run transomd as root or as SlurmUser"


async def ssh_works(pool: SshPool, nodes: Iterable[SlurmNode], settings: Settings) -> Finding:
    """Log in on one node that Slurm hears."""
    node = next((node.name for node in nodes if node.status.responding), None)
    if node is None:
        return _told("ssh", Level.UNKNOWN, "no node answers Slurm, so none was tried over SSH", "sinfo -R")
    try:
        done = await pool.run(node, ["true"], timeout=settings.ssh.command_timeout_s)
    except SshFailure as error:
        return _told("ssh", Level.PROBLEM, str(error), error.hint or f"ssh {settings.ssh.user}@{node} true")
    if done.rc != 0:
        return _told("ssh", Level.PROBLEM, f"{node}: 'true' ended with exit code {done.rc}", f"ssh {node} true")
    return _told("ssh", Level.OK, f"{settings.ssh.user}@{node} can be reached, and its host key is known")


def report(found: Iterable[Finding]) -> str:
    """Return the findings as text, a line each, with what to do below it."""
    lines = []
    for finding in found:
        level = "PROBLEM" if finding.level is Level.PROBLEM else finding.level.value
        lines.append(f"{level:<9}{finding.section}: {finding.text}")
        lines += [f"{'':9}next: {finding.next}"] if finding.next else []
    return "\n".join(lines)
