"""The run folder: what a job's launchers and agents share, on the shared file system, owned by the user (0700).

::

    env.json  spec.json  token       written at submission (transomd.launch.stage)
    launcher.json                    where the current launcher listens: host, port, generation
    claims/attempt-1                 which Slurm job *is* attempt 1; made by exclusive link, so there is one for ever
    claims/generation-1-2            which process is launcher 2 of attempt 1
    claims/epoch-000003              who started epoch 3
    claims/completed                 the program has ended with exit code 0
    logs/e000003/rank-00000.log      what the ranks of epoch 3 print; srun.log beside them
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMPLETED = "completed"
"""Claimed when the program has ended with exit code 0: it is never started again, even when nobody heard of it."""


class RunDir:
    """Paths and claims of one run folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.launcher_file = self.root / "launcher.json"
        self.token_file = self.root / "token"
        self.claims = self.root / "claims"

    def token(self) -> str:
        """Return the secret that this job's launcher and agents share with the daemon."""
        return self.token_file.read_text().strip()

    def environment(self) -> dict[str, str]:
        """Return the user's environment at submit time."""
        data: dict[str, str] = json.loads((self.root / "env.json").read_text())
        return data

    def spec(self) -> dict[str, Any]:
        """Return the job's spec as it was submitted."""
        data: dict[str, Any] = json.loads((self.root / "spec.json").read_text())
        return data

    def logs(self, epoch: int) -> Path:
        """Return the log folder of one launch, made if need be."""
        folder = self.root / "logs" / f"e{epoch:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        """Replace a file in one step, so that a reader sees the old or the new one, whole."""
        temporary = self._temporary(path, json.dumps(data))
        os.replace(temporary, path)

    def claim(self, name: str, owner: Mapping[str, Any]) -> Mapping[str, Any]:
        """Claim a name for ever; return the owner, who is the caller only if nobody was first.

        An exclusive link decides, which is atomic on NFS too (open(2), O_EXCL).
        """
        self.claims.mkdir(exist_ok=True)
        path = self.claims / name
        temporary = self._temporary(path, json.dumps(owner))
        try:
            os.link(temporary, path)
        except FileExistsError:
            found: Mapping[str, Any] = json.loads(path.read_text())
            return found
        finally:
            os.unlink(temporary)
        return owner

    def owner(self, name: str) -> Mapping[str, Any]:
        """Return who has claimed a name. Raises OSError where nobody has."""
        found: Mapping[str, Any] = json.loads((self.claims / name).read_text())
        return found

    def claimed(self, name: str) -> bool:
        """Return whether somebody has claimed a name."""
        return (self.claims / name).exists()

    def epochs(self) -> list[int]:
        """Return the epochs that were claimed, in order."""
        names = os.listdir(self.claims) if self.claims.is_dir() else []
        return sorted(int(m.group(1)) for m in (re.fullmatch(r"epoch-(\d+)", n) for n in names) if m)

    def newest_generation(self, attempt: int) -> int:
        """Return the newest launcher generation that was claimed for an attempt; 0 when none was."""
        names = os.listdir(self.claims) if self.claims.is_dir() else []
        found = (re.fullmatch(rf"generation-{attempt}-(\d+)", n) for n in names)
        return max((int(m.group(1)) for m in found if m), default=0)

    def _temporary(self, path: Path, text: str) -> Path:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with open(temporary, "x", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return temporary
