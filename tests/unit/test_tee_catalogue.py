"""The catalogue: every example is a test, every code has its bucket, and nothing in it can be slow."""

from __future__ import annotations

import os
import re
import time
from importlib import resources
from pathlib import Path

import pytest

from transomd import daemon, preflight
from transomd.tee.catalogue import Catalogue, Signature, load, parse, ready
from transomd.tee.clean import decode, split_prefix
from transomd.tee.prefilter import compile_prefilter
from transomd.words import Action, Blame, ExitCode, FailureClass, Level, Role

CATALOGUE = load()
ALL = [*CATALOGUE.signatures, *CATALOGUE.xids.values()]
EXAMPLES = [pytest.param(one, text, id=f"{one.id}-{n}") for one in ALL for n, text in enumerate(one.examples)]
COUNTERS = [pytest.param(one, text, id=f"{one.id}-{n}") for one in ALL for n, text in enumerate(one.counter_examples)]

DRAIN = {48, 54, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143, 158, 167, 168, 171, 172, *range(144, 151)}
EXCLUDE = {46, 109, 110, 155}
MAYBE = {13, 31, 32, 61, 68, 69, 94, 123, 151}
APPLICATION = {
    8,
    11,
    25,
    39,
    40,
    41,
    60,
    *range(70, 74),
    75,
    76,
    77,
    80,
    *range(82, 90),
    *range(96, 106),
    *range(126, 136),
    139,
}
HARMLESS = {63, 92, 121, 154, 156, 157, 160, 162, 163, 164, 165, 37, 38, 44, 66, 67, 93, 106, 107, 141, 152, 153}
ECHOES = {43, 45, 137}


def find(catalogue: Catalogue, text: str) -> Signature | None:
    found = catalogue.find(split_prefix(decode(text.encode()))[1])
    return found[0] if found else None


@pytest.mark.parametrize(("signature", "text"), EXAMPLES)
def test_an_example_is_found_as_itself(signature: Signature, text: str) -> None:
    found = find(CATALOGUE, text)
    assert found is not None
    assert found.id == signature.id


@pytest.mark.parametrize(("signature", "text"), COUNTERS)
def test_a_counter_example_is_not(signature: Signature, text: str) -> None:
    found = find(CATALOGUE, text)
    assert found is None or found.id != signature.id


def test_every_signature_has_an_example() -> None:
    assert [one.id for one in CATALOGUE.signatures if not one.examples] == []


def test_the_prefilter_passes_every_example() -> None:
    prefilter = compile_prefilter(CATALOGUE.anchors)
    assert [one.id for one in ALL for text in one.examples if not prefilter.search(text.encode())] == []


def test_anchors_hold_no_digits_or_dots_for_lines_are_compared_without_them() -> None:
    assert [anchor for anchor in CATALOGUE.anchors if re.search(r"[\d.]", anchor)] == []


def test_no_expression_can_run_away() -> None:
    unbounded = re.compile(r"(?<!\\)[.\])][*+](?!\?)")
    allowed = re.compile(r"\[1-9\]\\d\*|\[\\d,-\]\*")
    assert [
        one.id for one in ALL if unbounded.search(allowed.sub("", one.regex)) and "[0-9a-f]+" not in one.regex
    ] == []


def test_ids_are_unique() -> None:
    ids = [one.id for one in ALL]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("code", sorted(DRAIN | EXCLUDE | MAYBE | APPLICATION | HARMLESS | ECHOES))
def test_every_code_of_nvidia_has_its_bucket(code: int) -> None:
    one = CATALOGUE.xids[code]
    assert one.bucket
    if code in DRAIN:
        assert (one.blame, one.action, one.role) == (Blame.NODE, Action.DRAIN, Role.ROOT)
    elif code in EXCLUDE:
        assert (one.blame, one.action, one.role) == (Blame.NODE, Action.EXCLUDE, Role.ROOT)
    elif code in MAYBE | APPLICATION:
        assert (one.blame, one.action, one.role) == (Blame.UNKNOWN, Action.RESTART, Role.ROOT)
    else:
        assert one.action is Action.NONE
        assert one.role is (Role.VICTIM if code in ECHOES else Role.CONTEXT)


def test_a_code_that_nobody_knows_decides_nothing() -> None:
    found = find(CATALOGUE, "NVRM: Xid (PCI:0000:3b:00): 999, pid=1, something new")
    assert found is not None
    assert (found.id, found.role, found.blame) == ("XID-999", Role.CONTEXT, Blame.UNKNOWN)


def test_a_link_error_that_is_not_fatal_blames_nobody() -> None:
    found = find(CATALOGUE, "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Nonfatal XC0 i0 Link 05 (0x025001c6)")
    assert found is not None
    assert (found.id, found.role, found.blame, found.action) == ("XID-149", Role.CONTEXT, Blame.UNKNOWN, Action.NONE)


def test_loading_is_fast() -> None:
    text = resources.files("transomd.tee").joinpath("signatures.toml").read_text(encoding="utf-8")
    took = []
    for _ in range(5):
        start = time.process_time()
        parse(text)
        took.append(time.process_time() - start)
    assert min(took) < 0.05


def test_a_wrong_word_names_its_signature() -> None:
    text = """
    [[signature]]
    id = "X"
    source = "log"
    class = "gremlins"
    blame = "node"
    role = "root"
    action = "none"
    anchors = ["x"]
    regex = "x"
    examples = ["x"]
    """
    with pytest.raises(ValueError, match="signature X: 'gremlins'"):
        parse(text)


def test_only_what_names_a_node_may_drain() -> None:
    assert [one.id for one in ALL if one.action is Action.DRAIN and one.blame is not Blame.NODE] == []


def test_victims_blame_nobody() -> None:
    guilty = [one.id for one in ALL if one.role is Role.VICTIM and one.blame is not Blame.UNKNOWN]
    assert guilty == []


def test_every_class_but_those_of_detectors_is_used() -> None:
    used = {one.failure_class for one in ALL}
    assert set(FailureClass) - used == {FailureClass.CANCELLED}


BROKEN = """
[[signature]]
id = "X"
source = "log"
regex = '(unclosed'
anchors = ["x"]
examples = ["x"]
class = "host"
blame = "node"
role = "root"
action = "exclude"
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BROKEN, "signature X: missing )"),
        ("[[signature]\n", "signatures.toml"),
        ("[[xid]]\ncode = 7\n", "an entry of xid has no"),
        (BROKEN.replace('"host"', '"hosts"'), "signature X: 'hosts'"),
    ],
)
def test_a_broken_data_file_is_told_when_the_daemon_starts(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start and in --check, not with the first failure of a job."""
    monkeypatch.setattr(daemon, "ready", lambda: ready(lambda: parse(text)))
    monkeypatch.setattr(preflight, "ready", lambda: ready(lambda: parse(text)))
    site = tmp_path / "site.toml"
    site.write_text(f'[daemon]\nstate_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/sock"\n')
    mask = os.umask(0o077)
    try:
        assert daemon.main(["--config", str(site)]) == ExitCode.ERROR
    finally:
        os.umask(mask)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    found = preflight.signatures()
    assert (found.level, found.next) == (Level.PROBLEM, "install transom again")
    assert said in found.text


def test_the_packages_own_data_file_is_sound() -> None:
    assert preflight.signatures().level is Level.OK
