"""The daemon's deputy in a launcher: while the daemon is silent, it does what the last grant allows and no more."""

from __future__ import annotations

import json
import logging
import math
import time

from transomd.api.wire import Directive, Grant, LaunchOrder
from transomd.health.profile import Profile
from transomd.launch import alone
from transomd.launch.agents import Agents
from transomd.launch.claims import Claims
from transomd.launch.course import Course
from transomd.launch.folder import CheckpointFolder
from transomd.launch.options import Watch
from transomd.launch.runs import Runs
from transomd.spec import JobSpec
from transomd.words import LauncherPhase

log = logging.getLogger("transom.launcher")

PROBE_S = 12.0
ABSENT_S = 10.0
"""A daemon that is started anew is away for seconds: no restart on the grant before, however short its time-outs."""
AGAIN_S = 5.0
"""How soon a start is tried again that came to nothing; the grant is not spent by it."""


class Deputy:
    """Opens the gate and restarts the program where the daemon does not.

    ``barred`` are the nodes that the daemon has left out, ``unfit`` those that were found so since, and why.
    """

    def __init__(
        self,
        spec: JobSpec,
        watch: Watch,
        agents: Agents,
        folder: CheckpointFolder,
        course: Course,
        claims: Claims,
        runs: Runs,
    ) -> None:
        self._spec = spec
        self._watch = watch
        self._agents = agents
        self._folder = folder
        self._course = course
        self._claims = claims
        self._runs = runs
        self._grant: Grant | None = None
        self._granted_at = 0.0
        self._restarts_left = 0
        self._not_before = 0.0
        self.barred: set[str] = set()
        self.unfit: dict[str, str] = {}

    def told(self, directive: Directive) -> None:
        """Take note of what the daemon allows."""
        self.barred = set(directive.barred)
        if directive.grant is not None:
            # The daemon has heard by now of every restart that was made on an older grant, and counted it.
            self._grant, self._restarts_left = directive.grant, directive.grant.restarts
            self._granted_at = time.monotonic()

    async def act(self, silent_s: float) -> None:
        """Do what is allowed, now that the daemon has been silent for so long."""
        if time.monotonic() < self._not_before:
            return
        phase = self._course.phase
        if phase is LauncherPhase.GATE and silent_s > self._watch.gate_timeout_s:
            log.info("transomd has been silent for %.0f s; opening the gate", silent_s)
            await self._launch()
        elif phase is LauncherPhase.FAILED and silent_s > self._patience_s() and self._may_restart():
            log.info("transomd has been silent for %.0f s; restarting on the grant", silent_s)
            if await self._launch():
                self._restarts_left -= 1

    def _patience_s(self) -> float:
        return max(self._watch.heartbeat_timeout_s, ABSENT_S)

    def _may_restart(self) -> bool:
        age_s = time.monotonic() - self._granted_at
        return alone.may_restart(self._grant, age_s, self._restarts_left, self._course.failure)

    async def _launch(self) -> bool:
        """Start the program, if there are nodes for it; return whether it was."""
        self._not_before = time.monotonic() + AGAIN_S
        try:
            if await self._claims.taken_over_by():
                log.error("another launcher has taken over; nothing is started without transomd any more")
                self._not_before = math.inf
                return False
            epoch, back = await self._newest()
        except OSError as error:
            self._course.tell("folder", f"the run folder cannot be read: {error}")
            return False
        usable = await self._not_unfit([n for n in self._agents.alive() if n not in self.barred])
        chosen = alone.choose(usable, self._course.nodes, self._spec.nodes)
        if chosen is None:
            return False
        past = self._course.furthest_step
        launched = await self._runs.launch(LaunchOrder(epoch=epoch + 1, nodes=chosen, past_step=past, resume_step=back))
        self._not_before = 0.0 if launched else self._not_before
        return launched

    async def _newest(self) -> tuple[int, int | None]:
        """Return the newest epoch, and the step to which it was to go back, where that still holds."""
        epoch, claim = await self._claims.newest()
        return epoch, alone.still_back(claim.get("resume_step"), epoch, self._folder.listed)

    async def _not_unfit(self, nodes: list[str]) -> list[str]:
        profile = Profile()
        request = json.loads(profile.request(PROBE_S - 4))
        facts = await self._agents.hub.ask_all(nodes, "probe", PROBE_S, options=request)
        told = {n: why for n, why in self.unfit.items() if n not in facts or not isinstance(facts[n], dict)}
        self.unfit = {**told, **alone.unfit(facts, self._spec.gpus_per_node or None, time.time(), profile)}
        for node, why in self.unfit.items():
            log.warning("%s is unfit: %s", node, why)
        return [n for n in nodes if n not in self.unfit]
