"""The probe as it runs on a node: a file given to an interpreter."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transomd.health import probe
from transomd.health.judge import judge
from transomd.health.profile import Profile
from transomd.health.scripts import END_JOB, PROBE, local_probe

EVENTS = [
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3b:00 GPU-I:02): 45, pid=4411, name=python3, Ch 0000000c",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "Out of memory: Killed process 77 (python3) total-vm:1kB",
]


def run(request: dict[str, Any], *, stdin: bool = False, python: str = sys.executable) -> dict[str, Any]:
    argv = [python, "-I", "-S", "-" if stdin else str(PROBE), json.dumps(request)]
    done = subprocess.run(argv, input=PROBE.read_text() if stdin else None, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def tool(path: Path, body: str) -> list[str]:
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return [str(path)]


@pytest.mark.parametrize("stdin", [False, True])
def test_every_part_answers(stdin: bool) -> None:
    facts = run(json.loads(Profile(mounts=("/usr",)).request()), stdin=stdin)
    assert facts["probe"] == probe.VERSION
    assert facts["uid"] == os.getuid()
    assert facts["started"] <= facts["ended"]
    assert facts["host"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["disk"]["/"]["total_mb"] == shutil.disk_usage("/").total >> 20
    assert facts["mounts"]["/usr"]["mount_point"] in ("/", "/usr")
    assert facts["memory"]["total_mb"] > facts["memory"]["available_mb"] > 0
    assert {"load", "tasks", "kernel", "gpus", "remaps", "processes"} <= set(facts)


@pytest.mark.parametrize("path", [PROBE, END_JOB])
def test_scripts_are_python_3_6(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 6))
    old = shutil.which("python3.6")
    if old and subprocess.run([old, "--version"], capture_output=True).returncode == 0:
        request = {"name": "NO_SUCH", "value": "1", "epoch": None, "deadline": 1}
        done = subprocess.run([old, str(path), json.dumps(request)], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [PROBE, END_JOB])
def test_scripts_use_the_standard_library_only(path: Path) -> None:
    tree = ast.walk(ast.parse(path.read_text()))
    names = {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    tree = ast.walk(ast.parse(path.read_text()))
    names |= {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", [PROBE, END_JOB])
def test_nothing_is_imported_from_where_a_script_lies(path: Path, tmp_path: Path) -> None:
    for name in ("json", "types", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    request = json.dumps({"parts": ["load"], "name": "NO_SUCH", "value": "1", "epoch": None, "deadline": 1})
    copy = shutil.copy(path, tmp_path)
    for argv, cwd in (([copy], "/"), (["-"], tmp_path)):
        done = subprocess.run([sys.executable, *argv, request], input=path.read_bytes(), cwd=cwd, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_a_bad_request_is_refused() -> None:
    done = subprocess.run([sys.executable, str(PROBE), "[1]"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no JSON object" in done.stderr


def test_a_missing_tool_is_absent(tmp_path: Path) -> None:
    facts = run({"parts": ["gpus"], "nvidia_smi": [str(tmp_path / "none")]})
    assert facts["gpus"]["kind"] == "absent"


def test_rows_and_columns_that_the_driver_does_not_know(tmp_path: Path) -> None:
    body = (
        'case "$1" in *clocks_event_reasons.active*)\n'
        "  echo 'Field \"clocks_event_reasons.active\" is not a valid field to query.'; exit 2;; esac\n"
        'n=$(echo "$1" | tr , "\\n" | wc -l)\n'
        'for gpu in 0 1; do printf "%s" $gpu; i=1; while [ $i -lt $n ]; do printf ", x"; i=$((i+1)); done; echo; done\n'
    )
    facts = run({"parts": ["gpus"], "nvidia_smi": tool(tmp_path / "smi", body)})
    assert [row["index"] for row in facts["gpus"]["rows"]] == ["0", "1"]
    assert facts["gpus"]["unknown"] == ["clocks_event_reasons.active"]
    assert facts["gpus"]["rows"][0]["clocks_throttle_reasons.active"] == "x"


def test_a_failing_tool_gives_its_words(tmp_path: Path) -> None:
    text = "Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error"
    facts = run({"parts": ["gpus", "load"], "nvidia_smi": tool(tmp_path / "smi", f"echo '{text}'; exit 15")})
    assert facts["gpus"]["kind"] == "failed"
    assert facts["gpus"]["notes"] == [text]
    assert "error" not in facts["load"]


def test_a_hanging_tool_costs_only_its_part(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = tool(tmp_path / "smi", f"trap '' TERM HUP INT; echo $$ >> {pid_file}; sleep 300; sleep 300")
    began = time.monotonic()
    facts = run({"parts": ["gpus", "load", "host"], "nvidia_smi": hang, "deadline": 2.0})
    assert time.monotonic() - began < 20
    assert facts["gpus"]["kind"] == "timeout"
    assert "error" not in facts["load"]
    for pid in pid_file.read_text().split():
        assert not alive(int(pid))


def alive(pid: int) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


def test_a_tool_that_floods_is_bounded(tmp_path: Path) -> None:
    facts = run({"parts": ["gpus"], "nvidia_smi": tool(tmp_path / "smi", "yes 'not a row' | head -c 3000000")})
    assert facts["gpus"]["rows"] == []
    assert len(facts["gpus"]["notes"]) == 20


def syslog(when: float, text: str, *, iso: bool) -> str:
    zone = time.strftime("%z", time.localtime(when))
    form = f"%Y-%m-%dT%H:%M:%S.123456{zone[:3]}:{zone[3:]}" if iso else "%b %e %H:%M:%S"
    return f"{time.strftime(form, time.localtime(when))} n1 kernel: [  123.456789] {text}"


@pytest.mark.parametrize("iso", [False, True])
def test_kernel_log(tmp_path: Path, iso: bool) -> None:
    now, log = time.time(), tmp_path / "kern.log"
    lines = [syslog(now, text, iso=iso) for text in EVENTS]
    lines += [syslog(now + second, EVENTS[1], iso=iso) for second in range(16)]
    lines += [syslog(now, "usb 1-1: new device", iso=iso), "broken \ufffd line with NVRM: Xid", "\x00\xff"]
    log.write_text("\n".join(lines))
    kernel = run({"parts": ["kernel"], "kernel_logs": [str(log)]})["kernel"]
    assert str(log) in kernel["sources"]
    events = {(e["kind"], e["code"]): e for e in kernel["events"] if str(log) in e["sources"]}
    assert events["xid", 79]["text"] == EVENTS[0]
    assert events["xid", 79]["pci"] == "0000:3b:00"
    assert abs(events["xid", 79]["first"] - now) < 1.5
    assert events["xid", 45]["count"] == 17
    assert events["sxid", 20034]["severity"] == "fatal"
    assert events["oom", 0]["count"] == 1


def test_kernel_log_before_boot_or_window_or_not_the_kernels(tmp_path: Path) -> None:
    now, log = time.time(), tmp_path / "kern.log"
    log.write_text(
        syslog(probe.boot_time() - 3600, EVENTS[0], iso=True)
        + "\n"
        + syslog(now - 100, EVENTS[0], iso=True)
        + "\n"
        + syslog(now, EVENTS[0], iso=False).replace(" kernel: ", " joe: ")
    )
    kernel = run({"parts": ["kernel"], "kernel_logs": [str(log)], "window": 60})["kernel"]
    assert [e for e in kernel["events"] if str(log) in e["sources"]] == []


def test_a_log_that_is_older_than_this_boot_is_no_source(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("")
    os.utime(log, (1e9, 1e9))
    kernel = run({"parts": ["kernel"], "kernel_logs": [str(log), str(tmp_path / "none")]})["kernel"]
    assert str(log) not in kernel.get("sources", [])


def test_groups_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    text = "NVRM: Xid (PCI:0000:{:02x}:00): 79, GPU has fallen off the bus."
    log.write_text("\n".join(syslog(time.time(), text.format(n), iso=True) for n in range(200)))
    kernel = run({"parts": ["kernel"], "kernel_logs": [str(log)]})["kernel"]
    assert kernel["dropped"]
    assert len([e for e in kernel["events"] if str(log) in e["sources"]]) == probe.GROUPS_LIMIT


def test_year_of_a_line_from_december() -> None:
    new_year = time.mktime((2027, 1, 1, 0, 10, 0, 0, 0, -1))
    assert probe.line_time("Dec 31 23:59:00 n1 kernel: x", new_year, 0.0)[0] == new_year - 660


def test_ring_buffer_times() -> None:
    assert probe.line_time("[   12.500000] NVRM: x", 0.0, 1000.0) == (1012.5, "NVRM: x")
    assert probe.line_time("1970-01-01T01:00:10,500000+01:00 NVRM: x", 0.0, 0.0) == (10.5, "NVRM: x")
    assert probe.line_time("1970-01-01T00:00:10Z NVRM: x", 0.0, 0.0) == (10.0, "NVRM: x")
    assert probe.line_time("no time at all", 0.0, 0.0) == (None, "no time at all")


def test_mounts(tmp_path: Path) -> None:
    facts = run({"parts": ["mounts"], "mounts": [str(tmp_path), str(tmp_path / "none"), "/proc/self/stat"]})["mounts"]
    assert facts[str(tmp_path)]["read_only"] is False
    assert facts[str(tmp_path / "none")]["errno"] == "ENOENT"
    assert "error" not in facts["/proc/self/stat"]


@pytest.fixture
def dead_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers: FUSE with nobody at the other end."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE here")
    point = tmp_path / "dead"
    point.mkdir()
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", bytes(point), b"fuse", 0, options):
        os.close(server)
        pytest.skip("not allowed to mount")
    yield point
    libc.umount2(bytes(point), 2)
    os.close(server)


def test_a_stale_mount(dead_mount: Path) -> None:
    began = time.monotonic()
    request = {"parts": ["mounts", "disk"], "mounts": [str(dead_mount), "/"], "disk": ["/"], "mount_deadline": 0.5}
    facts = run(request)
    assert time.monotonic() - began < 20
    assert facts["mounts"][str(dead_mount)]["kind"] == "timeout"
    assert facts["mounts"][str(dead_mount)]["started"] is True
    assert "error" not in facts["mounts"]["/"]


MUTE_SERVER = """
import ctypes, os, struct, sys
server = os.open("/dev/fuse", os.O_RDWR)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % server
if ctypes.CDLL(None).mount(b"mute", os.fsencode(sys.argv[1]), b"fuse", 0, options):
    sys.exit("not allowed to mount")
print("mounted", flush=True)
while True:
    request = os.read(server, 1 << 20)
    opcode, unique = struct.unpack_from("<IQ", request, 4)
    if opcode == 26:
        body = struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0, *[0] * 7)
        os.write(server, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)
"""


@pytest.fixture
def mute_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server takes each request and never answers it: not even SIGKILL ends the wait."""
    point = tmp_path / "mute"
    point.mkdir()
    server = subprocess.Popen([sys.executable, "-c", MUTE_SERVER, str(point)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    if server.stdout.readline() != "mounted\n":
        server.stdout.close()
        server.wait()
        pytest.skip("no FUSE here, or not allowed to mount")
    yield point
    server.kill()
    server.wait()
    server.stdout.close()
    ctypes.CDLL(None).umount2(bytes(point), 2)


def test_a_look_that_can_not_be_killed_is_not_made_again_and_again(mute_mount: Path) -> None:
    """Every minute one more process in state D: in a weekend, thousands on every node with that mount."""
    name = probe.mark("mounts", str(mute_mount))
    request = {"parts": ["mounts"], "mounts": [str(mute_mount)], "mount_deadline": 0.5}
    first = run(request)["mounts"][str(mute_mount)]
    assert (first["kind"], first["started"]) == ("timeout", True)
    end = time.monotonic() + 30
    while name not in probe.unkillable() and time.monotonic() < end:
        time.sleep(0.02)
    pid = probe.unkillable()[name]
    again = run(request)["mounts"][str(mute_mount)]
    assert (again["kind"], again["started"]) == ("timeout", True)
    assert again["error"] == f"process {pid} of an earlier look still hangs in the kernel"
    stats = [stat.read_text() for stat in Path("/proc").glob("[0-9]*/stat") if stat.exists()]
    assert sum(f"({name}) D " in stat for stat in stats) == 1


def test_owner_of_a_process() -> None:
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "77", "TRANSOM_JOB_ID": "j1"}
    with subprocess.Popen(["sleep", "60"], env=env) as process:
        try:
            while not Path(f"/proc/{process.pid}/environ").read_bytes():
                time.sleep(0.001)  # Popen returns amid the exec
            found = probe.owner(str(process.pid))
        finally:
            process.kill()
    assert (found["uid"], found["slurm_job"], found["transom_job"]) == (os.getuid(), "77", "j1")
    assert probe.owner("999999999") == {"uid": None, "slurm_job": "", "transom_job": ""}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_an_ordinary_user_can_probe_the_own_node() -> None:
    argv = local_probe(Profile(), python="/usr/bin/python3")
    drop = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups"]
    with PROBE.open("rb") as script:
        done = subprocess.run([*drop, *argv[:3], "-", argv[-1]], stdin=script, capture_output=True, cwd="/", timeout=60)
    facts = json.loads(done.stdout)
    report = judge("n1", facts, Profile(), now=0.0)
    assert facts["uid"] != 0
    assert report.unfit == ()
    assert "clock" not in {result.check for result in report.results}


def test_judging_on_a_node_needs_no_ssh() -> None:
    code = "import sys, transomd.health.judge, transomd.health.scripts; print('asyncssh' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
