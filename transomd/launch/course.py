"""What has become of an attempt so far: its launches, its failures, and where it stands. No effects."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from transomd.api.wire import FailureReport, LaunchReport
from transomd.launch.watch import LogWatch
from transomd.words import LauncherPhase

KEPT = 20
"""Earlier launches, and earlier failures, that are told again in every report."""


@dataclass(slots=True)
class Course:
    """What the launcher tells the daemon of its launches; ``changed`` is for what the daemon should hear at once."""

    phase: LauncherPhase = LauncherPhase.GATE
    launches: list[LaunchReport] = field(default_factory=list)
    failure: FailureReport | None = None
    past_failures: list[FailureReport] = field(default_factory=list)
    message: str = ""
    troubles: dict[str, str] = field(default_factory=dict)
    """What keeps this launcher from its work, or from seeing all of the program, by what it is about."""
    exit_code: int | None = None
    past_step: int | None = None
    """The furthest step of the launches before: what is at most as far is done again."""
    changed: bool = True

    @property
    def running(self) -> bool:
        """Whether the program runs, as far as is known."""
        return self.phase is LauncherPhase.RUNNING

    @property
    def newest(self) -> LaunchReport:
        """The newest launch; there must be one."""
        return self.launches[-1]

    @property
    def nodes(self) -> list[str]:
        """The nodes of the newest launch; none before the first."""
        return self.launches[-1].nodes if self.launches else []

    @property
    def furthest_step(self) -> int | None:
        """The furthest step that any launch was seen at."""
        return max((x.last_step for x in self.launches if x.last_step is not None), default=None)

    def is_new(self, epoch: int) -> bool:
        """Whether an order for this epoch was not carried out yet."""
        done = self.launches[-1].epoch if self.launches else 0
        failed = self.failure.epoch if self.failure else 0
        return self.phase is not LauncherPhase.DONE and epoch > max(done, failed)

    def begin(self, launch: LaunchReport, past_step: int | None) -> None:
        """Note a new launch; the failure before it is past."""
        self.past_step = past_step
        self.launches = [*self.launches[-KEPT:], launch]
        if self.failure is not None:
            self.past_failures = [*self.past_failures[-KEPT:], self.failure]
        self.failure, self.message = None, ""
        self.phase, self.changed = LauncherPhase.RUNNING, True

    def note_steps(self, logs: LogWatch) -> None:
        """Note how far the newest launch is; its first step beyond ``past_step`` is told at once."""
        launch = self.newest
        if logs.step is None or logs.step == launch.last_step:
            return
        new_at = launch.new_step_at
        if new_at is None and (self.past_step is None or logs.step > self.past_step):
            new_at = logs.step_at
            self.changed = True
        self.launches[-1] = replace(
            launch,
            first_step=launch.first_step if launch.first_step is not None else logs.first_step,
            first_step_at=launch.first_step_at or logs.first_step_at,
            last_step=logs.step,
            last_step_at=logs.step_at,
            new_step_at=new_at,
        )

    def tell(self, about: str, trouble: str) -> None:
        """Note what is in the way, or that nothing is."""
        self.changed = self.changed or trouble != self.troubles.get(about, "")
        self.troubles[about] = trouble

    def complete(self, now: float) -> None:
        """Note that the program has ended well."""
        self.exit_code, self.phase, self.changed = 0, LauncherPhase.DONE, True
        if self.launches:
            self.launches[-1] = replace(self.newest, ended_at=now, end_reason="completed")

    def fail(self, failure: FailureReport, why: str, now: float) -> None:
        """Note that the newest launch, if this launcher knows of any, has failed."""
        if self.launches:
            self.launches[-1] = replace(self.newest, ended_at=now, end_reason=why)
        self.failure, self.phase, self.message, self.changed = failure, LauncherPhase.FAILED, why, True
