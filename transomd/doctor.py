"""What ``transom doctor`` and ``transomd --check`` say: findings, and what Slurm's settings mean for transom. Pure.

Standard library only: the command imports this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transomd.words import ExitCode, Level

CONFIRM_S = 900
"""For how long a lost node may still be confirmed by Slurm; as in :mod:`transomd.tol.drains`."""
OLDEST, NEWEST = (22, 5), (26, 5)
"""The releases of Slurm that transom knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: what it is, and what to type or change next."""

    section: str
    level: Level
    text: str
    next: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "level": self.level.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Read one; a level that is not known, of a newer daemon, is UNKNOWN."""
        known = {level.value: level for level in Level}
        level = known.get(str(data.get("level")), Level.UNKNOWN)
        return cls(section=str(data["section"]), level=level, text=str(data["text"]), next=str(data.get("next") or ""))


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """UNHEALTHY when there is a problem, else UNKNOWN when something could not be found out, else OK."""
    levels = {finding.level for finding in findings}
    if Level.PROBLEM in levels:
        return ExitCode.UNHEALTHY
    return ExitCode.UNKNOWN if Level.UNKNOWN in levels else ExitCode.OK


def _slurm(level: Level, text: str, next: str = "") -> Finding:
    return Finding(section="slurm", level=level, text=text, next=next)


def slurm_findings(config: Mapping[str, str]) -> list[Finding]:
    """Say what each setting of Slurm (``scontrol show config``) that matters here means for transom."""
    return [finding for look in _LOOKS for finding in look(config)]


def number(config: Mapping[str, str], key: str) -> int | None:
    """Return the leading number of a setting (``300 sec`` is 300); None where it has none."""
    found = re.match(r"\s*(-?\d+)", config.get(key, ""))
    return int(found.group(1)) if found else None


def _set(config: Mapping[str, str], key: str) -> str:
    value = config.get(key, "").strip()
    return "" if value in ("(null)", "(none)", "none", "n/a", "N/A") else value


def _version(config: Mapping[str, str]) -> list[Finding]:
    text = config.get("SLURM_VERSION", "")
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        return [_slurm(Level.UNKNOWN, "the version of Slurm is not told", "scontrol version")]
    release = (int(found.group(1)), int(found.group(2)))
    if not OLDEST <= release <= NEWEST:
        known = f"{OLDEST[0]}.{OLDEST[1]:02d} to {NEWEST[0]}.{NEWEST[1]:02d}"
        return [_slurm(Level.NOTE, f"Slurm {text}: transom is tested with {known}")]
    return [_slurm(Level.OK, f"Slurm {text}")]


def _controllers(config: Mapping[str, str]) -> list[Finding]:
    hosts = [_set(config, f"SlurmctldHost[{n}]") for n in range(8)]
    told = [host for host in hosts if host]
    if len(told) == 1:
        return [_slurm(Level.NOTE, f"one controller, {told[0]}: while it is away transom waits and changes nothing")]
    return [_slurm(Level.OK, f"controllers: {', '.join(told)}")] if told else []


def _accounting(config: Mapping[str, str]) -> list[Finding]:
    kept, age = _set(config, "AccountingStorageType"), number(config, "MinJobAge")
    if kept and not kept.endswith("/none"):
        return [
            _slurm(Level.OK, f"accounting by {kept}: how a job ended can be found later, too"),
            *_job_age(age, True),
        ]
    said = "no accounting: how a job ended is known as long as slurmctld remembers it; transom's own records stay"
    return [_slurm(Level.NOTE, said), *_job_age(age, False)]


def _job_age(age: int | None, accounting: bool) -> list[Finding]:
    if age is None:
        return [_slurm(Level.UNKNOWN, "MinJobAge is not told", "scontrol show config | grep MinJobAge")]
    if age and age < 60 and not accounting:
        said = f"MinJobAge {age} s: a job's end is forgotten before transom may have seen it, and nothing else keeps it"
        return [_slurm(Level.PROBLEM, said, "set MinJobAge=300 in slurm.conf; scontrol reconfigure")]
    return [_slurm(Level.OK, f"MinJobAge {age} s: so long slurmctld remembers how a job ended")]


def _slurmd_timeout(config: Mapping[str, str]) -> list[Finding]:
    limit = number(config, "SlurmdTimeout")
    if limit is None:
        return [_slurm(Level.UNKNOWN, "SlurmdTimeout is not told", "scontrol show config | grep SlurmdTimeout")]
    if limit == 0:
        said = "SlurmdTimeout 0: Slurm never says that a node is lost, so none is drained for it"
        return [_slurm(Level.PROBLEM, said, "set SlurmdTimeout=300 in slurm.conf; scontrol reconfigure")]
    if limit > CONFIRM_S:
        said = (
            f"SlurmdTimeout {limit} s: Slurm says too late that a node is lost; transom drains for {CONFIRM_S} s after"
        )
        return [_slurm(Level.PROBLEM, said, f"set SlurmdTimeout below {CONFIRM_S} in slurm.conf")]
    said = f"SlurmdTimeout {limit} s: then Slurm calls a silent node lost; transom's heartbeats see it in seconds"
    return [_slurm(Level.OK, said)]


def _return(config: Mapping[str, str]) -> list[Finding]:
    said = {
        0: "ReturnToService 0: a node that was lost stays DOWN until a person resumes it",
        1: "ReturnToService 1: a lost node comes back by itself when its slurmd does; transom's drain keeps it out",
        2: "ReturnToService 2: any DOWN node comes back by itself; only a drain keeps a bad one out",
    }.get(number(config, "ReturnToService") or 0, "")
    return [_slurm(Level.NOTE if said.startswith("ReturnToService 2") else Level.OK, said)] if said else []


def _requeue(config: Mapping[str, str]) -> list[Finding]:
    word = "on" if number(config, "JobRequeue") else "off"
    return [_slurm(Level.OK, f"JobRequeue {word}: transom submits with --no-requeue and restarts jobs by itself")]


def _kill_wait(config: Mapping[str, str]) -> list[Finding]:
    wait = number(config, "KillWait")
    if wait is None:
        return []
    if wait < 30:
        said = f"KillWait {wait} s: a checkpoint in memory must reach storage between SIGTERM and SIGKILL"
        return [_slurm(Level.NOTE, said, "set KillWait=30 or more in slurm.conf where checkpoints are large")]
    return [_slurm(Level.OK, f"KillWait {wait} s for the last flush of a checkpoint after SIGTERM")]


def _tracking(config: Mapping[str, str]) -> list[Finding]:
    kind = _set(config, "ProctrackType")
    if kind and "cgroup" not in kind:
        said = (
            f"{kind}: processes can leave Slurm's sight; transom fences by itself, Slurm's own clean-up may miss some"
        )
        return [_slurm(Level.NOTE, said, "proctrack/cgroup in slurm.conf is the safer choice")]
    return [_slurm(Level.OK, kind)] if kind else []


def _hooks(config: Mapping[str, str]) -> list[Finding]:
    found = []
    for key, job in (("Prolog", "before"), ("Epilog", "after")):
        program = _set(config, key) or _set(config, f"{key}[0]")
        if not program:
            said = f"no {key}: nodes are checked {job} transom's jobs only, not {job} every job"
            found.append(_slurm(Level.NOTE, said, "transom hooks install -h"))
        else:
            said = "transom's" if "transom" in program else "not transom's; it may call transom's as well"
            found.append(_slurm(Level.OK, f"{key} {program} ({said})"))
    return found


def _health(config: Mapping[str, str]) -> list[Finding]:
    program = _set(config, "HealthCheckProgram")
    if not program:
        return [_slurm(Level.NOTE, "no HealthCheckProgram: idle nodes are not looked at", "transom hooks install -h")]
    every = number(config, "HealthCheckInterval")
    if not every:
        said = f"HealthCheckProgram {program} is never run: HealthCheckInterval is 0"
        return [_slurm(Level.PROBLEM, said, "set HealthCheckInterval=300 in slurm.conf")]
    return [_slurm(Level.OK, f"HealthCheckProgram {program} every {every} s")]


_LOOKS: tuple[Callable[[Mapping[str, str]], list[Finding]], ...] = (
    _version,
    _controllers,
    _accounting,
    _slurmd_timeout,
    _return,
    _requeue,
    _kill_wait,
    _tracking,
    _hooks,
    _health,
)
