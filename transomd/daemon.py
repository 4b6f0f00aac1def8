"""``transomd``: builds the parts and joins them. The only place that knows them all."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from transom_slurm.client import SlurmClient
from transom_slurm.commands import CommandClient, Deadlines
from transom_slurm.pyslurm_client import PyslurmClient, PyslurmUnusable, choose_client
from transom_slurm.pyslurm_process import worker_argv
from transom_sql.engine import open_store
from transom_sql.owner import owner_name
from transom_sql.store import Store, StoreError

from transomd import __version__
from transomd.api.binding import listening
from transomd.api.hooks import HookRoutes
from transomd.api.listen import Server
from transomd.api.server import Api
from transomd.doctor import exit_code
from transomd.errors import SpecError, TransomError
from transomd.launch.ports import free_port
from transomd.log import FORMATS, Inbox, set_up
from transomd.modes import load
from transomd.operations import Operations
from transomd.preflight import examine, report
from transomd.rights import Rights
from transomd.service import notify_systemd
from transomd.settings import Settings
from transomd.tee.catalogue import ready
from transomd.tol.act import Actor
from transomd.tol.loop import Operator
from transomd.tol.manual import Hands
from transomd.tol.nodewatch import NodeWatch
from transomd.tol.observe import Observer
from transomd.tol.reach import Reach
from transomd.words import ExitCode

log = logging.getLogger("transom.daemon")


@contextlib.contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state directory: two daemons on one state would act twice. Raises TransomError."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(state_dir / "lock", "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise TransomError(
            f"opening the state directory {state_dir}: {error.strerror}", hint=f"ls -ld {state_dir}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TransomError(f"another transomd runs on {state_dir}", hint="transom status") from error
    try:
        yield
    finally:
        lock.close()


async def slurm_client(settings: Settings, rights: Rights) -> tuple[SlurmClient, str]:
    """Return the client that the site asked for, and why it is this one. Raises TransomError if it cannot be used."""
    wish = settings.slurm
    commands = CommandClient(rights.run, deadlines=Deadlines(query=wish.query_timeout_s, submit=wish.submit_timeout_s))
    argv = worker_argv(wish.pyslurm_python)
    try:
        client, why = await choose_client(commands, wish.client, argv=argv, deadline_s=wish.query_timeout_s)
    except PyslurmUnusable as error:
        raise TransomError(str(error), hint=error.hint) from None
    log.info("%s", why)
    return client, why


class Daemon:
    """The joined parts of one running daemon; ``config`` is the site file that SIGHUP has read again."""

    def __init__(self, settings: Settings, config: Path | None = None, inbox: Inbox | None = None) -> None:
        self.settings = settings
        self._config = config
        self._inbox = inbox
        self.reload: Callable[[], None] = lambda: None
        self.clock = time.time
        self.rights = Rights(settings, self.clock)
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until told to stop; the death of any part ends all of them."""
        with contextlib.closing(open_store(self.settings.daemon.database_url, owner=owner_name())) as store:
            slurm, why = await slurm_client(self.settings, self.rights)
            try:
                await self._serve(store, slurm, lambda: slurm.why if isinstance(slurm, PyslurmClient) else why)
            finally:
                if isinstance(slurm, PyslurmClient):
                    await slurm.close()

    async def _serve(self, store: Store, client: SlurmClient, why: Callable[[], str]) -> None:
        settings = self.settings
        ops = Operations(settings, self.clock, self._inbox)
        slurm = ops.metered(client)
        port = await self._port()
        url = settings.daemon.launcher_url(port)
        reach = Reach(settings, self.rights, url)
        observer = Observer(slurm, reach, self.clock, changed=lambda: operator.wake())
        actor = Actor(slurm, reach, settings, self.clock)
        operator = Operator(store, observer, actor, settings, self.clock, watcher=ops.watchers)
        reach.cleared_at = operator.clearings.at
        hands = Hands(operator, settings, self.clock, url)
        watch = NodeWatch(operator, settings, self.clock)
        hooks = HookRoutes(watch, settings.hooks_key, self.clock)
        routes = ops.routes(operator, observer, why)
        api = Api(operator, hands, settings, self.clock, hooks, routes)
        server = Server(api, settings)
        parts = (operator, actor, hands, reach, watch, api, routes)
        self.reload = lambda: setattr(self, "settings", ops.reload(self._config, parts))
        try:
            await operator.start()
            await watch.start()
            await server.start(port)
            await ops.start()
            log.info("transomd %s serves %s, launchers at %s", __version__, settings.daemon.socket, url)
            notify_systemd("READY=1")
            await self._until_stopped(operator, ops)
        finally:
            notify_systemd("STOPPING=1")
            await ops.close()
            await server.close()
            await operator.close()
            await self.rights.close()

    async def _port(self) -> int:
        """Choose the launchers' port before anything is told about it: a fixed one, or a free one that is kept."""
        where = self.settings.daemon.listen_address
        if where is None or where[1]:
            return where[1] if where else 0
        kept = Path(self.settings.daemon.state_dir) / "port"
        # Launchers of running jobs know the old port, so a restarted daemon must come back to it.
        with contextlib.suppress(OSError, ValueError):
            return int(kept.read_text())
        with listening("listen", where):
            port = free_port(where[0])
        kept.write_text(str(port))
        return port

    async def _until_stopped(self, operator: Operator, ops: Operations) -> None:
        parts = {
            asyncio.create_task(ops.notifier.run(), name="notifier"),
            asyncio.create_task(operator.run(), name="operator"),
            asyncio.create_task(self.stop.wait(), name="stop"),
        }
        done, left = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for task in done:
            task.result()


async def _amain(daemon: Daemon) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: daemon.reload())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop.set)
    await daemon.run()


def main(argv: list[str] | None = None) -> int:
    """Run the daemon in the foreground; systemd or a shell keeps it."""
    parser = argparse.ArgumentParser(
        prog="transomd", description="The transom daemon. Stop it with SIGTERM; SIGHUP has it read its site file again."
    )
    parser.add_argument("--config", type=Path, help="site file (default: $TRANSOM_CONFIG, /etc/transom/transomd.toml)")
    parser.add_argument("--check", action="store_true", help="look at all that it needs, change nothing, and leave")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    parser.add_argument("--log-format", default="text", choices=FORMATS)
    parser.add_argument("--version", action="version", version=f"transomd {__version__}")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="[db ...]", help="the database: transomd db -h")
    args = parser.parse_args(argv)
    os.umask(0o077)
    if args.words and args.words[0] != "db":
        parser.error(f"unknown word: {args.words[0]}")
    inbox = set_up("ERROR" if args.check else args.log_level, args.log_format)
    try:
        if args.words:
            from transomd.dbtool import run

            return run(args.words[1:], args.config)
        settings = load(args.config)
        if args.check:
            found = asyncio.run(examine(settings))
            print(report(found))
            return int(exit_code(found))
        ready()
        with only_one(Path(settings.daemon.state_dir)):
            asyncio.run(_amain(Daemon(settings, args.config, inbox)))
    except (TransomError, StoreError) as error:
        _tell(error)
        return int(getattr(error, "exit_code", ExitCode.ERROR))
    except OSError as error:
        print(f"transomd: {error}", file=sys.stderr)
        return int(ExitCode.ERROR)
    return int(ExitCode.OK)


def _tell(error: TransomError | StoreError) -> None:
    print(f"transomd: {error}", file=sys.stderr)
    for fault in error.faults if isinstance(error, SpecError) else ():
        print(f"  {fault}", file=sys.stderr)
    if error.hint:
        print(f"  next: {error.hint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
