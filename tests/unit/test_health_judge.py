"""From facts to results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transomd.errors import SpecError
from transomd.health.judge import judge, unreached
from transomd.health.profile import CHECKS, Profile
from transomd.health.types import CheckResult, NodeReport
from transomd.health.xid import CATALOGUE, Bucket, lookup
from transomd.tee.catalogue import load
from transomd.words import Action, CheckMode, Outcome

FIT, UNFIT, UNKNOWN = Outcome.FIT, Outcome.UNFIT, Outcome.UNKNOWN
Facts = dict[str, Any]
ABSENT = {"error": "no nvidia-smi", "kind": "absent"}


def gpu(index: int, **more: str) -> dict[str, str]:
    row = {
        "index": str(index),
        "pci.bus_id": f"00000000:{index:02X}:00.0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "clocks_event_reasons.active": "0x0000000000000001",
    }
    return row | {key.replace("__", "."): value for key, value in more.items()}


def remap(index: int, failure: str = "No", pending: str = "No") -> dict[str, str]:
    return {"gpu_bus_id": f"{index}", "remapped_rows.failure": failure, "remapped_rows.pending": pending}


def facts(gpus: int = 8) -> Facts:
    disk = {"total_mb": 1000, "free_mb": 500, "inodes": 1000, "inodes_free": 500, "read_only": False}
    return {
        "probe": 1,
        "started": 1000.2,
        "ended": 1000.4,
        "head": {"sent": 1000.0, "received": 1000.5},
        "gpus": {"rows": [gpu(index) for index in range(gpus)], "notes": [], "unknown": [], "exit": 0},
        "remaps": {"rows": [remap(index) for index in range(gpus)], "notes": [], "unknown": [], "exit": 0},
        "processes": {"rows": [], "notes": [], "unknown": [], "exit": 0},
        "kernel": {"sources": ["dmesg"], "events": [], "dropped": False},
        "disk": {"/": dict(disk), "/tmp": dict(disk)},
        "mounts": {"/tmp": dict(disk), "/shared": dict(disk)},
        "memory": {"total_mb": 1000, "available_mb": 900},
    }


def event(code: int, kind: str = "xid", severity: str = "", last: float = 500.0, text: str = "") -> Facts:
    text = text or f"NVRM: Xid (PCI:0000:3b:00): {code}, words"
    times = {"count": 1, "first": last, "last": last, "sources": ["dmesg"]}
    return {"kind": kind, "code": code, "pci": "0000:3b:00", "severity": severity, "text": text, **times}


def report(found: Facts, profile: Profile | None = None, **more: Any) -> NodeReport:
    return judge("n1", found, profile or Profile(), now=1001.0, **({"allocated_gpus": 8} | more))


def one(check: str, found: Facts, profile: Profile | None = None, **more: Any) -> CheckResult | None:
    return next((r for r in report(found, profile, **more).results if r.check == check), None)


def outcome(check: str, found: Facts, profile: Profile | None = None, **more: Any) -> Outcome | None:
    result = one(check, found, profile, **more)
    return None if result is None else result.outcome


def test_a_good_node_is_fit_in_every_check() -> None:
    profile = Profile(memory_total_min_mb=1, mounts=("/shared",))
    good = report(facts(), profile)
    assert good.outcome is FIT
    assert {result.check for result in good.results} == set(CHECKS)
    assert all(result.evidence == "" for result in good.results)


def test_unreached_is_unknown() -> None:
    lost = unreached("n1", "no answer", now=5.0)
    assert (lost.outcome, lost.reached, lost.unfit) == (UNKNOWN, False, ())


def test_another_probe_version_is_unknown() -> None:
    assert report(facts() | {"probe": 2}).outcome is UNKNOWN
    assert report({}).outcome is UNKNOWN


@pytest.mark.parametrize("part", ["gpus", "remaps", "processes", "kernel", "disk", "mounts"])
@pytest.mark.parametrize(
    "wreck", [lambda f, p: f.pop(p), lambda f, p: f.update({p: None}), lambda f, p: f.update({p: 7})]
)
def test_a_wrecked_part_is_unknown_never_unfit(part: str, wreck: Callable[[Facts, str], None]) -> None:
    found = facts()
    wreck(found, part)
    assert report(found).outcome is UNKNOWN


@pytest.mark.parametrize("part", ["gpus", "remaps", "processes", "kernel"])
@pytest.mark.parametrize("kind", ["absent", "timeout", "failed"])
def test_a_failed_part_is_unknown_never_unfit(part: str, kind: str) -> None:
    found = facts()
    found[part] = {"error": "no answer after 7.5 s", "kind": kind, "started": True}
    assert report(found).outcome is UNKNOWN


def test_a_node_without_gpus_is_fit() -> None:
    found = facts() | {"gpus": ABSENT, "remaps": ABSENT, "processes": ABSENT}
    assert report(found, allocated_gpus=None).outcome is FIT
    assert report(found, allocated_gpus=0).outcome is FIT
    assert outcome("gpu-count", found, allocated_gpus=8) is UNKNOWN


@pytest.mark.parametrize(
    ("present", "wanted", "expected"), [(8, 8, FIT), (8, 4, FIT), (7, 8, UNFIT), (0, 8, UNFIT), (7, None, None)]
)
def test_gpu_count(present: int, wanted: int | None, expected: Outcome | None) -> None:
    assert outcome("gpu-count", facts(present), allocated_gpus=wanted) is expected


def test_gpu_count_of_the_profile_and_of_the_allocation() -> None:
    assert outcome("gpu-count", facts(7), Profile(gpus=8), allocated_gpus=None) is UNFIT
    assert outcome("gpu-count", facts(7), Profile(gpus=8), allocated_gpus=4) is FIT


@pytest.mark.parametrize("rows", [0, 7])
def test_a_lost_gpu_is_unfit_even_when_nobody_counts(rows: int) -> None:
    found = facts(rows)
    text = "Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error"
    found["gpus"] |= {"notes": [text]} if rows else {"error": "exit 15", "kind": "failed", "notes": [text]}
    result = one("gpu-count", found, allocated_gpus=None)
    assert result is not None
    assert (result.outcome, result.signature, result.evidence) == (UNFIT, "NVML-LOST", text)


def test_a_driver_that_does_not_match_is_unfit_where_gpus_are_expected() -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch"
    found = facts() | {"gpus": {"error": text, "kind": "failed", "notes": [text]}}
    result = one("gpu-count", found)
    assert result is not None
    assert (result.outcome, result.signature) == (UNFIT, "NVML-MISMATCH")
    assert outcome("gpu-count", found, allocated_gpus=None) is UNKNOWN


@pytest.mark.parametrize("xid", CATALOGUE.values(), ids=lambda xid: f"xid{xid.code}")
def test_every_xid_by_its_bucket(xid: Any) -> None:
    found = facts()
    found["kernel"]["events"] = [event(xid.code)]
    assert outcome("xid", found) is (UNFIT if xid.bucket is Bucket.FATAL else FIT)
    assert outcome("xid-reset", found) is (UNFIT if xid.bucket is Bucket.RESET else FIT)


def test_the_log_reader_and_the_judge_agree_on_every_xid() -> None:
    known = load()
    acts = {Action.DRAIN: Bucket.FATAL, Action.EXCLUDE: Bucket.RESET}
    for code, signature in known.xids.items():
        severity = "fatal" if code in range(144, 151) else ""
        harmful = lookup(code, severity).bucket if lookup(code, severity).bucket in acts.values() else None
        assert harmful is acts.get(signature.action), code
    names = {signature.id for signature in known.signatures}
    assert {"NVML-LOST", "NVRM-BUS", "NVRM-RMINIT", "NVRM-RESET-REQUIRED", "SXID-FATAL"} <= names


@pytest.mark.parametrize("code", [48, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143, 158])
def test_fatal_codes(code: int) -> None:
    assert lookup(code).bucket is Bucket.FATAL


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 92, 94, 121, 137, 154, 9999])
def test_codes_that_never_make_a_node_unfit(code: int) -> None:
    assert lookup(code).bucket not in (Bucket.FATAL, Bucket.RESET)


def test_nvlink_codes_are_fatal_by_their_line() -> None:
    assert lookup(149, "fatal").bucket is Bucket.FATAL
    assert lookup(149, "nonfatal").bucket is Bucket.WATCH
    found = facts()
    found["kernel"]["events"] = [event(149, severity="fatal")]
    result = one("xid", found)
    assert result is not None
    assert result.signature == "XID-149"


def test_xid_evidence_is_the_earliest_and_echoes_do_not_count() -> None:
    found = facts()
    found["kernel"]["events"] = [event(45, last=400.0), event(95, last=600.0), event(48, last=500.0)]
    result = one("xid", found)
    assert result is not None
    assert (result.signature, result.value) == ("XID-48", "Xid 95, Xid 48")


def test_a_cleared_xid_counts_no_more_but_a_new_one_does() -> None:
    found = facts()
    found["kernel"]["events"] = [event(79, last=500.0)]
    assert outcome("xid", found, cleared_at=500.0) is FIT
    assert outcome("xid", found, cleared_at=499.0) is UNFIT


@pytest.mark.parametrize(
    ("found_event", "signature"),
    [
        (event(20034, "sxid", "fatal"), "SXID-FATAL"),
        (event(0, "nvrm", text="NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x55:2477)"), "NVRM-RMINIT"),
        (event(0, "nvrm", text="NVRM: fallen off the bus and is not responding to commands."), "NVRM-BUS"),
        (event(20034, "sxid", "nonfatal"), ""),
        (event(0, "oom", text="Out of memory: Killed process 1"), ""),
    ],
)
def test_other_kernel_events(found_event: Facts, signature: str) -> None:
    found = facts()
    found["kernel"]["events"] = [found_event]
    result = one("xid", found)
    assert result is not None
    assert (result.outcome, result.signature) == (UNFIT if signature else FIT, signature)


@pytest.mark.parametrize(("cell", "expected"), [("0", FIT), ("1", UNFIT), ("[N/A]", FIT), ("ERR!", FIT)])
def test_ecc(cell: str, expected: Outcome) -> None:
    found = facts()
    found["gpus"]["rows"][3]["ecc.errors.uncorrected.volatile.total"] = cell
    assert outcome("ecc", found) is expected
    assert outcome("ecc", found, Profile(ecc_uncorrected_max=1)) is FIT


def test_checks_without_their_column_say_nothing() -> None:
    found = facts()
    for row in found["gpus"]["rows"]:
        row["ecc.errors.uncorrected.volatile.total"] = "[N/A]"
        del row["clocks_event_reasons.active"]
    for row in found["remaps"]["rows"]:
        row["remapped_rows.failure"] = "[N/A]"
    assert {"ecc", "throttle", "row-remap"} & {result.check for result in report(found).results} == set()
    assert report(found).outcome is FIT


@pytest.mark.parametrize(
    ("failure", "pending", "expected"), [("No", "Yes", FIT), ("Yes", "No", UNFIT), ("1", "0", UNFIT), ("0", "1", FIT)]
)
def test_row_remap(failure: str, pending: str, expected: Outcome) -> None:
    found = facts()
    found["remaps"]["rows"][0] = remap(0, failure, pending)
    assert outcome("row-remap", found) is expected


def test_a_driver_without_row_remapping_says_nothing() -> None:
    found = facts() | {"remaps": {"error": "exit 1", "kind": "failed", "notes": ["Invalid combination"], "exit": 1}}
    assert outcome("row-remap", found) is None


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0x0, FIT),
        (0x1, FIT),
        (0x2, FIT),
        (0x4, FIT),
        (0x10, FIT),
        (0x20, FIT),
        (0x100, FIT),
        (0x8, UNFIT),
        (0x40, UNFIT),
        (0x84, UNFIT),
    ],
)
@pytest.mark.parametrize("column", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_throttle(mask: int, expected: Outcome, column: str) -> None:
    found = facts()
    del found["gpus"]["rows"][5]["clocks_event_reasons.active"]
    found["gpus"]["rows"][5][column] = f"0x{mask:016x}"
    assert outcome("throttle", found) is expected


def process(uid: int | None = 1000, job: str = "", name: str = "/usr/bin/python3") -> Facts:
    return {"pid": "7", "process_name": name, "uid": uid, "slurm_job": job, "transom_job": ""}


@pytest.mark.parametrize(
    ("row", "job", "expected"),
    [
        (process(), None, UNFIT),
        (process(job="5"), None, FIT),
        (process(job="5"), 5, FIT),
        (process(job="5"), 6, UNFIT),
        (process(uid=0), 6, FIT),
        (process(uid=None), None, FIT),
        (process(name="/opt/dcgm/nv-hostengine"), 6, FIT),
    ],
)
def test_processes(row: Facts, job: int | None, expected: Outcome) -> None:
    found = facts()
    found["processes"]["rows"] = [row]
    profile = Profile(gpu_process_allow=("nv-hostengine",))
    assert outcome("processes", found, profile, slurm_job=job) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"free_mb": 19}, UNFIT),
        ({"free_mb": 20}, FIT),
        ({"inodes_free": 19}, UNFIT),
        ({"inodes": 0, "inodes_free": 0}, FIT),
        ({"error": "no answer after 3.0 s", "kind": "timeout", "started": True}, UNKNOWN),
    ],
)
def test_disk(changes: Facts, expected: Outcome) -> None:
    found = facts()
    found["disk"]["/tmp"] |= changes
    assert outcome("disk", found) is expected


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ({"error": "no answer after 3.0 s", "kind": "timeout", "started": True}, UNFIT),
        ({"error": "no answer after 3.0 s", "kind": "timeout", "started": False}, UNKNOWN),
        ({"error": "Stale file handle", "kind": "failed", "errno": "ESTALE"}, UNFIT),
        ({"error": "No such file or directory", "kind": "failed", "errno": "ENOENT"}, UNFIT),
        ({"error": "Permission denied", "kind": "failed", "errno": "EACCES"}, UNKNOWN),
        ({"read_only": True}, FIT),
        ({"read_only": False}, FIT),
    ],
)
def test_mounts(fact: Facts, expected: Outcome) -> None:
    found = facts()
    found["mounts"]["/shared"] = fact
    assert outcome("mounts", found, Profile(mounts=("/shared",))) is expected


def test_a_read_only_mount_that_must_be_writable() -> None:
    found = facts()
    found["mounts"]["/shared"]["read_only"] = True
    assert outcome("mounts", found, Profile(writable=("/shared",))) is UNFIT


def test_memory() -> None:
    assert outcome("memory", facts()) is None
    assert outcome("memory", facts(), Profile(memory_total_min_mb=1000)) is FIT
    assert outcome("memory", facts(), Profile(memory_total_min_mb=1001)) is UNFIT
    assert outcome("memory", facts(), Profile(memory_available_min_mb=901)) is UNFIT
    found = facts() | {"memory": {"error": "?", "kind": "failed"}}
    assert outcome("memory", found, Profile(memory_total_min_mb=1)) is UNKNOWN


@pytest.mark.parametrize(
    ("offset", "delay", "expected"),
    [
        (0.0, 0.1, FIT),
        (4.0, 0.1, FIT),
        (-4.0, 0.1, FIT),
        (6.0, 0.1, UNFIT),
        (-6.0, 0.1, UNFIT),
        (4.0, 8.0, UNKNOWN),
        (60.0, 8.0, UNFIT),
    ],
)
def test_clock_is_bounded_by_the_round_trip(offset: float, delay: float, expected: Outcome) -> None:
    head = {"sent": 1000.0, "received": 1000.2 + 2 * delay}
    found = facts() | {"head": head, "started": 1000.0 + delay + offset, "ended": 1000.2 + delay + offset}
    assert outcome("clock", found) is expected


def test_without_a_head_there_is_no_clock_check() -> None:
    found = facts()
    del found["head"]
    assert outcome("clock", found) is None


def test_a_check_that_is_off_is_neither_probed_nor_judged() -> None:
    modes = dict.fromkeys(("gpu-count", "ecc", "throttle", "processes", "row-remap"), CheckMode.OFF)
    profile = Profile(modes=modes)
    assert '"gpus"' not in profile.request()
    assert outcome("gpu-count", facts(0), profile) is None
    assert profile.mode("xid") is CheckMode.OBSERVE


def test_a_profile_tells_all_its_faults_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Profile(modes={"no-such": CheckMode.DRAIN}, disk_free_min=2.0, gpus=-1, mounts=("here",), clock_offset_max=0)
    assert len(caught.value.faults) == 5


DOCS = Path(__file__).resolve().parents[2] / "docs/checks.md"


def test_the_page_names_every_check() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert [check for check in CHECKS if f"| `{check}` |" not in page] == []


@pytest.mark.parametrize("bucket", Bucket)
def test_the_page_has_the_codes_of_every_bucket(bucket: Bucket) -> None:
    row = next(line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {bucket.value}"))
    codes = {int(code) for code in re.findall(r"\b\d+\b", row.split("|")[2].partition(";")[0])}
    table = {xid.code for xid in CATALOGUE.values() if xid.bucket is bucket}
    assert codes == table - set(range(144, 151))
