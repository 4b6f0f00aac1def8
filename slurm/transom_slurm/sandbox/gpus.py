"""The simulated GPUs of a node, and its kernel log: the files that its nvidia-smi and dmesg answer from."""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

from transom_slurm.sandbox.errors import SandboxError
from transom_slurm.sandbox.layout import NodeLayout

NAME = "NVIDIA H100 (simulated by transom sandbox)"
DRIVER = "550.90.07"
_BUSES = ("1b", "3b", "43", "52", "9d", "c3", "d1", "df")
_FELL_OFF_THE_BUS = 79
_XID_TEXTS = {
    13: "pid=4411, name=python3, Graphics Exception: ESR 0x50da30=0x9 0x50da34=0x0 0x50da28=0x4c1eb72 0x50da2c=0x174",
    31: "pid=4411, name=python3, Ch 00000008, intr 00000000."
    " MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_8 faulted @ 0x7f31_1c000000",
    43: "pid=4411, name=python3, Ch 00000008",
    45: "pid=4411, name=python3, Ch 0000000c",
    48: "pid='<unknown>', name=<unknown>, DBE (double bit error) ECC Error",
    62: "pid='<unknown>', name=<unknown>, 2027e9d4 0000c3ac 00000000",
    63: "pid=1896, name=python3, Row Remapper: New row marked for remapping, reset gpu to activate.",
    64: "pid=1896, name=python3, Row Remapper: Error recording failed",
    74: "pid='<unknown>', name=<unknown>,"
    " NVLink: fatal error detected on link 11(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    94: "pid=7194, name=python3, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    95: "pid='<unknown>', name=<unknown>, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    119: "pid=4411, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP!"
    " Expected function 76 (GSP_RM_CONTROL) (0x20803032 0x58c).",
    120: "pid='<unknown>', name=<unknown>, GSP task exception: load access fault",
}


def fresh(node: str, index: int) -> dict[str, Any]:
    """A healthy GPU, as nvidia-smi's fields."""
    return {
        "index": index,
        "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{node}.sandbox.transom')}",
        "name": NAME,
        "pci.bus_id": f"{index // len(_BUSES):08X}:{_BUSES[index % len(_BUSES)].upper()}:00.0",
        "serial": f"16500000{int(node.lstrip('n')):03d}{index:02d}",
        "driver_version": DRIVER,
        "memory.total": 81559,
        "memory.used": 0,
        "memory.free": 81559,
        "ecc.mode.current": "Enabled",
        "ecc.errors.corrected.volatile.total": 0,
        "ecc.errors.corrected.aggregate.total": 0,
        "ecc.errors.uncorrected.volatile.total": 0,
        "ecc.errors.uncorrected.aggregate.total": 0,
        "remapped_rows.correctable": 0,
        "remapped_rows.uncorrectable": 0,
        "remapped_rows.pending": 0,
        "remapped_rows.failure": 0,
        "clocks_throttle_reasons.active": "0x0000000000000000",
        "clocks.current.sm": 1980,
        "clocks.max.sm": 1980,
        "pcie.link.width.current": 16,
        "pcie.link.width.max": 16,
        "pcie.link.gen.current": 5,
        "pcie.link.gen.max": 5,
        "temperature.gpu": 34,
        "power.draw": "71.20",
        "power.limit": "700.00",
        "utilization.gpu": 0,
        "utilization.memory": 0,
        "compute_mode": "Default",
        "persistence_mode": "Enabled",
        "pstate": "P0",
        "lost": False,
    }


def boot(own: NodeLayout, node: str, count: int) -> None:
    """What a reboot does: all GPUs are back and well, the kernel log starts anew (the old one is ``kern.log.1``)."""
    gpus = [fresh(node, index) for index in range(count)]
    _save(own, {"node": node, "driver_version": DRIVER, "gpus": gpus, "apps": []})
    own.log.mkdir(parents=True, exist_ok=True)
    if own.kern_log.exists():
        os.replace(own.kern_log, own.log / "kern.log.1")
    own.kern_log.touch()
    kernel_line(own, node, "Linux version: this kernel log is simulated by transom sandbox")


def kernel_line(own: NodeLayout, node: str, text: str) -> None:
    """Append a line to the node's kernel log, in syslog's form, stamped with now and the uptime."""
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    line = f"{time.strftime('%b %e %H:%M:%S')} {node} kernel: [{uptime:12.6f}] {text}\n"
    with own.kern_log.open("a") as file:
        file.write(line)


def update(own: NodeLayout, index: int, fields: dict[str, Any]) -> None:
    """Change what nvidia-smi says of one GPU; :class:`SandboxError` for a GPU or field that it does not know."""
    state = _load(own)
    found = [gpu for gpu in state["gpus"] if gpu["index"] == index]
    if not found:
        raise SandboxError(f"change GPU {index} of {own.root.name}", f"it has {len(state['gpus'])}, numbered from 0")
    unknown = sorted(set(fields) - set(found[0]))
    if unknown:
        raise SandboxError(f"change GPU {index} of {own.root.name}", f"no such field: {', '.join(unknown)}")
    found[0].update(fields)
    _save(own, state)


def add_process(own: NodeLayout, index: int, pid: int, used_mib: int, name: str = "python3") -> None:
    """Let a process appear on a GPU."""
    state = _load(own)
    state["apps"].append({"gpu": index, "pid": pid, "used_memory": used_mib, "process_name": name})
    _save(own, state)


def hang(own: NodeLayout) -> None:
    """Let nvidia-smi never answer again, until the node is booted or healed."""
    _save(own, {**_load(own), "hangs": True})


def uncorrected(own: NodeLayout, index: int) -> None:
    """One more uncorrectable memory error on a GPU, without a line in the kernel log."""
    gpu = next(gpu for gpu in _load(own)["gpus"] if gpu["index"] == index)
    counters = [f"ecc.errors.uncorrected.{span}.total" for span in ("volatile", "aggregate")]
    update(own, index, {name: gpu[name] + 1 for name in counters})


def shown(own: NodeLayout) -> int:
    """How many GPUs nvidia-smi shows."""
    return sum(not gpu["lost"] for gpu in _load(own)["gpus"])


def first_present(own: NodeLayout) -> int:
    """The lowest GPU that is not lost; :class:`SandboxError` when there is none."""
    for gpu in _load(own)["gpus"]:
        if not gpu["lost"]:
            return int(gpu["index"])
    raise SandboxError(f"harm a GPU of {own.root.name}", "none is left")


def xid(own: NodeLayout, node: str, number: int, index: int) -> None:
    """An XID in the kernel log; after 79 the GPU is gone from nvidia-smi as well, as on hardware."""
    gpu = _load(own)["gpus"][index]
    bus = gpu["pci.bus_id"].lower()
    text = _XID_TEXTS.get(number, "pid='<unknown>', name=<unknown>, simulated")
    kernel_line(own, node, f"NVRM: Xid (PCI:{bus[4:].rpartition('.')[0]}): {number}, {text}")
    if number == _FELL_OFF_THE_BUS:
        update(own, index, {"lost": True})


def _load(own: NodeLayout) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(own.gpus.read_text())
    return state


def _save(own: NodeLayout, state: dict[str, Any]) -> None:
    new = own.gpus.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1))
    os.replace(new, own.gpus)
