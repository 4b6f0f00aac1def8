"""Every state of Slurm's own lists is read, and only what has ended for good counts as ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transom_slurm.states import (
    SLURM_REASONS,
    DrainRecord,
    ReasonSource,
    drain_is_own,
    drain_refusal,
    job_waiting,
    parse_job_status,
    parse_node_status,
    reason_source,
)
from transom_slurm.statewords import JOB_BASES, JOB_FLAGS, NODE_BASES, NODE_FLAGS, job_ended
from transom_slurm.types import JobBase, JobStatus, NodeStatus, SlurmNode

ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
LIVE_FLAGS = {
    "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "EXPEDITING", "POWER_UP_NODE", "CONFIGURING", "STOPPED", "REVOKED", "RESV_DEL_HOLD",
}  # fmt: skip
CODES = (
    "CG SO CF RS RQ RF RH SE ST RV RD SI PD R S CD CA F TO NF PR BF DL OOM".split()  # noqa: SIM905 - as in the manual
)


DOCS = Path(__file__).parents[2] / "docs" / "slurm.md"


def test_the_documentation_shows_the_same_tables() -> None:
    text = DOCS.read_text()
    for job in (*JOB_BASES, *JOB_FLAGS):
        assert f"| {job.word} | {job.code} | {'no' if job.live else 'yes'} | {job.meaning} |\n" in text
    for node in NODE_FLAGS:
        sign = f"`{node.suffix}`" if node.suffix else ""
        assert f"| {node.word} | {sign} | {'yes' if node.foreign else 'no'} | {node.meaning} |\n" in text


def test_the_table_holds_every_word_of_the_manual_once() -> None:
    words = [w.word for w in (*JOB_BASES, *JOB_FLAGS)]
    assert len(words) == len(set(words)) == 12 + 18
    assert sorted(w.code for w in (*JOB_BASES, *JOB_FLAGS) if w.code) == sorted(CODES)
    assert {JobBase(w.word) for w in JOB_BASES} == set(JobBase) - {JobBase.UNKNOWN}


@pytest.mark.parametrize("base", JOB_BASES, ids=lambda w: w.word)
def test_every_base_state_in_every_spelling(base: object) -> None:
    word, code = base.word, base.code  # type: ignore[attr-defined]
    status = JobStatus(JobBase(word))
    for text in (word, word.lower(), code, [word], f"{word} by 1000"):
        assert parse_job_status(text) == status
    assert status.terminal is (word in ENDED)


@pytest.mark.parametrize("flag", JOB_FLAGS, ids=lambda w: w.word)
def test_every_flag_alone_and_with_every_base(flag: object) -> None:
    word, code = flag.word, flag.code  # type: ignore[attr-defined]
    for text in [word] + ([code] if code else []):
        assert parse_job_status(text) == JobStatus(JobBase.UNKNOWN, frozenset({word}))
        assert not parse_job_status(text).terminal
    for base in JOB_BASES:
        joined, listed = parse_job_status(f"{base.word}+{word}"), parse_job_status([base.word, word])
        assert joined == listed == JobStatus(JobBase(base.word), frozenset({word}))
        assert joined.terminal is (base.word in ENDED and word not in LIVE_FLAGS)


def test_preempted_is_an_end_only_without_requeue() -> None:
    assert not parse_job_status("PREEMPTED").terminal
    assert job_ended("PREEMPTED", (), may_requeue=False)
    assert not job_ended("PREEMPTED", ("COMPLETING",), may_requeue=False)


@pytest.mark.parametrize(
    "text", ["", "FROBNICATED", "CANCELLED+FROBNICATED", ["FAILED", "NEWFLAG"], "COMPLETED+FAILED"]
)
def test_what_is_not_understood_never_counts_as_ended(text: str | list[str]) -> None:
    assert not parse_job_status(text).terminal


def test_an_unknown_word_is_kept() -> None:
    assert parse_job_status("Frobnicated") == JobStatus(JobBase.UNKNOWN, frozenset({"FROBNICATED"}))


def test_waiting_in_the_queue() -> None:
    assert all(job_waiting(parse_job_status(t)) for t in ("PD", "REQUEUE_HOLD", "SPECIAL_EXIT", "RQ"))
    assert not any(job_waiting(parse_job_status(t)) for t in ("R", "CG", "PENDING+COMPLETING", "CF", "", "NEW"))


@pytest.mark.parametrize("base", NODE_BASES)
def test_every_node_base(base: str) -> None:
    assert parse_node_status(base) == parse_node_status([base]) == NodeStatus(base)
    assert NodeStatus(base).reserved_for_people is (base == "FUTURE")


@pytest.mark.parametrize("flag", NODE_FLAGS, ids=lambda w: w.word)
def test_every_node_flag(flag: object) -> None:
    word, foreign = flag.word, flag.foreign  # type: ignore[attr-defined]
    status = parse_node_status(f"IDLE+{word}")
    assert status == NodeStatus("IDLE", frozenset({word}))
    assert status.reserved_for_people is foreign


@pytest.mark.parametrize(
    ("suffix", "flag"),
    [("*", "NOT_RESPONDING"), ("~", "POWERED_DOWN"), ("#", "POWERING_UP"), ("!", "POWER_DOWN"), ("%", "POWERING_DOWN"),
     ("$", "MAINTENANCE"), ("@", "REBOOT_REQUESTED"), ("^", "REBOOT_ISSUED"), ("-", "PLANNED"), ("+", "COMPLETING")],
)  # fmt: skip
def test_every_suffix(suffix: str, flag: str) -> None:
    assert parse_node_status(f"mix{suffix}") == NodeStatus("MIXED", frozenset({flag}))


@pytest.mark.parametrize(
    ("text", "base", "flags"),
    [
        ("DOWN*+DRAIN", "DOWN", {"NOT_RESPONDING", "DRAIN"}),
        ("MIXED+NOT_RESPONDING", "MIXED", {"NOT_RESPONDING"}),
        ("IDLE+DRAIN+MAINTENANCE+RESERVED", "IDLE", {"DRAIN", "MAINTENANCE", "RESERVED"}),
        ("drng", "ALLOCATED", {"DRAIN"}),
        ("drained*", "IDLE", {"DRAIN", "NOT_RESPONDING"}),
        ("failg", "ALLOCATED", {"FAIL"}),
        ("maint", "UNKNOWN", {"MAINTENANCE"}),
        ("resv", "IDLE", {"RESERVED"}),
        ("plnd", "IDLE", {"PLANNED"}),
        ("block", "IDLE", {"BLOCKED"}),
        ("inval", "UNKNOWN", {"INVALID_REG"}),
        ("boot^", "UNKNOWN", {"REBOOT_REQUESTED", "REBOOT_ISSUED"}),
        ("comp", "UNKNOWN", {"COMPLETING"}),
        ("futr", "FUTURE", set()),
        ("unk*", "UNKNOWN", {"NOT_RESPONDING"}),
    ],
)
def test_texts_of_sinfo_and_scontrol(text: str, base: str, flags: set[str]) -> None:
    assert parse_node_status(text) == NodeStatus(base, frozenset(flags))


def test_drained_is_not_draining() -> None:
    assert parse_node_status("IDLE+DRAIN").drained
    assert not parse_node_status("ALLOCATED+DRAIN").drained
    assert not parse_node_status("IDLE+COMPLETING+DRAIN").drained


def test_a_node_with_a_flag_never_heard_of_is_left_alone() -> None:
    assert parse_node_status("IDLE+NEW_IN_2030").reserved_for_people


@pytest.mark.parametrize("text", SLURM_REASONS)
def test_reasons_of_slurm_itself(text: str) -> None:
    assert reason_source(text.capitalize() + " (7 < 8)") is ReasonSource.SLURM


def test_reasons_of_others() -> None:
    assert reason_source("transom[xid] Xid 79 job=7 ev=1") is ReasonSource.OWN
    assert reason_source("disk swap, ask Bob") is ReasonSource.PERSON
    assert reason_source("please drain: transom[xid] again") is ReasonSource.PERSON
    assert reason_source("") is reason_source("(null)") is ReasonSource.NONE


NODE = SlurmNode("n1", parse_node_status("IDLE+DRAIN"), "IDLE+DRAIN", "transom[xid] Xid 79", "root", 1_700_000_000.0)
RECORD = DrainRecord("transom[xid] Xid 79", "root", 1_700_000_000.0)


def test_a_drain_is_own_only_as_it_was_written() -> None:
    assert drain_is_own(NODE, RECORD)
    assert not drain_is_own(NODE, None)
    for changed in (
        replace(NODE, reason="transom[xid] Xid 79, RMA 4711"),
        replace(NODE, reason_user="alice"),
        replace(NODE, reason_time=1_700_000_001.0),
        replace(NODE, reason_time=None),
        replace(NODE, status=parse_node_status("IDLE")),
    ):
        assert not drain_is_own(changed, RECORD)


def test_who_may_not_be_drained() -> None:
    idle = replace(NODE, status=parse_node_status("IDLE"), state_text="IDLE", reason="")
    silent = replace(idle, status=parse_node_status("DOWN+NOT_RESPONDING"), reason="Not responding")
    assert drain_refusal(idle) == drain_refusal(silent) == ""
    assert drain_refusal(NODE) == "n1 is IDLE+DRAIN"
    assert "alice wrote: swap" in drain_refusal(replace(silent, reason="swap", reason_user="alice"))
