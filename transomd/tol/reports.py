"""What launchers say, and what they are told: whose a token is, what of a report can be so, and the answer."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace

from transomd.api.wire import Directive, LauncherReport
from transomd.errors import NotFoundError
from transomd.settings import Settings
from transomd.tol.books import Books
from transomd.tol.directive import ahead, directive
from transomd.tol.docket import Docket, Pace
from transomd.tol.plausible import known_nodes, plausible
from transomd.tol.switches import held_directive
from transomd.tol.view import JobView, World

OVERTAKEN_S = 60.0
"""A report that is older than the last by more was not overtaken on its way: its node's clock was set back."""
TOKEN_OUTLIVES_S = 3600.0
"""How long after its job's end a launcher is still told so; nothing that it reports counts any more."""


class Reports:
    """Takes reports under the loop's lock; everything about their jobs is in ``docket``."""

    def __init__(
        self,
        books: Books,
        docket: Docket,
        clock: Callable[[], float],
        pace: Pace,
        *,
        settings: Callable[[], Settings],
        world: Callable[[], World],
        paused: Callable[[], str],
    ) -> None:
        self._books = books
        self._docket = docket
        self._clock = clock
        self._pace = pace
        self._settings = settings
        self._world = world
        self._paused = paused

    async def job_of(self, token: str, job_id: int | None) -> JobView:
        """Return the job that a launcher's token belongs to; ``job_id`` None: any active one.

        Raises NotFoundError for a job that is not known, PermissionError for a token that is not the job's, or whose
        job has been over for long.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        if job_id is None:
            view = next(
                (v for v in self._docket.views.values() if hmac.compare_digest(digest, v.job.token_sha256)), None
            )
        else:
            view = self._docket.views.get(job_id) or await self._books.db(self._docket.read, job_id)
            if view is None:
                # Not a refusal: a database that was lost or restored must not end what trains.
                raise NotFoundError(f"job {job_id}: this transomd knows no such job", hint="transom status --all")
        if view is None or not hmac.compare_digest(digest, view.job.token_sha256):
            raise PermissionError("no such job, or not its token")
        ended = view.job.finished_at
        if view.state.final and ended is not None and self._clock() - ended > TOKEN_OUTLIVES_S:
            raise PermissionError(f"job {view.job.id} is over, and its token with it")
        return view

    async def take(self, report: LauncherReport) -> Directive:
        """Take what can be true of a report, and answer it."""
        view = self._docket.views.get(report.job_id)
        known = view is not None and not ahead(view, report)
        if view is not None and known and directive(view, report, self._settings()).gate != "refuse":
            await self._hear(view, report)
        view = self._docket.views.get(report.job_id) or await self._books.db(self._docket.read, report.job_id)
        assert view is not None
        answer, paused = directive(view, report, self._settings()), self._paused()
        return held_directive(answer, report, view, paused) if paused else answer

    async def _hear(self, view: JobView, report: LauncherReport) -> None:
        """Take what can be true of a report; nothing of it, before Slurm has said which nodes are the job's."""
        if not known_nodes(view, self._world()):
            self._pace.soon(self._clock())
            return
        self._take(view, plausible(view, report, self._world(), self._clock()))
        await self._docket.settle(report.job_id)

    def _take(self, view: JobView, report: LauncherReport) -> None:
        """Keep a report, unless a newer one of the same launcher has overtaken it."""
        old = view.report
        same = old is not None and (old.attempt, old.generation) == (report.attempt, report.generation)
        newest = old if same and old is not None and 0.0 < old.at - report.at < OVERTAKEN_S else report
        self._docket.views[report.job_id] = replace(view, report=newest, report_at=self._clock())
