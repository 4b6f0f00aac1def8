"""``job.yaml``: what a user asks for. Every fault is told at once, with its line; fields: docs/job-yaml.md."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from transom_slurm.batch import check_user_options

from transomd.errors import NotFoundError, SpecError, UsageError
from transomd.faults import faults_of
from transomd.fields import (
    Checks,
    Environment,
    Every,
    Line,
    Lines,
    Name,
    Options,
    Part,
    Pattern,
    PositiveDuration,
    Rate,
    Steps,
    StepsOrAuto,
    Text,
    TimeLimit,
    Word,
)
from transomd.forms import time_limit_seconds
from transomd.script import ScriptFaults, merge, read_options
from transomd.yamldoc import Document, Fault, read_yaml

MAX_BYTES = 1 << 20
"""Size of the largest job.yaml that is read."""

_LABEL = "job.yaml"
_HINT = "correct it and submit again; docs/job-yaml.md describes the fields"
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


class CheckpointSpec(Part):
    """Where checkpoints go, how many complete ones are kept, and how often the program says it saves (shown only).

    ``storage_every``: of the steps that are saved, those that it divides go to storage; None: as the program says;
    ``auto``: by measure and by ``node_mttf``, the seconds between two failures of a node (None: built in).
    ``replica_every``: those that it divides are copied to another node; None: as the program says.
    ``storage_rate`` and ``replica_rate``: bytes per second that each node writes to storage and sends to its partner.
    """

    dir: Line = ""
    keep: int = Field(default=3, ge=1)
    every: Every = None
    storage_every: StepsOrAuto = None
    node_mttf: PositiveDuration | None = None
    replica_every: Steps = None
    storage_rate: Rate | None = None
    replica_rate: Rate | None = None


class HealthSpec(Part):
    """Which checks the gate makes. ``skip`` names single checks of the probe."""

    probe: bool = True
    collective: bool = True
    skip: Checks = ()


class WatchSpec(Part):
    """How progress is seen, and after how many seconds without it the program counts as hung; None: the site's value.

    ``progress`` is a regular expression whose group ``step`` (else its first) is the step's number; empty: built in.
    """

    progress: Pattern = ""
    stall_after: PositiveDuration | None = None
    first_step_after: PositiveDuration | None = None
    heartbeat_timeout: PositiveDuration | None = None


class PolicySpec(Part):
    """How often transom tries again: for faults of the cluster, of the program, in attempts, and without a new step.

    ``rollback_after``: launches that fail from one checkpoint before they have a newer one; then an older is tried.
    """

    max_restarts: int = Field(default=20, ge=0)
    max_user_restarts: int = Field(default=0, ge=0)
    max_attempts: int = Field(default=10, ge=1)
    no_progress_limit: int = Field(default=3, ge=1)
    rollback_after: int = Field(default=2, ge=1)


class JobSpec(Part):
    """One job. ``workdir``, ``script`` and ``checkpoint.dir`` are absolute after :meth:`resolve`."""

    name: Name
    command: Text = ""
    script: Line = ""
    launcher: Literal["srun", "torchrun"] = "srun"
    nodes: int = Field(ge=1)
    spares: int = Field(default=0, ge=0)
    gpus_per_node: int = Field(default=0, ge=0)
    tasks_per_node: int = Field(default=0, ge=1)
    partition: Word = ""
    account: Word = ""
    qos: Word = ""
    time_limit: TimeLimit = ""
    sbatch: Options = ()
    workdir: Line = ""
    env: Environment = Field(default_factory=dict)
    setup: Lines = ()
    checkpoint: CheckpointSpec = CheckpointSpec()
    health: HealthSpec = HealthSpec()
    watch: WatchSpec = WatchSpec()
    policy: PolicySpec = PolicySpec()

    @model_validator(mode="after")
    def _whole(self) -> JobSpec:
        given = {"command": self.command, "script": self.script, "launcher": self.launcher}
        faults = [f"{key}: {message}" for key, message in _program_faults(given)]
        faults += [f"sbatch: {fault}" for fault in _option_faults(self.sbatch)]
        if faults:
            raise ValueError("; ".join(faults))
        if not self.tasks_per_node:
            # The model is frozen for everybody else; a default that follows another field is set once, here.
            object.__setattr__(self, "tasks_per_node", max(1, self.gpus_per_node))
        return self

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds; None when it is unlimited or the partition's own."""
        return time_limit_seconds(self.time_limit) if self.time_limit else None

    @property
    def total_nodes(self) -> int:
        """The nodes asked of Slurm: those that train, and the spares."""
        return self.nodes + self.spares

    @classmethod
    def from_stored(cls, data: Mapping[str, Any]) -> JobSpec:
        """Read what ``model_dump(mode="json")`` wrote. Raises SpecError with every fault when it is no job."""
        spec, wrong = _build(Document(values=dict(data)))
        if spec is None:
            raise _spec_error("the job", [fault.text("job") for fault in wrong])
        return spec

    def resolve(self, cwd: Path, env: Mapping[str, str] = os.environ) -> JobSpec:
        """Return the job with absolute paths, ``~`` and ``$NAME`` in them replaced from ``env``; call it as the user.

        A relative ``workdir`` or ``script`` counts from ``cwd``, ``checkpoint.dir`` from ``workdir``. Raises SpecError
        when a variable is not set.
        """
        faults: list[str] = []
        workdir = _absolute("workdir", self.workdir, cwd, env, faults)
        folder = self.checkpoint.dir or f"checkpoints/{self.name}"
        folder = _absolute("checkpoint.dir", folder, Path(workdir), env, faults)
        script = _absolute("script", self.script, cwd, env, faults) if self.script else ""
        if faults:
            raise _spec_error("the job's paths", faults)
        checkpoint = self.checkpoint.model_copy(update={"dir": folder})
        return self.model_copy(update={"workdir": workdir, "checkpoint": checkpoint, "script": script})


def load_job(
    source: Path | str,
    *,
    overrides: Sequence[str] = (),
    sbatch: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> JobSpec:
    """Return the job of a file (a ``Path``) or of YAML text (a ``str``).

    ``overrides`` are ``field=value`` (``nodes=2``, ``checkpoint.keep=5``) and win over the file; ``sbatch`` are more
    options for sbatch, after the file's. A ``script`` is read here, from ``cwd`` and with the variables of ``env``
    (this process's own). Raises SpecError with every fault; NotFoundError when there is no such file.
    """
    label, text = (_LABEL, source) if isinstance(source, str) else (str(source), _read(source))
    document = read_yaml(text)
    faults = [fault.text(label) for fault in document.faults]
    if not document.values and faults:
        raise _spec_error(label, faults)
    faults += _override(document, overrides)
    origins = {text.partition("=")[0]: f"--set {text}" for text in overrides}
    faults += _take_script(document, origins, cwd or Path.cwd(), env)
    spec, wrong = _build(document)
    if spec is not None:
        spec = spec.model_copy(update={"sbatch": (*spec.sbatch, *sbatch)})
    faults += [f"after `--`: {fault}" for fault in _option_faults(sbatch)]
    faults += [_told(fault, label, origins) for fault in sorted(wrong, key=lambda fault: fault.line)]
    if spec is None or faults:
        raise _spec_error(label, faults)
    return spec


def _take_script(document: Document, origins: dict[str, str], cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Add what the job's batch script asks for to the document; return what is wrong with it."""
    named = document.values.get("script")
    if not isinstance(named, str):
        return []
    faults: list[str] = []
    path = _absolute("script", named, cwd, env, faults)
    if faults:
        return faults
    try:
        document.values, added = merge(document.values, read_options(Path(path)))
    except ScriptFaults as error:
        return list(error.faults)
    origins.update({field: f"{path}: #SBATCH: {field}" for field in added})
    return []


def _build(document: Document) -> tuple[JobSpec | None, list[Fault]]:
    values = document.values
    wrong = [Fault(document.line((key,)), key, message) for key, message in _program_faults(values)]
    options = values.get("sbatch", [])
    options = [options] if isinstance(options, str) else options
    wrong += [Fault(document.line(("sbatch",)), "sbatch", fault) for fault in _option_faults(options)]
    try:
        return JobSpec.model_validate(values), wrong
    except ValidationError as error:
        # Those of the whole model (no field) are the ones that _program_faults has told already.
        return None, wrong + [fault for fault in faults_of(error, JobSpec, document.line) if fault.field]


def _told(fault: Fault, label: str, origins: Mapping[str, str]) -> str:
    if fault.field in origins:
        return f"{origins[fault.field]}: {fault.message}"
    return fault.text(label)


def _option_faults(options: Any) -> list[str]:
    if not isinstance(options, (list, tuple)):
        return []
    return check_user_options([word for word in options if isinstance(word, str)])


def _program_faults(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    command, script = str(values.get("command") or "").strip(), values.get("script")
    if not command and not script:
        yield "command", "is required: the shell command to run, or `script`, an sbatch file"
    if command and script:
        yield "script", "is given beside `command`; keep one"
    if script and values.get("launcher", "srun") != "srun":
        yield "launcher", "must be srun for a `script`, which starts its program itself"


def _override(document: Document, overrides: Sequence[str]) -> list[str]:
    """Put each ``field=value`` into the document; return what cannot be put."""
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            faults.append(f"--set {text}: must be FIELD=VALUE, such as nodes=2 or checkpoint.keep=5")
            continue
        place: Any = document.values
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                faults.append(f"--set {text}: {part} is no mapping")
                break
        else:
            place[path[-1]] = value
            document.lines[path] = 0
    return faults


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"reading {path}: there is no such file", hint=f"ls {path.parent}") from None
    except OSError as error:
        raise UsageError(f"reading {path}: {error.strerror}", hint=f"ls -ld {path}") from None
    if len(data) > MAX_BYTES:
        what = f"it is larger than {MAX_BYTES >> 20} MiB, so it is no job.yaml"
        raise UsageError(f"reading {path}: {what}", hint=f"ls -lL {path}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _spec_error(str(path), [f"{path}:{line}: is not UTF-8 text"]) from None


def _absolute(field: str, text: str, base: Path, env: Mapping[str, str], faults: list[str]) -> str:
    missing = [name for name in _VARIABLE.findall(text) if name not in env]
    if missing:
        faults.append(f"{field}: the variable ${missing[0]} is not set, in {text!r}")
        return text
    text = _VARIABLE.sub(lambda found: env[found.group(1)], text)
    if text == "~" or text.startswith("~/"):
        text = env.get("HOME", os.path.expanduser("~")) + text[1:]
    return os.path.normpath(base / text)


def _spec_error(label: str, faults: Sequence[str]) -> SpecError:
    number = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return SpecError(f"{label}: {number}; nothing was submitted", tuple(faults), hint=_HINT)
