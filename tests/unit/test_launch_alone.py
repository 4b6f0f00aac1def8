"""A launcher takes a daemon for absent only when it was asked and did not answer, and for long enough."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from transomd.api.wire import Directive, FailureReport, Grant, LauncherReport, LaunchOrder, LaunchReport
from transomd.launch.daemon_link import DaemonLink
from transomd.launch.deputy import ABSENT_S
from transomd.launch.launcher import ASK_AGAIN_S, Launcher
from transomd.launch.options import Options, Watch
from transomd.launch.rundir import RunDir
from transomd.spec import JobSpec
from transomd.words import LauncherPhase

REPORT = LauncherReport(
    job_id=1, attempt=1, slurm_job_id=7, generation=1, host="n1", phase=LauncherPhase.RUNNING.value, at=1.0
)


@dataclass
class Daemon:
    """A real HTTP server that answers every report, or none while ``away``."""

    directive: Directive = field(default_factory=lambda: Directive(gate="hold"))
    away: bool = False
    foreign: tuple[int, bytes] | None = None
    url: str = ""
    asked: int = 0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    told = Daemon()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            told.asked += 1
            status, body = 503 if told.away else 200, b"{}"
            if told.foreign is not None:
                status, body = told.foreign
            elif not told.away:
                body = json.dumps(told.directive.to_json()).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}"
    yield told
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


async def test_silence_is_counted_from_the_first_report_that_was_not_answered(daemon: Daemon) -> None:
    clock = Clock()
    link = DaemonLink(daemon.url, "t", clock)
    assert await link.report(REPORT) is not None
    clock.now += 500
    assert link.silent_for() == 0.0, "who says nothing gets no answer"
    daemon.away = True
    assert await link.report(REPORT) is None
    clock.now += 3
    await link.report(REPORT)
    clock.now += 4
    assert link.silent_for() == 7.0
    daemon.away = False
    await link.report(REPORT)
    clock.now += 9
    assert link.silent_for() == 0.0


async def test_a_report_that_fails_late_says_nothing_of_a_daemon_that_answered_meanwhile(daemon: Daemon) -> None:
    clock = Clock()
    link = DaemonLink(daemon.url, "t", clock)

    def late(job_id: int, body: bytes) -> Directive:
        clock.now += 10
        link._heard_at = clock.now
        raise OSError("timed out")

    link._post = late  # type: ignore[method-assign]
    await link.report(REPORT)
    clock.now += 60
    assert link.silent_for() == 0.0


def launcher(tmp_path: Path, daemon: Daemon, clock: Clock, watch: Watch) -> tuple[Launcher, list[LaunchOrder]]:
    (tmp_path / "token").write_text("secret")
    options = Options(
        run_dir=RunDir(tmp_path), job_id=1, attempt=1, generation=1, slurm_job_id=7, nodes=("n1", "n2"), host="n1"
    )
    spec = JobSpec(name="t", command="true", nodes=2, workdir="/", checkpoint={"dir": str(tmp_path / "ck")})
    made = Launcher(options, DaemonLink(daemon.url, "t", clock), spec, watch)
    launched: list[LaunchOrder] = []

    async def launch(order: LaunchOrder) -> bool:
        launched.append(order)
        return True

    async def fit(nodes: list[str]) -> list[str]:
        return nodes

    made.runs.launch = launch  # type: ignore[method-assign]
    made.deputy._not_unfit = fit  # type: ignore[method-assign]
    made.agents.hub._heard = dict.fromkeys(options.nodes, time.monotonic() + 60)
    made.deputy.told(Directive(gate="open", grant=Grant(restarts=1, for_s=600)))
    made.course.phase = LauncherPhase.FAILED
    made.course.failure = FailureReport(epoch=1, detected_at=1.0, detected_by="exit")
    return made, launched


async def test_short_time_outs_do_not_make_a_daemon_that_is_started_anew_absent(tmp_path: Path, daemon: Daemon) -> None:
    clock = Clock()
    made, launched = launcher(tmp_path, daemon, clock, Watch(heartbeat_timeout_s=0.5, report_s=60))
    daemon.away = True
    await made._report_if_due()
    clock.now += ABSENT_S - 1
    await made.deputy.act(made.link.silent_for())
    assert launched == []
    clock.now += 2
    await made.deputy.act(made.link.silent_for())
    assert [order.epoch for order in launched] == [1]


async def test_a_launcher_that_waits_for_an_absent_daemon_asks_again_soon(tmp_path: Path, daemon: Daemon) -> None:
    clock = Clock()
    made, _ = launcher(tmp_path, daemon, clock, Watch(report_s=60))
    made._poll_s, daemon.away = 60.0, True
    await made._report_if_due()
    clock.now += 1
    await made._report_if_due()
    assert daemon.asked == 1, "not at once"
    made._reported_at -= ASK_AGAIN_S
    daemon.away = False
    assert await made._report_if_due() is not None


async def test_a_renewed_grant_allows_restarts_again(tmp_path: Path, daemon: Daemon) -> None:
    made, _ = launcher(tmp_path, daemon, Clock(), Watch())
    made.course.phase, made.deputy._restarts_left = LauncherPhase.RUNNING, 0
    made.course.launches = [LaunchReport(epoch=1, nodes=["n1", "n2"], started_at=1.0)]
    await made._obey(Directive(gate="open", grant=Grant(restarts=1, for_s=600)))
    assert made.deputy._restarts_left == 1


async def test_a_grant_lasts_as_long_as_it_was_given_for_whatever_the_time_of_day(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, launched = launcher(tmp_path, daemon, clock := Clock(), Watch(report_s=60))
    daemon.away = True
    await made._report_if_due()
    clock.now += 100
    real = time.time
    for ahead in (-5 * 3600.0, 5 * 3600.0):
        monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
        made.deputy._restarts_left = 1
        await made.deputy.act(made.link.silent_for())
    assert len(launched) == 2
    made.deputy._restarts_left, made.deputy._granted_at = 1, time.monotonic() - 601
    await made.deputy.act(made.link.silent_for())
    assert len(launched) == 2, "it is over"


async def test_a_restart_for_which_there_are_no_nodes_spends_nothing_of_the_grant(
    tmp_path: Path, daemon: Daemon
) -> None:
    made, launched = launcher(tmp_path, daemon, clock := Clock(), Watch(report_s=60))
    daemon.away = True
    await made._report_if_due()
    clock.now += 100
    made.agents.hub._heard = {"n1": time.monotonic() + 60}
    await made.deputy.act(made.link.silent_for())
    assert (launched, made.deputy._restarts_left) == ([], 1)
    made.agents.hub._heard = dict.fromkeys(("n1", "n2"), time.monotonic() + 60)
    await made.deputy.act(made.link.silent_for())
    assert launched == [], "not at once"
    made.deputy._not_before = 0.0
    await made.deputy.act(made.link.silent_for())
    assert (len(launched), made.deputy._restarts_left) == (1, 0)


def test_progress_is_measured_by_a_clock_that_nobody_sets(tmp_path: Path, daemon: Daemon) -> None:
    made, _ = launcher(tmp_path, daemon, Clock(), Watch(stall_after_s=5, first_step_after_s=10))
    progress = made.runs._progress(100.0)
    assert progress.stalled(109.0) is None
    assert progress.stalled(111.0) is not None


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"[]"),
        (200, b"{}"),
        (200, b'{"gate": "hold", "grant": 5}'),
        (403, b'{"detail": "no"}'),
        (403, b"[]"),
        (403, b'{"error": {"code": 403, "message": "Permission denied", "status": "PERMISSION_DENIED"}}'),
        (403, b'{"error": {"code": 4, "message": "by chance"}}'),
        (403, b'{"error": "Forbidden"}'),
    ],
)
async def test_what_is_not_transomds_answer_is_none(daemon: Daemon, answer: tuple[int, bytes]) -> None:
    daemon.foreign = answer
    assert await DaemonLink(daemon.url, "t").report(REPORT) is None
