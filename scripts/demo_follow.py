"""Following one job as any user can: the daemon's API, and the job's own log in its run folder."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transom_cli.ask import finished
from transom_cli.tail import LogFile, Tail, log_files

from transomd.api.client import Client
from transomd.errors import TransomError, UnreachableError

Json = dict[str, Any]

POLL_S = 0.25
RATE_OVER_S = 4.0
_STEP = re.compile(r"step (?P<step>\d+) loss (?P<loss>\S+) loss_hex (?P<hex>\S+) time (?P<time>[\d.]+)s")
_RESUMED = re.compile(r"transom\.tce: resumed from (step \d+) of epoch \d+: (.+)")
_SAVED = re.compile(r"transom\.tce: step (\d+) of epoch \d+ is complete")


@dataclass(frozen=True, slots=True)
class Step:
    """One line of rank 0: a step that was done, with the bits of its loss; ``at`` is when it ended (Unix seconds)."""

    epoch: int
    step: int
    loss: float
    loss_hex: str
    took_s: float
    at: float


@dataclass(slots=True)
class Seen:
    """What is known about a job now. ``cut`` is what the person at the power switch did, and when."""

    total: int
    detail: Json = field(default_factory=dict)
    nodes: list[Json] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    saved: int = 0
    resumed: str = ""
    cut: str = ""
    cut_at: float | None = None

    @property
    def job(self) -> Json:
        """The job itself."""
        found: Json = self.detail.get("job") or {}
        return found

    @property
    def step(self) -> int:
        """The step that was done last."""
        return self.steps[-1].step if self.steps else 0

    @property
    def furthest(self) -> int:
        """The furthest step that was ever done."""
        return max((step.step for step in self.steps), default=0)

    @property
    def checkpoint(self) -> int:
        """The step of the newest complete checkpoint, by the log or by transom; 0 without one."""
        return max(self.saved, int((self.job.get("checkpoint") or {}).get("step") or 0))

    def rate(self, now: float) -> float:
        """Steps per second over the last seconds."""
        return sum(1 for step in self.steps if step.at > now - RATE_OVER_S) / RATE_OVER_S

    def losses(self) -> dict[int, set[str]]:
        """The bits of the loss of each step; more than one where a step that was computed twice differs."""
        found: dict[int, set[str]] = {}
        for step in self.steps:
            found.setdefault(step.step, set()).add(step.loss_hex)
        return found

    def agreement(self) -> tuple[int, int]:
        """How many steps have the expected loss to the bit, and how many were looked at."""
        found = self.losses()
        return sum(1 for step, bits in found.items() if bits == {self.expected.get(step)}), len(found)


class Follower:
    """Keeps one :class:`Seen` up to date."""

    def __init__(self, client: Client, job_id: int, seen: Seen, check: Callable[[], None]) -> None:
        self.job_id = job_id
        self.seen = seen
        self._client = client
        self._check = check
        self._after = 0
        self._tails: dict[LogFile, Tail] = {}

    def poll(self) -> list[Json]:
        """Wait a moment for news, look at everything, and return the job's new events. The follower's only clock."""
        try:
            answer = self._client.get("/v1/events", job=self.job_id, after=self._after, wait=POLL_S)
            self.seen.detail = self._client.get(f"/v1/jobs/{self.job_id}")
            self.seen.nodes = self._client.get("/v1/nodes")["nodes"]
        except UnreachableError:
            self._check()
            time.sleep(POLL_S)
            return []
        self._after = max(self._after, int(answer.get("last") or 0))
        self._read_log()
        events: list[Json] = answer["events"]
        return events

    def _read_log(self) -> None:
        try:
            files = log_files(Path(str(self.seen.job["run_dir"])), rank=0)
        except TransomError:
            return
        for file in files:
            lines = list(self._tails.setdefault(file, Tail(file.path)).lines())
            done = [found for line in lines if (found := _STEP.search(line))]
            self.seen.steps += _steps(file.epoch, done, time.time())
            self.seen.resumed = next((f"{x[1]}: {x[2]}" for x in map(_RESUMED.search, lines) if x), self.seen.resumed)
            self.seen.saved = max(
                [self.seen.saved, *(int(found[1]) for line in lines if (found := _SAVED.search(line)))]
            )

    @property
    def ended(self) -> bool:
        """Whether the job has come to its end."""
        return finished(self.seen.job)


def _steps(epoch: int, lines: Sequence[re.Match[str]], now: float) -> list[Step]:
    """The steps of lines that were read together: the last one ended just now, and each before the next began."""
    steps: list[Step] = []
    for line in reversed(lines):
        took = float(line["time"])
        steps.insert(0, Step(epoch, int(line["step"]), float(line["loss"]), line["hex"], took, now))
        now -= took
    return steps
