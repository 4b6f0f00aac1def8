"""``transomd.toml``: what a site decides. Every fault is told at once; docs/operate.md describes the fields.

Durations are seconds, as a number or as text (``90``, ``"10m"``).
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from transomd.errors import NotFoundError, SpecError, UsageError
from transomd.faults import faults_of
from transomd.fields import Check, Duration, Line, Part, PositiveDuration, Text, Word
from transomd.health.profile import Profile
from transomd.places import SITE_CONFIG, SITE_SOCKET, SITE_STATE
from transomd.words import CheckMode
from transomd.yamldoc import Path as Keys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

DEFAULT_PATH = SITE_CONFIG
ENV_PATH = "TRANSOM_CONFIG"

_SECTION = re.compile(r"\s*\[\s*([A-Za-z0-9_.-]+)\s*\]")
_KEY = re.compile(r"\s*\"?([A-Za-z0-9_.-]+)\"?\s*=")
_TOML_LINE = re.compile(r"\(at line (\d+), column (\d+)\)")


def _listen(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if value and not (colon and port.isascii() and port.isdigit() and int(port) < 65536 and " " not in host):
        raise ValueError(f"must be host:port, :port or empty, got {value!r}")
    return value


def _url(value: str) -> str:
    if value and not re.fullmatch(r"http://[^\s/]+", value):
        raise ValueError(f"must be a URL such as http://head:7077, got {value!r}")
    return value


def _absolute(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError(f"must be an absolute path, got {value!r}")
    return value


Absolute = Annotated[Line, AfterValidator(_absolute)]


def _address(value: str) -> tuple[str, int] | None:
    host, _, port = value.rpartition(":")
    return (host.strip("[]"), int(port)) if value else None


class DaemonSettings(Part):
    """The daemon itself. ``listen``: where launchers reach it over TCP (port 0: a free one; empty: nowhere).

    ``metrics``: where Prometheus may read /metrics over TCP, without authentication (empty: nowhere).
    """

    mode: Literal["auto", "site", "personal"] = "auto"
    socket: Absolute = SITE_SOCKET
    listen: Annotated[str, AfterValidator(_listen)] = ":7077"
    advertise: Annotated[str, AfterValidator(_url)] = ""
    metrics: Annotated[str, AfterValidator(_listen)] = ""
    state_dir: Absolute = SITE_STATE
    database: Line = ""
    cycle_s: PositiveDuration = 5.0
    python: Absolute = sys.executable
    cluster: Word = ""
    admins: tuple[Word, ...] = ("root",)

    @property
    def database_url(self) -> str:
        """The SQLAlchemy URL of the database: ``database``, else SQLite in ``state_dir``."""
        return self.database or f"sqlite:///{self.state_dir}/transom.db"

    @property
    def listen_address(self) -> tuple[str, int] | None:
        """Host (empty: every address) and port of ``listen``; None when nothing is listened on."""
        return _address(self.listen)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host (empty: every address) and port of ``metrics``; None when nothing is listened on."""
        return _address(self.metrics)

    def launcher_url(self, port: int) -> str:
        """Return the URL that launchers use, when the daemon listens on ``port``: its address, if that is one."""
        host = self.listen_address[0] if self.listen_address else ""
        if host in ("", "0.0.0.0", "::"):
            host = socket.getfqdn()
        return self.advertise or f"http://{f'[{host}]' if ':' in host else host}:{port}"


class SlurmSettings(Part):
    """Who asks Slurm, and the deadlines. ``auto``: pyslurm where it imports and matches Slurm, else Slurm's commands.

    ``pyslurm_python`` is the interpreter that has pyslurm; empty: the daemon's own.
    """

    client: Literal["auto", "commands", "pyslurm"] = "auto"
    pyslurm_python: Absolute = ""
    query_timeout_s: PositiveDuration = 20.0
    submit_timeout_s: PositiveDuration = 60.0


class SshSettings(Part):
    """How nodes are reached: account, key, known hosts and OpenSSH client configuration (empty: that user's own)."""

    user: Word = "root"
    key: Absolute = ""
    known_hosts: Absolute = ""
    config: Absolute = ""
    connect_timeout_s: PositiveDuration = 5.0
    command_timeout_s: PositiveDuration = 20.0
    fanout: int = Field(default=32, ge=1, le=1024)


class HealthSettings(Part):
    """Which checks do what, how often nodes of running jobs are probed (0: never), and the checks' limits.

    ``min_disk_free`` is a fraction of the space (and inodes) of each local file system.
    """

    modes: dict[Check, CheckMode] = Field(default_factory=dict)
    interval_s: Duration = 60.0
    gate_timeout_s: PositiveDuration = 120.0
    probe_timeout_s: PositiveDuration = 10.0
    collective_timeout_s: PositiveDuration = 60.0
    min_disk_free: float = Field(default=0.02, ge=0, lt=1)
    mounts: tuple[Absolute, ...] = ()
    max_clock_offset_s: PositiveDuration = 2.0

    def profile(self) -> Profile:
        """Return the limits for the checks. Raises SpecError with every fault."""
        return Profile(
            modes=self.modes,
            mounts=self.mounts,
            clock_offset_max=self.max_clock_offset_s,
            disk_free_min=self.min_disk_free,
        )

    def mode(self, check: str) -> CheckMode:
        """Return what an unfit result of ``check`` may do; ``observe`` where the site says nothing."""
        return self.modes.get(check, CheckMode.OBSERVE)


class WatchSettings(Part):
    """How often launchers report and ranks beat, and how long silence lasts before it means something."""

    report_s: PositiveDuration = 30.0
    heartbeat_s: PositiveDuration = 1.0
    heartbeat_timeout_s: PositiveDuration = 15.0
    launcher_silence_s: PositiveDuration = 90.0
    launcher_start_s: PositiveDuration = 300.0
    stall_after_s: PositiveDuration = 600.0
    first_step_after_s: PositiveDuration = 1800.0
    exit_grace_s: PositiveDuration = 5.0


class DrainSettings(Part):
    """The guards around draining. ``kill_switch``: a file that, while it exists, stops every drain (read live).

    ``node_loss`` is the mode for a node that Slurm itself confirms lost. ``max_fraction`` of all nodes may be drained
    by transom at once, but always one.
    """

    enabled: bool = True
    node_loss: CheckMode = CheckMode.OBSERVE
    per_hour: int = Field(default=4, ge=0)
    per_incident: int = Field(default=2, ge=0)
    max_fraction: float = Field(default=0.1, ge=0, le=1)
    kill_switch: Absolute = ""


class HooksSettings(Part):
    """The prolog, epilog and health check of the nodes. ``key``: the secret that they share with transomd.

    ``enforce``: a prolog may fail, and Slurm so drain the node, where a check in mode drain found it unfit and the
    drain budget has room.
    """

    enforce: bool = False
    key: Absolute = ""


class PolicySettings(Part):
    """The site's ceilings over every job's own policy, and what a launcher may do while the daemon is away.

    ``max_jobs``: how many jobs that are not over one user may have, administrators apart.
    """

    max_restarts: int = Field(default=100, ge=0)
    max_user_restarts: int = Field(default=10, ge=0)
    max_attempts: int = Field(default=50, ge=1)
    no_progress_limit: int = Field(default=10, ge=1)
    max_jobs: int = Field(default=200, ge=1)
    grant_restarts: int = Field(default=2, ge=0)
    grant_s: Duration = 600.0


class NotifySettings(Part):
    """A shell command that is run when a person should look; empty: none.

    ``timeout_s``: how long it may take. ``slurm_silent_s``: after how long without an answer of Slurm it is run.
    """

    command: Text = ""
    timeout_s: PositiveDuration = 30.0
    slurm_silent_s: PositiveDuration = 600.0


class Settings(Part):
    """The whole site file; a section that is not there has its defaults."""

    daemon: DaemonSettings = DaemonSettings()
    slurm: SlurmSettings = SlurmSettings()
    ssh: SshSettings = SshSettings()
    health: HealthSettings = HealthSettings()
    watch: WatchSettings = WatchSettings()
    drain: DrainSettings = DrainSettings()
    hooks: HooksSettings = HooksSettings()
    policy: PolicySettings = PolicySettings()
    notify: NotifySettings = NotifySettings()

    @property
    def personal(self) -> bool:
        """Whether the daemon serves the user it runs as, with no other rights (:mod:`transomd.modes`)."""
        return self.daemon.mode == "personal"

    @property
    def hooks_key(self) -> Path:
        """The file that holds the hooks' key: ``hooks.key``, else one in ``state_dir``."""
        return Path(self.hooks.key or f"{self.daemon.state_dir}/hooks.key")


def load_settings(path: Path | None = None, env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of ``path``, else of ``$TRANSOM_CONFIG``, else of /etc/transom/transomd.toml if there is one.

    Raises SpecError with every fault, NotFoundError when a file that was named is not there, UsageError where it cannot
    be read.
    """
    named = path or Path(env.get(ENV_PATH) or DEFAULT_PATH)
    try:
        return parse_settings(_read(named), label=str(named))
    except NotFoundError:
        if path is None and named == DEFAULT_PATH:
            return Settings()
        raise


def parse_settings(text: str, *, label: str = "transomd.toml") -> Settings:
    """Return the settings of TOML text. Raises SpecError with every fault, each ``label:line: section.field: ...``."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _spec_error(label, [_syntax(str(error), label)]) from None
    lines = _lines(text)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        faults = sorted(faults_of(error, Settings, lambda keys: _line(lines, keys)), key=lambda fault: fault.line)
        raise _spec_error(label, [fault.text(label) for fault in faults]) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"create it, or name another by --config or ${ENV_PATH}"
        raise NotFoundError(f"reading the settings {path}: there is no such file", hint=hint) from None
    except OSError as error:
        raise UsageError(f"reading the settings {path}: {error.strerror}", hint=f"ls -l {path}") from None
    except UnicodeDecodeError:
        raise UsageError(f"reading the settings {path}: it is not UTF-8 text", hint=f"file {path}") from None


def _syntax(message: str, label: str) -> str:
    found = _TOML_LINE.search(message)
    if found is None:
        return f"{label}: is not TOML: {message}"
    what = _TOML_LINE.sub("", message).strip()
    return f"{label}:{found.group(1)}: is not TOML: {what} (column {found.group(2)})"


def _lines(text: str) -> dict[Keys, int]:
    """Return the line of each section and key as far as they are written in the plain way; tomllib tells none."""
    lines: dict[Keys, int] = {}
    section: Keys = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _SECTION.match(line):
            section = tuple(found.group(1).split("."))
            lines.setdefault(section, number)
        elif found := _KEY.match(line):
            lines.setdefault((*section, *found.group(1).split(".")), number)
    return lines


def _line(lines: Mapping[Keys, int], keys: Keys) -> int:
    return next((lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in lines), 0)


def _spec_error(label: str, faults: Sequence[str]) -> SpecError:
    number = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return SpecError(f"{label}: {number}", tuple(faults), hint="correct it; docs/operate.md describes the fields")
