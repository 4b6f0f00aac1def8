"""The run folder of a job, made by its user at submit time: ``<workdir>/.transom/<name>-<time>-<random>/``, mode 0700.

``env.json`` (the user's environment, which never goes to the daemon), ``spec.json``, ``token`` and, for a job with one,
``script`` (the batch script as it was at submit time); ``logs/`` is for the launcher. The folder appears whole or not
at all, and nothing is followed or kept that somebody else put in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transomd.errors import UsageError
from transomd.script import ScriptFaults, read_script
from transomd.spec import JobSpec

FOLDER = ".transom"
ENV_FILE = "env.json"
SPEC_FILE = "spec.json"
TOKEN_FILE = "token"
SCRIPT_FILE = "script"
LOGS = "logs"

_KERNEL = ("/proc", "/sys")
"""What root may write in, and still no file is kept there."""

_OWN_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "TRANSOM_", "_TRANSOM_")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Staged:
    """A run folder, and the token by which the job's launcher proves that it is the job's."""

    run_dir: Path
    token: str = field(repr=False)


def stage(spec: JobSpec, env: Mapping[str, str], *, now: float | None = None) -> Staged:
    """Make the run folder of a resolved job as the calling user. Raises UsageError, and then nothing is left behind."""
    staged = Staged(planned_run_dir(spec, now=now), secrets.token_urlsafe(32))
    files = {
        ENV_FILE: json.dumps(kept_environment(env), indent=0).encode(),
        SPEC_FILE: json.dumps(spec.model_dump(mode="json"), indent=1).encode(),
        TOKEN_FILE: staged.token.encode(),
    }
    try:
        if spec.script:
            files[SCRIPT_FILE] = read_script(Path(spec.script)).encode("utf-8", "surrogateescape")
        with _parent(Path(spec.workdir)) as parent:
            _fill(parent, staged.run_dir.name, files)
    except ScriptFaults as error:
        raise UsageError(str(error), hint=f"ls -l {spec.script}") from None
    except OSError as error:
        message = f"making the run folder {staged.run_dir}: {error.strerror}"
        raise UsageError(
            message, hint=f"ls -ld {spec.workdir}; df {spec.workdir}; or give the job a `workdir`"
        ) from None
    return staged


def unstage(staged: Staged) -> None:
    """Remove the run folder of a job that was not accepted; what cannot be removed stays."""
    shutil.rmtree(staged.run_dir, ignore_errors=True)


def planned_run_dir(spec: JobSpec, *, now: float | None = None) -> Path:
    """Return a fresh name for the run folder of a resolved job, without making it."""
    moment = time.strftime("%Y%m%dT%H%M%S", time.localtime(now))
    return Path(spec.workdir) / FOLDER / f"{spec.name}-{moment}-{secrets.token_hex(4)}"


def kept_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a job keeps: all but Slurm's own, which would describe another job."""
    return {name: value for name, value in env.items() if not name.startswith(_OWN_PREFIXES)}


def path_faults(spec: JobSpec) -> tuple[str, ...]:
    """Say what is wrong with the folders of a resolved job, as the calling user finds them; nothing is made."""
    faults = []
    workdir, checkpoints = Path(spec.workdir), Path(spec.checkpoint.dir)
    if not workdir.is_dir():
        faults.append(f"workdir: {workdir} is no folder that you can reach; make it, or name another")
    elif not os.access(workdir, os.R_OK | os.W_OK | os.X_OK):
        faults.append(f"workdir: you cannot write in {workdir}, where the run folder and its logs go; name another")
    nearest = next(folder for folder in (checkpoints, *checkpoints.parents) if os.path.lexists(folder))
    if any(Path(os.path.realpath(checkpoints)).is_relative_to(kernel) for kernel in _KERNEL):
        faults.append(f"checkpoint.dir: {checkpoints} is the kernel's and keeps no files; name another")
    elif not nearest.is_dir():
        faults.append(f"checkpoint.dir: {nearest} is in the way and no folder; name another")
    elif not os.access(nearest, os.R_OK | os.W_OK | os.X_OK) and nearest != workdir:
        faults.append(f"checkpoint.dir: you cannot read and write in {nearest}; name another, or have it opened to you")
    return tuple(faults)


@contextlib.contextmanager
def _parent(workdir: Path) -> Iterator[int]:
    """Open ``<workdir>/.transom``, made if need be; it must be the caller's own and closed to other writers."""
    base = os.open(workdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=base)
        parent = os.open(FOLDER, _DIRECTORY, dir_fd=base)
    except NotADirectoryError:
        raise _not_ours(workdir, "it is no folder, or a link, which is not followed") from None
    finally:
        os.close(base)
    try:
        found = os.fstat(parent)
        if found.st_uid != os.geteuid():
            raise _not_ours(workdir, "it belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise _not_ours(workdir, "others may write in it")
        yield parent
    finally:
        os.close(parent)


def _not_ours(workdir: Path, why: str) -> UsageError:
    hint = f"give the job a `workdir` of its own, or see: ls -ld {workdir / FOLDER}"
    return UsageError(f"making a run folder in {workdir / FOLDER}: {why}", hint=hint)


def _fill(parent: int, name: str, files: Mapping[str, bytes]) -> None:
    draft = f".{name}"
    os.mkdir(draft, 0o700, dir_fd=parent)
    folder = os.open(draft, _DIRECTORY, dir_fd=parent)
    try:
        os.mkdir(LOGS, 0o700, dir_fd=folder)
        for file, data in files.items():
            _write(folder, file, data)
        os.rename(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        _sweep(parent, draft, folder, files)
        raise
    finally:
        os.close(folder)


def _sweep(parent: int, draft: str, folder: int, files: Iterable[str]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file, dir_fd=folder)
    with contextlib.suppress(OSError):
        os.rmdir(LOGS, dir_fd=folder)
        os.rmdir(draft, dir_fd=parent)


def _write(folder: int, name: str, data: bytes) -> None:
    mode = 0o700 if name == SCRIPT_FILE else 0o600
    with open(os.open(name, _NEW_FILE, mode, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
