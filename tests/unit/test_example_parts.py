"""The example's parts: its text is dealt out exactly, its job files are right, and TCE takes few lines of it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from transomd.settings import WatchSettings
from transomd.spec import JobSpec, load_job

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_text_is_large_and_always_the_same() -> None:
    text = module("pytext").standard_library()
    assert len(text) > 1_000_000
    assert text == module("pytext").standard_library()
    assert b"def " in text


def test_every_window_once_per_pass_and_rank() -> None:
    pytext = module("pytext")
    text = bytes(range(256)) * 2
    seen = []
    for rank in (0, 1):
        batches = pytext.Batches(text, rank=rank, world_size=2, size=5, length=10, seed=1)
        seen += [bytes(row[:10].tolist()) for _ in range(5) for row in batches.next()]
    assert len(set(seen)) == len(seen) == 50
    assert all(window in text for window in seen)


def test_the_place_in_the_text_is_exact_also_over_the_end_of_a_pass() -> None:
    pytext = module("pytext")

    def batches() -> object:
        return pytext.Batches(bytes(range(256)), rank=1, world_size=2, size=4, length=10, seed=3)

    first, second = batches(), batches()
    for _ in range(2):
        first.next()  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())  # type: ignore[attr-defined]
    for _ in range(9):
        assert first.next().equal(second.next())  # type: ignore[attr-defined]


def test_the_model_learns_from_the_past_only() -> None:
    torch.manual_seed(0)
    model = module("tinylm").TinyLM(length=8, width=16, layers=1, heads=2)
    assert 300_000 < sum(p.numel() for p in module("tinylm").TinyLM().parameters()) < 500_000
    text = torch.randint(0, 256, (1, 9))
    model.eval()
    with pytest.MonkeyPatch.context() as patch:
        taken: list[torch.Tensor] = []
        patch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: taken.append(logits) or logits.sum())
        model(text)
        changed = text.clone()
        changed[0, 6] ^= 1
        model(changed)
    assert taken[0][:6].equal(taken[1][:6])
    assert not taken[0][6:].equal(taken[1][6:])


def test_checkpoints_take_less_than_ten_lines() -> None:
    marked = [line for line in (EXAMPLES / "train.py").read_text().splitlines() if line.endswith("# TCE")]
    assert 4 <= len(marked) < 10
    assert all(re.search(r"[Ee]ngine|CHECKPOINT_DIR|state = ", line) for line in marked)


def test_the_job_files_are_right() -> None:
    small, whole = load_job(EXAMPLES / "job-min.yaml"), load_job(EXAMPLES / "job.yaml")
    assert (small.nodes, whole.nodes, whole.spares) == (2, 4, 1)
    text = (EXAMPLES / "job.yaml").read_text()
    missing = [name for name in JobSpec.model_fields if not re.search(rf"^(# )?{name}:", text, re.MULTILINE)]
    assert missing == []
    for part in ("checkpoint", "health", "watch", "policy"):
        fields = JobSpec.model_fields[part].annotation.model_fields  # type: ignore[union-attr]
        assert [name for name in fields if not re.search(rf"^  (# )?{name}:", text, re.MULTILINE)] == []


def test_who_copies_the_job_file_changes_nothing_of_the_sites_patience_and_caps_nothing() -> None:
    text = (EXAMPLES / "job.yaml").read_text()
    copied = load_job(EXAMPLES / "job.yaml")
    given = (copied.watch.heartbeat_timeout, copied.watch.stall_after, copied.watch.first_step_after)
    capped = (copied.checkpoint.storage_rate, copied.checkpoint.replica_rate, copied.checkpoint.node_mttf)
    assert given + capped == (None,) * 6
    shown = load_job(re.sub(r"^  # (\w+: )", r"  \1", text, flags=re.MULTILINE)).watch
    site = WatchSettings()
    assert shown.heartbeat_timeout == site.heartbeat_timeout_s
    assert (shown.stall_after, shown.first_step_after) == (site.stall_after_s, site.first_step_after_s)
