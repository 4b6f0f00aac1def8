"""What stands around the loop: metrics, notices, the watchdog, the daemon's look at itself, and new settings."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from transom_slurm.client import SlurmClient

from transomd import __version__
from transomd.api.ops import MetricsServer, OpsRoutes
from transomd.doctor import Finding
from transomd.errors import SpecError, TransomError
from transomd.log import Inbox
from transomd.metrics import Metrics, metered
from transomd.modes import load, user_name
from transomd.notify import Notifier
from transomd.preflight import command_client, rights
from transomd.reload import reloaded
from transomd.service import Watchdog, notify_systemd, reloading, watchdog_s
from transomd.settings import Settings
from transomd.tol.loop import Operator
from transomd.tol.observe import Observer
from transomd.tol.watchers import Watchers
from transomd.words import IntentState, Level

log = logging.getLogger("transom.operations")


class Settled(Protocol):
    """A part that works by settings, and can go on by others."""

    def use(self, settings: Settings) -> None:
        """Go on with other settings."""


class Operations:
    """Made before the loop, which tells :attr:`watchers`; joined to it afterwards."""

    def __init__(self, settings: Settings, clock: Callable[[], float], inbox: Inbox | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._inbox = inbox
        self._metrics = Metrics(clock)
        self.notifier = Notifier(settings)
        self.watchers = Watchers([self._metrics, self.notifier])
        self._server: MetricsServer | None = None

    def metered(self, client: SlurmClient) -> SlurmClient:
        """Return the client with a clock beside each call."""
        return metered(client, self._metrics.asked)

    def routes(self, operator: Operator, observer: Observer, why: Callable[[], str]) -> OpsRoutes:
        """Join the loop; ``why`` says which client asks Slurm, and why."""

        async def look() -> list[Finding]:
            return await self._look(operator, observer, why())

        async def text() -> bytes:
            pending = await operator.books.db(operator.books.store.intents, states=[IntentState.PENDING.value])
            lost = self._inbox.lost if self._inbox else 0
            return self._metrics.text(
                operator.views(),
                pending,
                operator.switches,
                version=__version__,
                notices=self.notifier.sent,
                log_lost=lost,
            )

        self.watchers.add(Watchdog(lambda: _status(operator)))
        found = OpsRoutes(operator, observer, self._settings, self._clock, look=look, text=text)
        where = self._settings.daemon.metrics_address
        self._server = MetricsServer(found, where) if where else None
        return found

    async def start(self) -> None:
        """Listen for Prometheus, where the site file says so."""
        if self._server is not None:
            await self._server.start()
        self._warn_of_the_watchdog()

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.close()

    def _warn_of_the_watchdog(self) -> None:
        """A cycle may take as long as Slurm's commands; a watchdog that is stricter would end a daemon that is well."""
        wanted = watchdog_s()
        longest = self._settings.daemon.cycle_s + 3 * self._settings.slurm.query_timeout_s
        if wanted is not None and wanted < longest:
            log.warning("WatchdogSec is %.0f s, but a cycle may take %.0f s while Slurm is slow", wanted, longest)

    async def _look(self, operator: Operator, observer: Observer, why: str) -> list[Finding]:
        began = time.monotonic()
        await operator.books.db(operator.books.store.switches)
        took = 1000 * (time.monotonic() - began)
        place = self._settings.daemon.database_url.split("@")[-1]
        found = [Finding(section="daemon", level=Level.OK, text=f"the database {place} answers in {took:.0f} ms")]
        found.append(Finding(section="daemon", level=Level.OK, text=why))
        return [*found, *await rights(command_client(self._settings)), await _ssh(operator, observer)]

    def reload(self, config: Path | None, parts: Sequence[Settled]) -> Settings:
        """Read the site file again, all or nothing; return the settings that hold now."""
        reloading()
        try:
            found = reloaded(self._settings, load(config))
        except TransomError as error:
            faults = "".join(f"\n  {fault}" for fault in (error.faults if isinstance(error, SpecError) else ()))
            log.error("the site file was not taken, and the settings are as they were: %s%s", error, faults)
        else:
            self._settings = found.settings
            for part in (*parts, self.notifier):
                part.use(found.settings)
            log.info("%s", found.sentence)
        notify_systemd("READY=1")
        return self._settings


async def _ssh(operator: Operator, observer: Observer) -> Finding:
    """Probe one node that Slurm hears."""
    nodes = operator.world().slurm.nodes or {}
    name = next((node.name for node in nodes.values() if node.status.responding), None)
    if name is None:
        said = "no node answers Slurm, so none was tried over SSH"
        return Finding(section="rights", level=Level.UNKNOWN, text=said, next="sinfo -R")
    report = (await observer.check([name]))[name]
    if report.reached:
        said = f"{name} can be probed over SSH, and its host key is known"
        return Finding(section="rights", level=Level.OK, text=said)
    hint = f"time ssh {name} true, as {user_name(os.geteuid())}: it must end at once, asking for nothing"
    return Finding(section="rights", level=Level.PROBLEM, text=report.error, next=hint)


def _status(operator: Operator) -> str:
    """One line for ``systemctl status``."""
    slurm = operator.world().slurm
    told = [f"{len(operator.views())} active jobs"]
    told += [f"Slurm does not answer: {slurm.error}"] if slurm.error else []
    told += [operator.paused] if operator.paused else []
    return " ".join("; ".join(told).split())
