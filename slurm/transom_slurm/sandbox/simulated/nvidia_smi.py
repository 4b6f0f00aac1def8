"""A simulated nvidia-smi: answers from the JSON state file named by its first argument.

It knows the queries that monitoring uses (``-L``, ``--query-gpu``, ``--query-compute-apps``, ``--query-remapped-rows``,
``-i``, csv with ``noheader`` and ``nounits``) and refuses the rest as the real one does. A GPU marked ``lost`` is not
shown, and a state that ``hangs`` is never answered.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

UNITS = {
    "memory.total": "MiB",
    "memory.used": "MiB",
    "memory.free": "MiB",
    "used_memory": "MiB",
    "used_gpu_memory": "MiB",
    "power.draw": "W",
    "power.limit": "W",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "clocks.current.sm": "MHz",
    "clocks.sm": "MHz",
    "clocks.max.sm": "MHz",
}
ALIASES = {
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_name": "name",
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "used_gpu_memory": "used_memory",
    "clocks.sm": "clocks.current.sm",
    "timestamp": "timestamp",
}
INVALID_ARGUMENT, NOT_FOUND = 2, 6


class Refused(Exception):
    """What the caller asked cannot be answered: text and exit code."""

    def __init__(self, text: str, code: int = INVALID_ARGUMENT) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def visible(gpus: list[dict[str, Any]], wanted: str | None) -> list[dict[str, Any]]:
    """The GPUs that are there, less those not asked for with ``-i``."""
    there = [gpu for gpu in gpus if not gpu["lost"]]
    if wanted is None:
        return there
    found = [g for g in there if {str(g["index"]), g["uuid"], g["pci.bus_id"], g["serial"]} & set(wanted.split(","))]
    if not found:
        raise Refused("No devices were found", NOT_FOUND)
    return found


def cell(row: dict[str, Any], field: str, units: bool) -> str:
    """One value, with its unit when asked for."""
    value = str(row[ALIASES.get(field, field)])
    unit = UNITS.get(field, "")
    return f"{value} {unit}" if unit and units and value[:1].isdigit() else value


def heading(field: str, units: bool) -> str:
    """A column's heading, as ``memory.total [MiB]``."""
    unit = UNITS.get(field, "")
    return f"{field} [{unit}]" if unit and units else field


def table(rows: list[dict[str, Any]], known: set[str], fields: list[str], options: set[str]) -> str:
    """Rows as csv; :class:`Refused` for a field that does not exist."""
    for field in fields:
        if ALIASES.get(field, field) not in known:
            raise Refused(f'Field "{field}" is not a valid field to query.\n')
    if "csv" not in options:
        raise Refused('"--format=" switch is missing. A format must be specified when using a --query switch.')
    units = "nounits" not in options
    lines = [] if "noheader" in options else [", ".join(heading(field, True) for field in fields)]
    lines += [", ".join(cell(row, field, units) for field in fields) for row in rows]
    return "\n".join(lines)


def apps(state: dict[str, Any], gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute processes on the GPUs that are there."""
    by_index = {gpu["index"]: gpu for gpu in gpus}
    return [{**by_index[app["gpu"]], **app} for app in state["apps"] if app["gpu"] in by_index]


def parse(argv: list[str]) -> dict[str, str]:
    """Options as a dictionary; both ``--a=b`` and ``--a b`` are understood."""
    found: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        key, sep, value = word.partition("=")
        if key in ("-L", "--list-gpus", "-h", "--help", "--version"):
            found[key] = ""
        elif key in ("--query-gpu", "--query-compute-apps", "--query-remapped-rows", "--format", "-i", "--id"):
            found[key] = value if sep else next(words, "")
        else:
            raise Refused(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n{word}", 1)
    return found


def overview(state: dict[str, Any], gpus: list[dict[str, Any]]) -> str:
    """What a bare ``nvidia-smi`` shows, much shorter than the real one."""
    head = (
        f"NVIDIA-SMI {state['driver_version']}   SIMULATED by transom sandbox on {state['node']}: there is no GPU here"
    )
    rows = [
        f"| {g['index']:>3}  {g['name']:<45} {g['pci.bus_id']:>16} {g['memory.used']:>6}MiB / {g['memory.total']}MiB |"
        for g in gpus
    ]
    return "\n".join([head, *rows])


def answer(argv: list[str], state: dict[str, Any]) -> str:
    """What is printed for these arguments."""
    asked = parse(argv)
    gpus = visible(state["gpus"], asked.get("-i", asked.get("--id")))
    options = {word.strip() for word in asked.get("--format", "").split(",")}
    if "-L" in asked or "--list-gpus" in asked:
        return "\n".join(f"GPU {g['index']}: {g['name']} (UUID: {g['uuid']})" for g in gpus)
    if "-h" in asked or "--help" in asked:
        return __doc__
    for key, rows, more in (
        ("--query-gpu", gpus, set()),
        ("--query-remapped-rows", gpus, set()),
        ("--query-compute-apps", apps(state, gpus), {"pid", "process_name", "used_memory", "gpu"}),
    ):
        if key in asked:
            fields = [field.strip() for field in asked[key].split(",")]
            known = (set(state["gpus"][0]) if state["gpus"] else set()) - {"lost"} | more
            return table(rows, known, fields, options)
    return overview(state, gpus)


def main() -> int:
    """Run as ``nvidia_smi.py STATE ARGUMENTS...``."""
    with open(sys.argv[1]) as file:
        state = json.load(file)
    if state.get("hangs"):
        signal.pause()
    if not any(not gpu["lost"] for gpu in state["gpus"]):
        print("No devices were found")
        return NOT_FOUND
    try:
        text = answer(sys.argv[2:], state)
    except Refused as refusal:
        print(refusal.text)
        return refusal.code
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
