"""How much memory checkpoints may take on this node, and how much of it is free: told, never guessed by failing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transomd.forms import parse_size
from transomd.tce.errors import human_bytes

VARIABLE = "TRANSOM_CHECKPOINT_MEMORY"
OFF = ("off", "0", "no", "false")
_RESERVE = 0.05
"""Of the machine's memory, what is never taken: a machine without any free memory stalls."""


@dataclass(frozen=True)
class Budget:
    """``limit`` is what all arenas together may take and ``source`` who says so; ``free`` what the node has left."""

    limit: int
    source: str
    free: int
    freeness: str

    def refusal(self, needed: int, taken: int) -> str:
        """Why ``needed`` more bytes cannot be had when ``taken`` are in use; '' if they can."""
        if needed <= min(self.limit - taken, self.free):
            return ""
        return (
            f"needs {human_bytes(needed)}; in use {human_bytes(taken)}; limit {human_bytes(self.limit)} "
            f"({self.source}); free {human_bytes(max(0, self.free))} ({self.freeness})"
        )


def look(environ: Mapping[str, str], root: Path = Path("/")) -> Budget:
    """The budget as the environment, the control groups and the kernel have it now."""
    limit, source = _limit(environ, root)
    free, freeness = min([_machine(root), *_groups(root)])
    return Budget(limit, source, free, freeness)


def _limit(environ: Mapping[str, str], root: Path) -> tuple[int, str]:
    told = parse_size(environ.get(VARIABLE, ""))
    if told:
        return told, VARIABLE
    job = environ.get("SLURM_MEM_PER_NODE", "")
    if job.isdecimal() and int(job):
        return (int(job) << 20) // 2, "half of the job's memory, SLURM_MEM_PER_NODE"
    total = _meminfo(root).get("MemTotal", 0)
    caps = [limit for limit, _ in _limits(root)]
    return min([total, *caps]) // 2, "half of the memory"


def _machine(root: Path) -> tuple[int, str]:
    memory = _meminfo(root)
    return memory.get("MemAvailable", 0) - int(_RESERVE * memory.get("MemTotal", 0)), "MemAvailable less a reserve"


def _groups(root: Path) -> list[tuple[int, str]]:
    """What each control group around this process has left; page cache counts as free."""
    return [(limit - max(0, used), "control group") for limit, used in _limits(root)]


def _limits(root: Path) -> list[tuple[int, int]]:
    """Limit and use (without the page cache that can go) of each limited control group around this process."""
    found = []
    for folder, limit, usage, inactive in _group_files(root):
        value = _number(folder / limit)
        if value is not None and value < 1 << 60:
            used = (_number(folder / usage) or 0) - _stat(folder / "memory.stat", inactive)
            found.append((value, used))
    return found


def _group_files(root: Path) -> list[tuple[Path, str, str, str]]:
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = base / path.lstrip("/")
        found += [(folder, *names) for folder in (here, *here.parents) if folder.is_relative_to(base)]
    return found


def _meminfo(root: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _stat(path: Path, name: str) -> int:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def switched_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the memory tier is not wanted."""
    return environ.get(VARIABLE, "").strip().lower() in OFF
