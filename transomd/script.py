"""An sbatch file as a job's program: its ``#SBATCH`` lines become fields and options where job.yaml has none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transom_slurm.batch import BatchScriptError, ScriptOptions, parse_sbatch_script, script_options

MAX_BYTES = 4 << 20
"""Size of the largest batch script that is taken; Slurm's own limit (max_script_size) is 4 MiB."""


class ScriptFaults(Exception):
    """A batch script cannot be used; ``faults`` are sentences that name it."""

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults


def read_options(path: Path) -> ScriptOptions:
    """Return what the ``#SBATCH`` lines of ``path`` ask for. Raises ScriptFaults."""
    try:
        options = script_options(parse_sbatch_script(read_script(path)))
    except BatchScriptError as error:
        raise ScriptFaults(f"{path}: {error}") from None
    if options.faults:
        raise ScriptFaults(*(f"{path}: #SBATCH {fault}" for fault in options.faults))
    return options


def read_script(path: Path) -> str:
    """Return the text of a batch script. Raises ScriptFaults when it cannot be read or cannot be a script."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ScriptFaults(f"{path}: the script cannot be read: {error.strerror}") from None
    fault = _no_script(data)
    if fault:
        raise ScriptFaults(f"{path}: {fault}")
    return data.decode("utf-8", "surrogateescape")


def _no_script(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        return f"is larger than {MAX_BYTES >> 20} MiB"
    if not data.startswith(b"#!"):
        return "is no batch script: its first line must begin with #!"
    return "holds a NUL character" if b"\x00" in data else ""


def merge(values: Mapping[str, Any], options: ScriptOptions) -> tuple[dict[str, Any], set[str]]:
    """Return a job's values with the script's added (job.yaml wins), and the names of the fields it gave."""
    added = {key: value for key, value in options.fields.items() if key not in values}
    merged = {**added, **values}
    if options.options:
        own = values.get("sbatch", [])
        merged["sbatch"] = [*options.options, *(own if isinstance(own, list) else [own])]
    return merged, set(added)
