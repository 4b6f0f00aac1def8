"""What transomd makes of the hooks' reports: seals, episodes, drains and comments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transom_slurm.hooks import hook
from transom_slurm.states import parse_node_status
from transom_slurm.types import SlurmNode

from transomd.api.hooks import WINDOW_S, Seal, read_report
from transomd.errors import RefusedError, UsageError
from transomd.health.types import CheckResult, NodeReport
from transomd.settings import Settings, parse_settings
from transomd.tol import findings as rules
from transomd.tol.findings import NodeFindings
from transomd.words import Outcome

KEY = "0123456789abcdef" * 4
NOW = 1_795_986_000.0
BODY = b'{"kind": "prolog"}'


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "hooks.key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


def header(body: bytes = BODY, *, at: float = NOW, nonce: str = "", key: str = KEY) -> str:
    """As the program on the node makes it."""
    when, nonce = f"{at:.3f}", nonce or os.urandom(16).hex()
    return f"Transom-Hook {when} {nonce} {hook.mac(key, 'transom-hook-1', when.encode(), nonce.encode(), body)}"


def test_a_sealed_report_is_taken_once_and_its_answer_is_sealed(key: Path) -> None:
    seal = Seal(key, Clock())
    sent = header()
    nonce = seal.open(sent, BODY)
    with pytest.raises(RefusedError, match="taken already"):
        seal.open(sent, BODY)
    answer = b'{"said": "fit"}'
    head = f"HTTP/1.0 200 OK\r\nX-Transom-Mac: {seal.answer(nonce, answer)}\r\n\r\n".encode()
    assert hook.unseal(KEY, nonce, head + answer) == {"said": "fit"}
    for other in (head + b'{"said": "no!"}', answer):
        with pytest.raises(ValueError, match="not our transomd"):
            hook.unseal(KEY, nonce, other)
    with pytest.raises(ValueError, match="not our transomd"):
        hook.unseal(KEY, "00" * 16, head + answer)


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "Bearer x",
        header(b"another body"),
        header(key="another" * 8),
        header().replace("Transom-Hook 1", "Transom-Hook 2"),
        header(at=NOW - WINDOW_S - 1),
        header(at=NOW + WINDOW_S + 1),
        header() + "\n",
    ],
)
def test_what_is_not_sealed_rightly_is_refused(sent: str, key: Path) -> None:
    with pytest.raises(RefusedError):
        Seal(key, Clock()).open(sent, BODY)


def test_old_nonces_are_forgotten_when_they_cannot_come_again(key: Path) -> None:
    clock = Clock()
    seal = Seal(key, clock)
    for _ in range(50):
        seal.open(header(), BODY)
    clock.now += 2 * WINDOW_S + 1
    seal.open(header(at=clock.now), BODY)
    assert len(seal._seen) == 1


def test_a_key_is_read_anew_and_must_be_nobody_elses(key: Path) -> None:
    seal = Seal(key, Clock())
    key.write_text("f" * 64)
    os.utime(key, ns=(1, 1))
    seal.open(header(key="f" * 64), BODY)
    key.chmod(0o640)
    with pytest.raises(RefusedError, match="others may read"):
        seal.open(header(key="f" * 64), BODY)
    key.unlink()
    with pytest.raises(RefusedError, match="there is no hooks' key"):
        seal.open(header(key="f" * 64), BODY)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"version": 2, "kind": "prolog", "node": "n1", "at": 1}',
        b'{"version": 1, "kind": "shell", "node": "n1", "at": 1}',
        b'{"version": 1, "kind": "prolog", "at": 1}',
        b'{"version": 1, "kind": "prolog", "node": "n1", "at": 1, "facts": [1]}',
        b"\xff",
    ],
)
def test_a_report_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(UsageError):
        read_report(body)


def result(check: str, outcome: Outcome, evidence: str = "") -> CheckResult:
    return CheckResult(check=check, outcome=outcome, evidence=evidence)


def absorbed(old: NodeFindings, at: float, *results: CheckResult) -> NodeFindings:
    return rules.absorb(old, NodeReport(node="n1", at=at, reached=True, results=results), 7)[0]


def site(**modes: str) -> Settings:
    lines = "\n".join(f'{check.replace("_", "-")} = "{mode}"' for check, mode in modes.items())
    return parse_settings(f"[health.modes]\n{lines}\n[hooks]\nenforce = true\n")


def node(name: str = "n1", state: str = "ALLOCATED", **more: Any) -> dict[str, SlurmNode]:
    return {name: SlurmNode(name=name, status=parse_node_status(state), state_text=state, **more)}


NEW = NodeFindings(node="n1")
BAD = result("gpu-count", Outcome.UNFIT, "shows 7")


def test_an_episode_is_one_drain_with_one_key_until_the_check_is_fit() -> None:
    settings = site(gpu_count="drain")
    first = absorbed(NEW, 1.0, BAD)
    later = absorbed(first, 50.0, result("gpu-count", Outcome.UNFIT, "shows 6"))
    unsure = absorbed(later, 60.0, result("gpu-count", Outcome.UNKNOWN, "no answer"))
    keys = {rules.propose([f], node(), settings, 99.0)[0].key for f in (first, later, unsure)}
    assert keys == {"drain:n1:gpu-count:1"}
    assert unsure.episodes["gpu-count"].evidence == "shows 7", "a comment must not change with every report"
    well = absorbed(unsure, 70.0, result("gpu-count", Outcome.FIT))
    assert rules.propose([well], node(), settings, 99.0) == ()
    again = absorbed(well, 80.0, BAD)
    assert rules.propose([again], node(), settings, 99.0)[0].key == "drain:n1:gpu-count:80"
    stored = json.loads(json.dumps({"episodes": {c: e.to_json() for c, e in later.episodes.items()}}))
    assert rules.read_episodes(stored) == later.episodes


def test_unknown_drains_nothing_and_a_passing_trouble_needs_two_reports() -> None:
    settings = site(gpu_count="drain", disk="drain")
    assert rules.propose([absorbed(NEW, 1.0, result("gpu-count", Outcome.UNKNOWN))], node(), settings, 9.0) == ()
    once = absorbed(NEW, 1.0, result("disk", Outcome.UNFIT, "1% free"))
    assert rules.propose([once], node(), settings, 9.0) == ()
    twice = absorbed(once, 2.0, result("disk", Outcome.UNFIT, "1% free"))
    assert [intent.args["check"] for intent in rules.propose([twice], node(), settings, 9.0)] == ["disk"]


def test_nothing_is_drained_for_what_was_so_long_ago() -> None:
    """As after a daemon that was away: the episode is still open, and nobody has seen the node since."""
    found, settings = [absorbed(NEW, 1.0, BAD)], site(gpu_count="drain")
    assert rules.propose(found, node(), settings, 1.0 + rules.FRESH_S)
    assert rules.propose(found, node(), settings, 2.0 + rules.FRESH_S) == ()


def test_nothing_is_drained_for_what_was_found_before_a_person_put_the_node_back() -> None:
    found, settings = absorbed(NEW, 1.0, BAD), site(gpu_count="drain")
    assert rules.propose([found], node(), settings, 9.0, cleared_at={"n1": 5.0}) == ()
    assert rules.propose([found], node(), settings, 9.0, cleared_at={"n1": 0.5})
    assert rules.propose([absorbed(found, 6.0, BAD)], node(), settings, 9.0, cleared_at={"n1": 5.0})


def test_a_probe_that_failed_is_forgotten_with_the_next_that_did_not() -> None:
    failed = absorbed(NEW, 1.0, result("probe", Outcome.UNKNOWN))
    assert set(failed.results) == {"probe"}
    assert set(absorbed(failed, 2.0, BAD).results) == {"gpu-count"}


@pytest.mark.parametrize("mode", ["observe", "comment", "off"])
def test_other_modes_drain_nothing(mode: str) -> None:
    assert rules.propose([absorbed(NEW, 1.0, BAD)], node(), site(gpu_count=mode), 9.0) == ()


def test_nothing_is_proposed_for_a_node_that_is_out_of_service_or_unknown() -> None:
    found, settings = [absorbed(NEW, 1.0, BAD)], site(gpu_count="drain")
    assert rules.propose(found, node(state="IDLE+DRAIN", reason="fan"), settings, 9.0) == ()
    assert rules.propose(found, node("n2"), settings, 9.0) == ()
    assert rules.propose(found, None, settings, 9.0) == ()


def test_slurm_gets_time_to_drain_by_itself_where_a_prolog_fails() -> None:
    found, enforcing = [absorbed(NEW, 1.0, BAD)], site(gpu_count="drain")
    (intent,) = rules.propose(found, node(), enforcing, 9.0, {"n1": 42})
    assert intent.not_before == 9.0 + rules.PROLOG_GRACE_S
    assert intent.args["reason_over"] == "transom[gpu-count] Prolog error job=42: shows 7", "the job that was refused"
    settings = parse_settings('[health.modes]\ngpu-count = "drain"\n')
    for site_file, refusing in ((enforcing, {}), (settings, {"n1": 42})):
        (other,) = rules.propose(found, node(), site_file, 9.0, refusing)
        assert "over" not in other.args, "no prolog of ours fails"
        assert other.not_before == 0.0


@pytest.mark.parametrize(
    ("reason", "at", "ours"),
    [
        ("Prolog error", 9.0, True),
        ("Prolog error", 9.0 + rules.PROLOG_DRAINS_S, True),
        ("Prolog error", 8.0, False),
        ("Prolog error", 10.0 + rules.PROLOG_DRAINS_S, False),
        ("Prolog error", None, False),
        ("fan", 9.0, False),
    ],
)
def test_only_what_follows_our_answer_at_once_is_our_prologs_doing(reason: str, at: float | None, ours: bool) -> None:
    """A site has prologs of its own, and Slurm has the same two words for every one that fails."""
    (intent,) = rules.propose([absorbed(NEW, 1.0, BAD)], node(), site(gpu_count="drain"), 9.4, {"n1": 42})
    drained = node(state="IDLE+DRAIN", reason=reason, reason_time=at)
    assert rules.fell_to_our_prolog(drained["n1"], intent.args) is ours
    assert not rules.fell_to_our_prolog(drained["n1"], {**intent.args, "over_since": None})
    assert rules.propose([absorbed(NEW, 1.0, BAD)], drained, site(gpu_count="drain"), 9.4, {"n1": 42}) == ()


def test_comments_are_as_they_should_be_and_never_over_a_persons() -> None:
    settings = site(gpu_count="comment", disk="comment")
    found = absorbed(NEW, 1.0, BAD, result("disk", Outcome.UNFIT, "1% free"))
    text = "transom[disk] 1% free; transom[gpu-count] shows 7"

    def wanted(comment: str, findings: NodeFindings = found, pending: Any = ()) -> list[str]:
        told = rules.propose_comments([findings], node(comment=comment), settings, pending, 9.0)
        return [str(intent.args["text"]) for intent in told]

    assert wanted("") == [text]
    assert wanted("transom[disk] older") == [text]
    assert wanted(text) == []
    assert wanted("on loan to Eve") == []
    assert wanted("", pending=rules.propose_comments([found], node(), settings, (), 9.0)) == []
    well = absorbed(found, 2.0, result("gpu-count", Outcome.FIT), result("disk", Outcome.FIT))
    assert wanted(text, well) == [""]
    assert wanted("", well) == []


@pytest.mark.parametrize(
    ("gres", "mig", "count"),
    [
        ("gpu:8", "Disabled", 8),
        ("gpu:h100:8(S:0-1)", "[N/A]", 8),
        ("gpu:a100:4(S:0),gpu:v100:2(S:1),shard:64", "Disabled", 6),
        ("gpu:1g.10gb:56", "Enabled", None),
        ("craynetwork:4", "Disabled", None),
        ("", "Disabled", None),
    ],
)
def test_as_many_gpus_as_slurm_counts_on(gres: str, mig: str, count: int | None) -> None:
    facts = {"gpus": {"rows": [{"index": "0", "mig.mode.current": mig}]}}
    assert rules.expected_gpus(node(gres=gres)["n1"], facts) == count
