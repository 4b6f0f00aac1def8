#!/usr/bin/python3 -IS
# ruff: noqa: I002, UP006, UP031, UP035, UP045 (this file runs on a node's own Python, 3.6 and later)
"""Slurm's Prolog, Epilog and HealthCheckProgram: look at this node, tell transomd, and never be in anybody's way.

One file under three names; ``transom hooks install`` puts it beside ``probe.py``, ``hooks.json`` and ``hooks.key``.
Standard library only, Python 3.6 and later, no PATH, no Slurm command. It prints nothing (``--say``: one sentence) and
exits 0, except that a prolog exits 1 where transomd answered, in time and signed for this very request, that this
node is unfit and may be drained for it.

Whatever could hang (a dead mount, a tool, a name service, a daemon that never answers) is done in a child with a
deadline of its own. This process only waits, kills and leaves; an alarm ends it should it fail even at that.
"""

import sys

if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]  # this file's own directory: nothing is ever imported from there

import contextlib
import hashlib
import hmac
import json
import os
import re
import select
import signal
import socket
import stat
import time
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

Json = Dict[str, Any]

# Seconds: the alarm, and what the probe may take. Slurm kills a HealthCheckProgram after 60.
ALARM = {"prolog": 9.5, "epilog": 9.5, "healthcheck": 29.0}
PROBE = {"prolog": 4.0, "epilog": 3.5, "healthcheck": 20.0}
PROBE_MARGIN = 0.8
CONFIG = 1.0
ANSWER = 2.0
SPOOL = 0.5
LEFTOVERS = 1.0
JITTER = 3.0

VERSION = 1
SPOOL_FILES = 32
SPOOL_SENT = 8
OUTPUT_LIMIT = 1 << 20
LEFTOVERS_LIMIT = 20
CONTEXTS = {"prolog_slurmd": "prolog", "epilog_slurmd": "epilog"}
CHILDREN = []  # type: List[int]


# ------------------------------------------------------------------------------------------------ with deadlines


def within(seconds: float, work: Callable[[int], Any]) -> Tuple[Optional[Any], str]:
    """Run ``work`` in a child; its JSON answer, or None and why there is none. Never waits longer than ``seconds``."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(work, write)
    os.close(write)
    own_group(pid)
    CHILDREN.append(pid)
    data, whole = collect(read, time.monotonic() + seconds)
    os.close(read)
    end(pid)
    if not whole:
        return None, "no answer within %.1f s" % seconds
    try:
        answer = json.loads(data.decode("utf-8"))
    except ValueError:
        return None, "no answer"
    if isinstance(answer, dict) and "failed" in answer:
        return None, str(answer["failed"])
    return answer, ""


def collect(read: int, deadline: float) -> Tuple[bytes, bool]:
    """What is written to a pipe until it is closed; False when the deadline or the limit came first."""
    data = b""
    while len(data) <= OUTPUT_LIMIT:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return data, False
        block = os.read(read, 1 << 16)
        if not block:
            return data, True
        data += block
    return data, False


def end(pid: int) -> None:
    """Kill a child's whole group without waiting: what is stuck in the kernel cannot be waited for."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)


def own_group(pid: int) -> None:
    """Make a child the leader of its group; done on both sides of the fork, so that neither can be too early."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def child(work: Callable[[int], Any], write: int) -> NoReturn:
    """Do the work, write its answer and leave; never returns to the caller's code."""
    try:
        own_group(os.getpid())
        silence()
        try:
            answer = work(write)
        except Exception as exc:
            answer = {"failed": "%s: %s" % (type(exc).__name__, exc)}
        data = json.dumps(answer).encode("utf-8")
        while data:
            data = data[os.write(write, data) :]
    finally:
        os._exit(0)


def silence() -> None:
    """Nothing that this process or its children print may reach a job."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def give_up(*_: Any) -> NoReturn:
    """The alarm: end the children and let the job have the node."""
    for pid in CHILDREN:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


# ------------------------------------------------------------------------------------------------------- looking


def read_config(folder: str) -> Json:
    """``hooks.json``, and the key, which must be this user's alone."""
    with open(os.path.join(folder, "hooks.json"), "rb") as file:
        config = json.loads(file.read(OUTPUT_LIMIT).decode("utf-8"))
    path = os.path.join(folder, "hooks.key")
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise ValueError("%s must belong to uid %d with mode 0600" % (path, os.geteuid()))
        config["key"] = file.read(4096).decode("ascii").strip()
    if len(config["key"]) < 32:
        raise ValueError("%s holds no key" % path)
    return dict(config)


def run_probe(folder: str, request: Json, write: int) -> NoReturn:
    """Become the probe; what it prints is the answer."""
    os.dup2(write, 1)
    argv = [sys.executable, "-I", "-S", os.path.join(folder, "probe.py"), json.dumps(request)]
    os.execve(sys.executable, argv, {"LC_ALL": "C"})


def look(kind: str, folder: str, config: Json) -> Json:
    """The report of this node, as far as it can be looked at in time."""
    env = os.environ
    request = dict(config["probe"][kind], deadline=PROBE[kind])
    job = number(env.get("SLURM_JOB_ID"))
    facts, error = within(PROBE[kind] + PROBE_MARGIN, lambda write: run_probe(folder, request, write))
    report = {
        "version": VERSION,
        "kind": kind,
        "node": env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
        "slurm_job": job,
        "uid": number(env.get("SLURM_JOB_UID")),
        "at": time.time(),
        "facts": facts if isinstance(facts, dict) else {},
        "error": error,
        "not_run": not_run(request, facts if isinstance(facts, dict) else {}),
        "late": False,
    }
    if kind == "epilog" and job is not None:
        report["leftovers"], _ = within(LEFTOVERS, lambda _: leftovers(job or 0, os.getppid()))
    return report


def number(text: Optional[str]) -> Optional[int]:
    """A number from the environment; None where there is none."""
    return int(text) if text and text.isdigit() else None


def not_run(request: Json, facts: Json) -> List[str]:
    """The parts, and paths, that gave no answer in time."""
    missing = []
    for part in request["parts"]:
        paths = request.get(part) if part in ("disk", "mounts") else None
        for key in [""] if paths is None else paths:
            answer = facts.get(part) if paths is None else facts.get(part, {}).get(key)
            if answer is None or answer.get("kind") == "timeout":
                missing.append("%s %s" % (part, key) if key else part)
    return missing


def leftovers(job: int, hook: int) -> Json:
    """Processes that still belong to a job, by its cgroup or its environment: never by its user."""
    mine = ancestors(hook) | {os.getpid()}
    found, count = [], 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) in mine:
            continue
        with contextlib.suppress(OSError, IndexError):
            name, state, parent = status(pid)
            by = belongs(pid, job) if state != "Z" and parent != hook and name != "slurmstepd" else ""
            if by:
                count += 1
                found.append({"pid": int(pid), "uid": os.stat("/proc/" + pid).st_uid, "name": name, "by": by})
    return {"count": count, "processes": found[:LEFTOVERS_LIMIT]}


def ancestors(pid: int) -> "set[int]":
    """A process and all above it."""
    chain = set()
    while pid > 0 and pid not in chain:
        chain.add(pid)
        with contextlib.suppress(OSError, IndexError):
            pid = status(str(pid))[2]
    return chain


def status(pid: str) -> Tuple[str, str, int]:
    """Name, state and parent of a process. Raises OSError."""
    left, _, right = slurp("/proc/%s/stat" % pid).decode("utf-8", "replace").rpartition(")")
    fields = right.split()
    return left.partition("(")[2], fields[0], int(fields[1])


def belongs(pid: str, job: int) -> str:
    """By what a process is a job's; empty if it is not."""
    if re.search(rb"/job_%d(?:/|$)" % job, slurp("/proc/%s/cgroup" % pid), re.MULTILINE):
        return "cgroup"
    mark = b"SLURM_JOB_ID=%d" % job
    return "environment" if mark in slurp("/proc/%s/environ" % pid).split(b"\0") else ""


def slurp(path: str) -> bytes:
    """A small file of /proc."""
    with open(path, "rb") as file:
        return file.read(OUTPUT_LIMIT)


# ------------------------------------------------------------------------------------------------------- telling


def mac(key: str, word: str, *parts: bytes) -> str:
    """The seal of a message; ``word`` keeps requests and answers apart."""
    text = b"\n".join([word.encode("ascii"), *parts])
    return hmac.new(key.encode("ascii"), text, hashlib.sha256).hexdigest()


def ask(config: Json, report: Json) -> Json:
    """Send a report; transomd's answer. Raises OSError or ValueError, also when its seal is not right."""
    host, port = address(config["url"])
    body = json.dumps(report).encode("utf-8")
    when, nonce = "%.3f" % time.time(), os.urandom(16).hex()
    seal = mac(config["key"], "transom-hook-1", when.encode(), nonce.encode(), body)
    head = (
        "POST /v1/hooks HTTP/1.0\r\nHost: transomd\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        "Authorization: Transom-Hook %s %s %s\r\n\r\n" % (len(body), when, nonce, seal)
    )
    with contextlib.closing(socket.create_connection((host, port), ANSWER)) as link:
        link.sendall(head.encode("ascii") + body)
        answer = receive(link)
    return unseal(config["key"], nonce, answer)


def address(url: str) -> Tuple[str, int]:
    """Host and port of ``http://host:port``."""
    host, _, port = url[len("http://") :].rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


def receive(link: socket.socket) -> bytes:
    """Everything until the other end closes."""
    data = b""
    while len(data) <= OUTPUT_LIMIT:
        block = link.recv(1 << 16)
        if not block:
            break
        data += block
    return data


def unseal(key: str, nonce: str, answer: bytes) -> Json:
    """The JSON object of an answer that was made with our key, for this request. Raises ValueError."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    seal = next((line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("x-transom-mac:")), "")
    if not hmac.compare_digest(seal, mac(key, "transom-answer-1", nonce.encode(), body)):
        raise ValueError("what answers is not our transomd: %s" % lines[0][:80])
    return dict(json.loads(body.decode("utf-8")))


# ------------------------------------------------------------------------------------------------------ spooling


def keep(config: Json, report: Json) -> Json:
    """Put a report aside for the next run; the oldest make room."""
    folder = spool_folder(config)
    name = "%017.3f-%s-%d.json" % (report["at"], report["kind"], os.getpid())
    part = os.path.join(folder, "." + name)
    try:
        with open(part, "wb") as file:
            file.write(json.dumps(report).encode("utf-8"))
        os.rename(part, os.path.join(folder, name))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
        for old in spooled(folder)[:-SPOOL_FILES]:
            os.unlink(os.path.join(folder, old))
    return {}


def spool_folder(config: Json) -> str:
    """The spool, made if need be. Raises OSError or ValueError when it is not this user's own folder."""
    folder = str(config["spool"])
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise ValueError("%s is not a folder of uid %d alone" % (folder, os.geteuid()))
    return folder


def spooled(folder: str) -> List[str]:
    """The reports put aside, oldest first."""
    return sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))


def flush(config: Json) -> Json:
    """Send some of what was put aside; what transomd has answered is done with, whatever it thinks of it."""
    if not os.path.isdir(config["spool"]):
        return {}
    folder = spool_folder(config)
    for name in spooled(folder)[:SPOOL_SENT]:
        path = os.path.join(folder, name)
        try:
            report = json.loads(slurp(path).decode("utf-8"))
        except ValueError:
            os.unlink(path)
            continue
        ask(config, dict(report, late=True))
        os.unlink(path)
    return {}


# ------------------------------------------------------------------------------------------------------- running


def run(kind: str, folder: str) -> Tuple[int, str]:
    """Look, tell, and say how it went: the exit status and a sentence."""
    config, error = within(CONFIG, lambda _: read_config(folder))
    if config is None:
        return 0, "nothing was done: %s" % error
    report = look(kind, folder, config)
    if kind == "healthcheck":
        time.sleep(JITTER * os.urandom(1)[0] / 256)  # Slurm starts it on every node in the same instant
    answer, error = within(ANSWER, lambda _: ask(config, report))
    if answer is None:
        _, lost = within(SPOOL, lambda _: keep(config, report))
        kept = "the report is lost: %s" % lost if lost else "the report is kept for the next run"
        return 0, "transomd at %s was not told: %s; %s" % (config["url"], error, kept)
    within(SPOOL, lambda _: flush(config))
    refuse = str(answer.get("refuse") or "") if kind == "prolog" else ""
    return (1, "refused: " + refuse) if refuse else (0, "told transomd: %s" % answer.get("said"))


def kind_of(path: str) -> str:
    """Which hook this is, by the name it is run under, else by what Slurm says; empty if neither does."""
    name = os.path.basename(path)
    return name if name in ALARM else CONTEXTS.get(os.environ.get("SLURM_SCRIPT_CONTEXT", ""), "")


def main(argv: List[str]) -> int:
    """Run as ``prolog``, ``epilog`` or ``healthcheck``, by Slurm or (with ``--say``) by hand."""
    say, kind = "--say" in argv[1:], kind_of(argv[0])
    if not say:
        silence()
    if not kind:
        sys.stderr.write("run this as prolog, epilog or healthcheck\n")
        return 0
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, ALARM[kind])
    try:
        code, sentence = run(kind, os.path.dirname(os.path.realpath(argv[0])))
    except Exception as exc:
        code, sentence = 0, "nothing was done: %s: %s" % (type(exc).__name__, exc)
    if say:
        sys.stderr.write("%s: %s\n" % (kind, sentence))
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    status_code = main(sys.argv)
    # A child that cannot be killed must not keep this process: leave without waiting for anything.
    os._exit(status_code)
