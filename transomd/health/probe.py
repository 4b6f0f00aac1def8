#!/usr/bin/python3 -IS
# ruff: noqa: I002, B905, UP006, UP031, UP035, UP045 (this file runs on a node's own Python, 3.6 and later)
"""Gather facts about this node as one JSON object on standard output, and judge nothing.

One file, standard library only, Python 3.6 and later, as root or as a user: ``python3 probe.py [REQUEST]`` or
``python3 - [REQUEST] < probe.py``. REQUEST is a JSON object; every key has a default (see ``DEFAULTS``).

Each part runs in a child process of its own, in its own process group, with a deadline: a part that hangs, even in
the kernel, or that fails costs only itself and appears as ``{"error": "..."}``. The whole ends by ``deadline``
seconds. No child holds standard output, so a caller over SSH is never kept waiting by one that cannot be killed.
"""

import sys

if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]  # this file's own directory, or the current one: nothing is ever imported from there

import calendar
import contextlib
import errno
import json
import os
import re
import select
import signal
import subprocess
import time
import zlib
from functools import partial
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

Json = Dict[str, Any]

DEFAULTS: Json = {
    "deadline": 8.0,
    "parts": ["gpus", "remaps", "processes", "kernel", "disk", "mounts", "memory", "load", "tasks", "host"],
    "disk": ["/", "/tmp"],
    "mounts": [],
    "mount_deadline": 3.0,
    "window": 86400.0,
    "kernel_logs": ["/var/log/kern.log"],
    "nvidia_smi": ["/usr/bin/nvidia-smi", "/usr/local/bin/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi"],
}
VERSION = 1
MARGIN = 0.5
CLOCK_MARGIN = 2.0
OUTPUT_LIMIT = 1 << 20
LOG_TAIL = 4 << 20
GROUPS_LIMIT = 64
TEXT_LIMIT = 300


class PartError(Exception):
    """A part could not find out; the text says why. ``kind`` is ``absent`` for a missing tool, else ``failed``."""

    def __init__(self, text: str, kind: str = "failed", **more: Any) -> None:
        super().__init__(text)
        self.answer = dict(more, error=text, kind=kind)


# ---------------------------------------------------------------------------------------------------- GPUs

GPU_COLUMNS = [
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "serial",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "utilization.gpu",
    "power.draw",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "clocks_throttle_reasons.active",
]
APP_COLUMNS = ["gpu_uuid", "pid", "process_name", "used_memory"]
REMAP_COLUMNS = [
    "gpu_uuid",
    "gpu_bus_id",
    "remapped_rows.correctable",
    "remapped_rows.uncorrectable",
    "remapped_rows.pending",
    "remapped_rows.failure",
]
BAD_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')


def command(argv: List[str]) -> Tuple[int, str]:
    """Run a program with a plain environment; its exit status, and both of its streams as one text."""
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    with open(os.devnull) as null:
        child = subprocess.Popen(argv, stdin=null, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        out, _ = child.communicate()
    return child.returncode, out.decode("utf-8", "replace")


def nvidia_smi(request: Json) -> str:
    """The absolute path of nvidia-smi."""
    for path in request["nvidia_smi"]:
        if os.access(path, os.X_OK):
            return str(path)
    raise PartError("no nvidia-smi at " + ", ".join(request["nvidia_smi"]), kind="absent")


def query(request: Json, what: str, columns: List[str]) -> Json:
    """Rows of one csv query. A column that this driver does not know is left out and named in ``unknown``."""
    path = nvidia_smi(request)
    unknown: List[str] = []
    wanted = list(columns)
    while True:
        code, text = command([path, "--query-%s=%s" % (what, ",".join(wanted)), "--format=csv,noheader,nounits"])
        bad = [name for name in BAD_FIELD.findall(text) if name in wanted]
        if not bad:
            break
        unknown += bad
        wanted = [name for name in wanted if name not in bad]
        if not wanted:
            raise PartError("nvidia-smi knows none of the columns asked for: " + text[:TEXT_LIMIT])
    return read_rows(text, wanted, code, unknown)


def read_rows(text: str, wanted: List[str], code: int, unknown: List[str]) -> Json:
    """Split csv rows; lines that are no rows (errors, warnings) go to ``notes``."""
    rows, notes = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(wanted) and (len(wanted) > 1 or cells[0]):
            rows.append(dict(zip(wanted, cells)))
        elif line.strip():
            notes.append(line.strip()[:TEXT_LIMIT])
    if code and not rows:
        reason = "; ".join(notes[:3]) or "no output"
        raise PartError("nvidia-smi exited with %d: %s" % (code, reason), notes=notes[:20], exit=code)
    return {"rows": rows, "notes": notes[:20], "unknown": unknown, "exit": code}


def part_gpus(request: Json) -> Json:
    """Every GPU with the columns this driver knows."""
    return query(request, "gpu", GPU_COLUMNS)


def part_remaps(request: Json) -> Json:
    """Row remapping of every GPU that has it."""
    return query(request, "remapped-rows", REMAP_COLUMNS)


def part_processes(request: Json) -> Json:
    """Every process that computes on a GPU, with its user and the Slurm job it belongs to."""
    found = query(request, "compute-apps", APP_COLUMNS)
    for row in found["rows"]:
        row.update(owner(row["pid"]))
    return found


def owner(pid: str) -> Json:
    """User, Slurm job and transom job of a process, as far as they can be read."""
    answer: Json = {"uid": None, "slurm_job": "", "transom_job": ""}
    try:
        answer["uid"] = os.stat("/proc/" + pid).st_uid
        job = re.search(r"/job_(\d+)(?:/|$)", slurp("/proc/%s/cgroup" % pid), re.MULTILINE)
        answer["slurm_job"] = job.group(1) if job else ""
        marks = dict(item.partition("=")[::2] for item in slurp("/proc/%s/environ" % pid).split("\0"))
        answer["slurm_job"] = answer["slurm_job"] or marks.get("SLURM_JOB_ID", "")
        answer["transom_job"] = marks.get("TRANSOM_JOB_ID", "")
    except OSError:
        pass
    return answer


# ---------------------------------------------------------------------------------------------- kernel log

XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)(?: GPU-I:\d+)?\): (?P<code>\d+)\b(?P<rest>.*)")
SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(PCI:(?P<pci>[0-9A-Fa-f:.]+)\): (?P<code>\d+)\b(?P<rest>.*)")
SEVERITY = re.compile(r"\b(Fatal|Nonfatal|Non-fatal)\b", re.IGNORECASE)
KINDS = [
    ("nvrm", r"NVRM:.*(RmInitAdapter failed|fallen off the bus and is not responding|NV_ERR_RESET_REQUIRED)"),
    ("oom", r"Out of memory: Kill|Memory cgroup out of memory|oom-kill:"),
    ("mce", r"\[Hardware Error\]|Machine [Cc]heck|EDAC \S+: .*\b(CE|UE)\b"),
    ("pcie", r"AER: (Multiple )?Uncorrect(ed|able)"),
    ("nvme", r"nvme\S*: .*(timeout|[Cc]ontroller is down|Abort|failed|resetting)"),
    ("io", r"I/O error|EXT4-fs error|XFS \(.*(shut ?down|[Cc]orrupt)|Remounting filesystem read-only"),
    ("lustre", r"LustreError|Lustre: .*(evict|was lost)"),
    ("nfs", r"nfs\S*: server \S+ (not responding|timed out|OK)"),
    ("hung", r"blocked for more than \d+ seconds"),
]
PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in KINDS]
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?(?:(Z)|([+-])(\d\d):?(\d\d))?\s+(.*)")
BSD = re.compile(r"([A-Z][a-z]{2})\s+(\d+) (\d\d):(\d\d):(\d\d) (.*)")
RING = re.compile(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)")
TAGGED = re.compile(r"\S+ kernel: (.*)")


def part_kernel(request: Json) -> Json:
    """Kernel lines of interest since boot and within the window, grouped by kind, device and code.

    Both the ring buffer (which overflows) and the log (which is rotated) are read; ``sources`` of an event says where
    it stood. Only a part of which neither could be read is an error.
    """
    now, boot = time.time(), boot_time()
    since = max(boot - CLOCK_MARGIN, now - request["window"])
    events: Dict[Tuple[str, ...], Json] = {}
    sources, failures, dropped = [], [], False
    for name, read in kernel_sources(request, boot):
        try:
            groups = group(read(), name != "dmesg", since, now, boot)
        except (OSError, PartError) as exc:
            failures.append("%s: %s" % (name, exc))
            continue
        sources.append(name)
        dropped = dropped or len(groups) >= GROUPS_LIMIT
        merge(events, groups, name)
    if not sources:
        raise PartError("; ".join(failures))
    ordered = sorted(events.values(), key=lambda event: float(event["last"]))
    return {"sources": sources, "failures": failures, "since": since, "events": ordered, "dropped": dropped}


def kernel_sources(request: Json, boot: float) -> List[Tuple[str, Callable[[], List[str]]]]:
    """The ring buffer and every log asked for, each with what reads its lines."""
    logs = [(path, partial(log_tail, path, boot)) for path in request["kernel_logs"]]
    return [("dmesg", ring_buffer), *logs]


def ring_buffer() -> List[str]:
    """What dmesg prints; raises PartError when it may not, or is too old to know any of the forms."""
    for argv in (["dmesg", "--time-format=iso"], ["dmesg"]):
        code, text = command(argv)
        if code == 0:
            return text.split("\n")  # splitlines knows ends of lines that the kernel does not
    raise PartError(text.strip()[:TEXT_LIMIT])


def log_tail(path: str, boot: float) -> List[str]:
    """The last lines of a log; raises PartError for one that was not written since boot."""
    with open(path, "rb") as log:
        stat = os.fstat(log.fileno())
        if stat.st_mtime < boot - CLOCK_MARGIN:
            raise PartError("not written since boot")
        log.seek(max(0, stat.st_size - LOG_TAIL))
        return log.read(LOG_TAIL).decode("utf-8", "replace").split("\n")


def group(lines: List[str], tagged: bool, since: float, now: float, boot: float) -> Dict[Tuple[str, ...], Json]:
    """The lines of interest written after ``since``, by kind, code, device and severity."""
    groups: Dict[Tuple[str, ...], Json] = {}
    for line in filter(interesting, lines):
        when, text = line_time(line, now, boot)
        entry = classify(text, tagged)
        if when is not None and when >= since and entry is not None:
            add(groups, entry, when)
    return groups


def merge(events: Dict[Tuple[str, ...], Json], groups: Dict[Tuple[str, ...], Json], source: str) -> None:
    """Join what two sources say of the same events; the fuller count holds, and the ring buffer's times.

    Where users can write to a log (``logger``), its lines must not make an old event of the kernel's a new one.
    """
    for key, found in groups.items():
        event = events.setdefault(key, dict(found, sources=[]))
        event["count"] = max(event["count"], found["count"])
        if "dmesg" not in event["sources"]:
            event["first"], event["last"] = min(event["first"], found["first"]), max(event["last"], found["last"])
        event["sources"].append(source)


def interesting(line: str) -> bool:
    """A cheap test before any time is parsed."""
    return "NVRM" in line or "SXid" in line or any(pattern.search(line) for _, pattern in PATTERNS)


def line_time(line: str, now: float, boot: float) -> Tuple[Optional[float], str]:
    """When a line was written (Unix seconds, None if it does not say), and what follows the time."""
    iso = ISO.match(line)
    if iso:
        return iso_time(iso.groups()), iso.group(12)
    bsd = BSD.match(line)
    if bsd and bsd.group(1) in MONTHS:
        return bsd_time(bsd.groups(), now), bsd.group(6)
    ring = RING.match(line)
    if ring:
        return boot + float(ring.group(1)), ring.group(2)
    return None, line


def iso_time(part: Any) -> float:
    """``2026-11-29T20:00:38,123456+00:00``; local time without an offset."""
    year, month, day, hour, minute, second = (int(number) for number in part[:6])
    fraction = float("0." + part[6]) if part[6] else 0.0
    if not part[7] and not part[8]:
        return time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) + fraction
    offset = 0 if part[7] else (int(part[9]) * 3600 + int(part[10]) * 60) * (-1 if part[8] == "-" else 1)
    return calendar.timegm((year, month, day, hour, minute, second, 0, 0, 0)) + fraction - offset


def bsd_time(part: Any, now: float) -> float:
    """``Nov 29 20:00:38``: no year and no zone; the newest such moment that is not in the future."""
    year = time.localtime(now).tm_year
    rest = (MONTHS.index(part[0]) + 1, int(part[1]), int(part[2]), int(part[3]), int(part[4]), 0, 0, -1)
    when = time.mktime((year, *rest))
    return when if when <= now + 86400 else time.mktime((year - 1, *rest))


def classify(line: str, tagged: bool) -> Optional[Json]:
    """What a kernel line is about; None if it is nothing of interest, or not the kernel's."""
    if tagged:
        found = TAGGED.match(line)
        if not found:
            return None
        line = found.group(1)
    ring = RING.match(line)
    text = ring.group(2) if ring else line
    # At the start only: users can have the kernel quote them (a mount's options), but not begin its lines.
    for kind, pattern in (("xid", XID), ("sxid", SXID)):
        found = pattern.match(text)
        if found:
            severity = SEVERITY.search(found.group("rest"))
            word = severity.group(1).lower().replace("-", "") if severity else ""
            return {
                "kind": kind,
                "code": int(found.group("code")),
                "pci": found.group("pci"),
                "severity": word,
                "text": text,
            }
    for kind, pattern in PATTERNS:
        if pattern.match(text) if kind == "nvrm" else pattern.search(text):
            return {"kind": kind, "code": 0, "pci": "", "severity": "", "text": text}
    return None


def add(groups: Dict[Tuple[str, ...], Json], entry: Json, when: float) -> None:
    """Count an entry in its group; a new group is dropped once there are too many."""
    key = (str(entry["kind"]), str(entry["code"]), str(entry["pci"]), str(entry["severity"]))
    group = groups.get(key)
    if group is None and len(groups) >= GROUPS_LIMIT:
        return
    if group is None:
        group = groups[key] = dict(entry, text=entry["text"][:TEXT_LIMIT], count=0, first=when, last=when)
    group["count"] += 1
    group["first"], group["last"] = min(group["first"], when), max(group["last"], when)


# ---------------------------------------------------------------------------------------------------- host


def slurp(path: str) -> str:
    """A small file of /proc as text."""
    with open(path, "rb") as file:
        return file.read(OUTPUT_LIMIT).decode("utf-8", "replace")


def boot_time() -> float:
    """When this kernel started, Unix seconds."""
    found = re.search(r"^btime (\d+)$", slurp("/proc/stat"), re.MULTILINE)
    if found is None:
        raise PartError("/proc/stat has no btime")
    return float(found.group(1))


def part_host(request: Json) -> Json:
    """Which boot of which machine this is, and what it runs."""
    kernel = os.uname()
    return {
        "hostname": kernel.nodename,
        "kernel": kernel.release,
        "boot_id": slurp("/proc/sys/kernel/random/boot_id").strip(),
        "boot_time": boot_time(),
        "python": sys.version.split()[0],
    }


def part_memory(request: Json) -> Json:
    """/proc/meminfo in MiB, the fields that matter."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", slurp("/proc/meminfo"), re.MULTILINE))
    names = {"MemTotal": "total_mb", "MemAvailable": "available_mb", "SwapTotal": "swap_mb", "SwapFree": "swap_free_mb"}
    return {new: int(fields[old]) // 1024 for old, new in names.items() if old in fields}


def part_load(request: Json) -> Json:
    """Load averages and the number of processors."""
    one, five, fifteen = os.getloadavg()
    return {"one": one, "five": five, "fifteen": fifteen, "cpus": os.cpu_count()}


def part_tasks(request: Json) -> Json:
    """How many processes are zombies or wait in the kernel (D), and the first few of the latter."""
    counts = {"D": 0, "Z": 0}
    waiting: List[Json] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            name, _, rest = slurp("/proc/%s/stat" % pid).rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if int(parent) == os.getppid():
            continue
        if state in counts:
            counts[state] += 1
        if state == "D" and len(waiting) < 10:
            waiting.append({"pid": int(pid), "name": name.partition("(")[2]})
    return {"uninterruptible": counts["D"], "zombies": counts["Z"], "waiting": waiting}


def disk(path: str) -> Json:
    """Space in MiB and inodes of the file system that holds a path."""
    try:
        stat = os.statvfs(path)
    except OSError as exc:
        raise PartError(exc.strerror or str(exc), errno=errno.errorcode.get(exc.errno or 0, "")) from exc
    unit = stat.f_frsize
    return {
        "total_mb": stat.f_blocks * unit >> 20,
        "free_mb": stat.f_bavail * unit >> 20,
        "inodes": stat.f_files,
        "inodes_free": stat.f_favail,
        "read_only": bool(stat.f_flag & os.ST_RDONLY),
    }


def mount(path: str) -> Json:
    """Whether a path answers, whether it is read-only, and which mount holds it."""
    answer = disk(path)
    try:
        os.stat(path)
        with os.scandir(path) as entries:
            next(entries, None)
    except (PermissionError, NotADirectoryError):
        pass
    except OSError as exc:
        raise PartError(exc.strerror or str(exc), errno=errno.errorcode.get(exc.errno or 0, "")) from exc
    return dict(answer, **covering_mount(path))


def covering_mount(path: str) -> Json:
    """Mount point, type and source of the mount that a path lies on."""
    best = {"mount_point": "", "type": "", "source": ""}
    real = os.path.realpath(path)
    for line in slurp("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match.group(1), 8)), left.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best["mount_point"]):
            kind, source = right.split()[:2]
            best = {"mount_point": point, "type": kind, "source": source}
    return best


# ------------------------------------------------------------------------------------------------- running

PARTS: Dict[str, Callable[[Json], Json]] = {
    "gpus": part_gpus,
    "remaps": part_remaps,
    "processes": part_processes,
    "kernel": part_kernel,
    "memory": part_memory,
    "load": part_load,
    "tasks": part_tasks,
    "host": part_host,
}


NVIDIA_SMI = ("gpus", "remaps", "processes")


def mark(name: str, key: str) -> str:
    """What a child that looks at a path is called in /proc: at most 15 characters, the same for the same path."""
    return "transom-%07x" % (zlib.crc32(("%s %s" % (name, key)).encode("utf-8", "surrogateescape")) & 0xFFFFFFF)


def unkillable() -> Dict[str, int]:
    """Processes that have been killed and cannot end (state D), by name: looks of earlier probes, for one."""
    found: Dict[str, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            left, _, rest = slurp("/proc/%s/stat" % pid).rpartition(")")
            status = slurp("/proc/%s/status" % pid) if rest.split()[0] == "D" else ""
        except (OSError, IndexError):
            continue
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
        if any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending):
            found[left.partition("(")[2]] = int(pid)
    return found


def still_hangs(pid: int) -> Json:
    """Look no more where an earlier look was killed and cannot end: each would leave one more such process."""
    raise PartError("process %d of an earlier look still hangs in the kernel" % pid, kind="timeout", started=True)


class Task:
    """One part in a child process of its own. The child writes ``S`` when it starts, then its answer."""

    def __init__(self, name: str, key: str, work: Callable[[], Json], deadline: float) -> None:
        self.name, self.key, self.deadline = name, key, deadline
        self.data = b""
        self.began = time.monotonic()
        self.pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            child(work, write, mark(name, key) if key else "")
        os.close(write)
        own_group(self.pid)

    def read(self) -> bool:
        """Take what the child wrote; whether it has finished."""
        block = os.read(self.pipe, 1 << 16)
        self.data += block
        return not block or len(self.data) > OUTPUT_LIMIT

    def end(self, finished: bool) -> Json:
        """Kill what is left of the child, without waiting for it, and return the answer."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        if not finished:
            waited = time.monotonic() - self.began
            return {"error": "no answer after %.1f s" % waited, "kind": "timeout", "started": self.data[:1] == b"S"}
        try:
            answer: Json = json.loads(self.data[1:].decode("utf-8"))
        except ValueError:
            answer = {"error": "the part ended without an answer", "kind": "failed"}
        return answer


def own_group(pid: int) -> None:
    """Make a child the leader of its group; done on both sides of the fork, so that neither can be too early."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def child(work: Callable[[], Json], write: int, called: str) -> NoReturn:
    """Run one part and leave; never returns to the caller's code."""
    try:
        own_group(os.getpid())
        if called:
            with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
                comm.write(called)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.write(write, b"S")
        try:
            answer = work()
        except PartError as exc:
            answer = exc.answer
        except Exception as exc:
            answer = {"error": "%s: %s" % (type(exc).__name__, exc), "kind": "failed"}
        data = json.dumps(answer).encode("utf-8")
        while data:
            data = data[os.write(write, data) :]
    finally:
        os._exit(0)


def start(request: Json, end: float) -> List[Task]:
    """Start every part asked for, each path of ``disk`` and ``mounts`` as a task of its own."""
    tasks: List[Task] = []
    mount_end, hanging = min(end, time.monotonic() + request["mount_deadline"]), unkillable()
    for name in request["parts"]:
        if name in ("disk", "mounts"):
            for path in request[name]:
                pid = hanging.get(mark(name, path))
                look = partial(disk if name == "disk" else mount, path)
                tasks.append(Task(name, path, partial(still_hangs, pid) if pid else look, mount_end))
        elif name in PARTS:
            pid = hanging.get("nvidia-smi") if name in NVIDIA_SMI else None
            tasks.append(Task(name, "", partial(still_hangs, pid) if pid else partial(PARTS[name], request), end))
    return tasks


def gather(tasks: List[Task]) -> Json:
    """Collect answers until every task has answered or passed its deadline."""
    facts: Json = {}
    running = {task.pipe: task for task in tasks}
    while running:
        now = time.monotonic()
        soonest = min(task.deadline for task in running.values())
        ready, _, _ = select.select(list(running), [], [], max(0.0, soonest - now))
        for task in [running[pipe] for pipe in ready]:
            if task.read():
                keep(facts, running.pop(task.pipe), True)
        for task in [task for task in running.values() if task.deadline <= time.monotonic()]:
            keep(facts, running.pop(task.pipe), False)
    return facts


def keep(facts: Json, task: Task, finished: bool) -> None:
    """Put a task's answer where it belongs."""
    answer = task.end(finished)
    if task.key:
        facts.setdefault(task.name, {})[task.key] = answer
    else:
        facts[task.name] = answer


def main(argv: List[str]) -> int:
    """Gather and print; 2 if the request is no JSON object."""
    started = time.time()
    try:
        request = dict(DEFAULTS, **json.loads(argv[1])) if len(argv) > 1 else dict(DEFAULTS)
    except (ValueError, TypeError) as exc:
        sys.stderr.write("probe: the request is no JSON object: %s\n" % exc)
        return 2
    end = time.monotonic() + max(MARGIN, float(request["deadline"]) - MARGIN)
    facts = gather(start(request, end))
    facts.update(probe=VERSION, uid=os.getuid(), started=started, ended=time.time())
    sys.stdout.write(json.dumps(facts, sort_keys=True) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    status = main(sys.argv)
    # A child that cannot be killed must not keep this process: leave without waiting for anything.
    os._exit(status)
