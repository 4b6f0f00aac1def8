"""TransomStorageWriter and -Reader in one process: what they keep, refuse, fence and verify."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import MANIFEST

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from transomd.tce import CheckpointEngine  # noqa: E402
from transomd.tce.dcp import TransomStorageReader, TransomStorageWriter, commit, load_newest, staging  # noqa: E402
from transomd.tce.dcp.facts import FILE, DamagedError, read_facts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool", "complex64", "float8_e4m3fn"]


@pytest.fixture(autouse=True)
def _storage_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_MEMORY", "off")


def state_of(fill: int) -> dict[str, Any]:
    """A state with every kind of thing."""
    return {
        "types": {name: torch.full((3, 2), fill).to(getattr(torch, name)) for name in TYPES},
        "odd": [torch.zeros(0, 4), torch.tensor(float(fill)), (torch.arange(12.0) * fill).view(3, 4).t()[1:]],
        "numbers": {"int": fill, "float": fill / 3, "text": "ä" * fill, "none": None, "bytes": b"\0" * fill},
        "rng": torch.get_rng_state() if fill else torch.zeros(5056, dtype=torch.uint8),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and staged(one) == staged(other)
    return bool(one == other)


def staged(tensor: Any) -> bytes:
    return bytes(staging.bytes_of(tensor.contiguous()))


def save(directory: Path, step: int, state: dict[str, Any] | None = None, **kwargs: Any) -> None:
    writer = TransomStorageWriter(directory, **kwargs)
    dcp.save(state or state_of(step), storage_writer=writer, checkpoint_id=str(step))


def loaded(directory: Path, **kwargs: Any) -> dict[str, Any]:
    state = state_of(0)
    dcp.load(state, storage_reader=TransomStorageReader(directory, **kwargs))
    return state


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        action()
    return str(caught.value)


def refused_or_raised(action: Callable[[], object]) -> str:
    """Without collectives DCP wraps no error."""
    with pytest.raises((CheckpointError, dcp.api.CheckpointException)) as caught:
        action()
    return str(caught.value)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = state_of(7)
    save(tmp_path, 7, state)
    assert same(loaded(tmp_path), state)
    (found,) = list_checkpoints(tmp_path)
    assert (found.step, found.complete, verify(found.path)) == (7, True, [])


def test_the_files_are_readable_without_transom(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 7)
    folder = list_checkpoints(tmp_path)[0].path
    tensors = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(tensors["types.float16"], torch.full((3, 2), 7.0, dtype=torch.float16))
    value = io.BytesIO(bytes(tensors["numbers.text"].tolist()))
    assert torch.load(value, weights_only=True) == "ä" * 7
    facts = json.loads((folder / FILE).read_text())
    assert facts["paths"]["odd.1"] == ["odd", 1]
    assert facts["tensors"]["types.bool"]["shape"] == [3, 2]


def test_async_save_keeps_what_was_there_when_it_returned(tmp_path: Path) -> None:
    writer = TransomStorageWriter(tmp_path)
    state = {"w": torch.ones(1000)}
    pending = []
    for step in range(1, 4):
        state["w"].fill_(step)
        pending.append(dcp.async_save(state, storage_writer=writer, checkpoint_id=str(step)))
    state["w"].fill_(99)
    for one in pending:
        one.result()
    # Each save has a thread of its own: a step that comes after a later one is stored is not kept.
    writer.close()
    kept = [found.step for found in list_checkpoints(tmp_path) if found.complete]
    assert 3 in kept
    for step in kept:
        target = {"w": torch.zeros(1000)}
        dcp.load(target, storage_reader=TransomStorageReader(tmp_path), checkpoint_id=str(step))
        assert torch.equal(target["w"], torch.full((1000,), float(step)))


def test_cached_plans_go_to_the_step_that_is_saved(tmp_path: Path) -> None:
    writer = TransomStorageWriter(tmp_path)
    for step in (1, 2, 3):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((4,), float(step)), "n": step}
        dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=str(step))
    for step in (1, 2, 3):
        target = {"w": torch.zeros(4), "n": 0}
        dcp.load(target, storage_reader=TransomStorageReader(tmp_path, step=step))
        assert (target["n"], target["w"].tolist()) == (step, [float(step)] * 4)


def test_the_step_must_be_named_and_be_new(tmp_path: Path) -> None:
    writer = TransomStorageWriter(tmp_path)
    with pytest.raises(CheckpointError, match="the step is not known"):
        writer.storage_meta()
    with pytest.raises(CheckpointError, match="checkpoint_id is 'last', and must be the step"):
        dcp.save({"a": 1}, storage_writer=writer, checkpoint_id="last")
    save(tmp_path, 1)
    assert "step 1 was saved in epoch 1 already" in refused(lambda: save(tmp_path, 1))
    said = refused_or_raised(lambda: dcp.save({}, storage_writer=writer, checkpoint_id="2", use_collectives=False))
    assert "use_collectives=False is not supported" in said


def test_a_value_that_only_a_trusted_pickle_brings_back_is_refused_at_save(tmp_path: Path) -> None:
    said = refused(lambda: save(tmp_path, 1, {"a": 1, "config": {"args": argparse.Namespace(lr=1)}}))
    assert "config.args: nothing but a trusted pickle could bring it back" in said
    assert "argparse.Namespace" in said
    assert "add_safe_globals" in said
    assert [item.complete for item in list_checkpoints(tmp_path)] in ([], [False])


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_no_pickle_of_the_directory_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody replaced a value by a pickle that runs code, digests and all."""
    monkeypatch.setenv("EVIL", str(tmp_path / "was-here"))
    monkeypatch.setattr("transomd.tce.dcp.items.check_loadable", lambda name, content: None)
    save(tmp_path / "ck", 1, {"n": Evil()})
    monkeypatch.undo()
    said = refused(lambda: dcp.load({"n": 0}, storage_reader=TransomStorageReader(tmp_path / "ck")))
    assert "n: nothing but a trusted pickle could bring it back" in said
    assert not (tmp_path / "was-here").exists()


def test_every_flipped_byte_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 7)
    folder = list_checkpoints(tmp_path)[0].path
    for name, tensor in read_facts(folder).tensors.items():
        for stored in (chunk.stored for chunk in tensor.chunks if chunk.stored.bytes):
            at = stored.offset + stored.bytes // 2
            flip(folder / stored.file, at)
            state = state_of(0)
            reader = TransomStorageReader(tmp_path)
            said = refused(lambda state=state, reader=reader: dcp.load(state, storage_reader=reader))
            assert f"{stored.file}: tensor {name} is damaged (bytes {stored.offset} to " in said
            assert same(state, state_of(0))
            flip(folder / stored.file, at)
    assert same(loaded(tmp_path)["types"], state_of(7)["types"])


@pytest.mark.parametrize("name", [FILE, "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("how", ["cut", "gone", "flipped"])
def test_the_next_older_one_is_loaded_where_a_file_is_bad(name: str, how: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    path = list_checkpoints(tmp_path)[0].path / name
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        flip(path, -1 if name.endswith("safetensors") else path.stat().st_size // 2)
    state = state_of(0)
    assert load_newest(state, tmp_path) == 1
    assert same(state["types"], state_of(1)["types"])


def test_without_the_last_manifest_it_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (list_checkpoints(tmp_path)[0].path / MANIFEST).unlink()
    assert loaded(tmp_path)["numbers"]["int"] == 1


def test_load_newest_says_when_there_is_nothing_and_when_all_is_damaged(tmp_path: Path) -> None:
    assert load_newest({"a": 1}, tmp_path / "none") is None
    save(tmp_path, 3)
    assert load_newest({"a": 1}, tmp_path, resume_step=2) is None
    flip(list_checkpoints(tmp_path)[0].path / FILE, 9)
    with pytest.raises(CheckpointError, match=r"none can be loaded: .*dcp\.json"):
        load_newest(state_of(0), tmp_path)


def test_load_newest_raises_what_no_older_checkpoint_would_heal(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    assert "Missing key in checkpoint state_dict: new" in refused(lambda: load_newest({"new": torch.ones(1)}, tmp_path))


def test_epochs_fence_and_order(tmp_path: Path) -> None:
    first = TransomStorageWriter(tmp_path, epoch=1)
    dcp.save(state_of(9), storage_writer=first, checkpoint_id="9")
    save(tmp_path, 5, epoch=2)
    said = refused(lambda: dcp.save(state_of(10), storage_writer=first, checkpoint_id="10"))
    assert "epoch 1 is fenced: epoch 2 has started since" in said
    assert loaded(tmp_path)["numbers"]["int"] == 5
    assert loaded(tmp_path, step=9)["numbers"]["int"] == 9


def test_the_saves_of_one_start_are_of_one_epoch_and_those_of_the_next_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    monkeypatch.setattr(commit, "_claimed", {})  # as in another process of the same start
    save(tmp_path, 3)
    monkeypatch.setattr(commit, "_claimed", {})
    monkeypatch.setattr(commit, "TOKEN", "another start")
    save(tmp_path, 1)
    assert [(item.epoch, item.step) for item in list_checkpoints(tmp_path)] == [(2, 1), (1, 3), (1, 2), (1, 1)]


def test_retention_keeps_the_newest_and_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "RESUMED", {})
    for step in (8, 9):
        save(tmp_path, step)
    loaded(tmp_path, step=8)
    for step in (10, 11, 12):
        save(tmp_path, step, keep=2)
    assert [item.step for item in list_checkpoints(tmp_path)] == [12, 11, 8]


def test_a_full_disk_is_told_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path, 1)
    monkeypatch.setattr("transomd.tce.files._reserve", full)
    said = refused(lambda: save(tmp_path, 2, {"w": torch.zeros(1000)}))
    assert "step 2: rank 0 could not write its checkpoint: No space left on device: needs 4000 bytes, " in said
    monkeypatch.undo()
    assert loaded(tmp_path)["numbers"]["int"] == 1


def test_a_planner_that_changes_types_is_followed(tmp_path: Path) -> None:
    class Half(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            found = super().transform_object(write_item, object)
            return found.half() if isinstance(found, torch.Tensor) else found

    writer = TransomStorageWriter(tmp_path)
    dcp.save({"w": torch.arange(5.0)}, storage_writer=writer, planner=Half(), checkpoint_id="1")
    target = {"w": torch.zeros(5)}
    dcp.load(target, storage_reader=TransomStorageReader(tmp_path))
    assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_planners_data_must_be_paths(tmp_path: Path) -> None:
    class Strange(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data=object())

    writer = TransomStorageWriter(tmp_path)
    said = refused(lambda: dcp.save({"w": 1}, storage_writer=writer, planner=Strange(), checkpoint_id="1"))
    assert "the planner's own data cannot be stored" in said


def test_ranks_that_see_different_checkpoints_do_not_load(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.planner import LoadPlan

    plans = [LoadPlan([], storage_data="step-000000001.epoch-000001"), LoadPlan([], storage_data="other")]
    with pytest.raises(CheckpointError, match="the ranks see different checkpoints"):
        TransomStorageReader(tmp_path).prepare_global_plan(plans)


def test_the_environment_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHECKPOINT_DIR", str(tmp_path)), ("EPOCH", "4"), ("CHECKPOINT_KEEP", "1")):
        monkeypatch.setenv(f"TRANSOM_{name}", value)
    for step in (1, 2):
        dcp.save(state_of(step), storage_writer=TransomStorageWriter.from_env(), checkpoint_id=str(step))
    assert [(item.epoch, item.step) for item in list_checkpoints(tmp_path)] == [(4, 2)]
    monkeypatch.setenv("TRANSOM_RESUME_STEP", "1")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        TransomStorageReader.from_env().find()
    assert load_newest(state_of(0)) is None
    monkeypatch.setenv("TRANSOM_RESUME_STEP", "2")
    assert load_newest(state_of(0)) == 2
    monkeypatch.delenv("TRANSOM_CHECKPOINT_DIR")
    with pytest.raises(CheckpointError, match="TRANSOM_CHECKPOINT_DIR is not set"):
        TransomStorageWriter.from_env()


def test_the_engine_says_what_such_a_checkpoint_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"does not hold model; it holds torch\.distributed\.checkpoint"):
        CheckpointEngine(tmp_path).load({"model": torch.nn.Linear(1, 1)})


def test_errors_reach_other_ranks_whole() -> None:
    error = pickle.loads(pickle.dumps(DamagedError("file: tensor w is damaged", hint="look")))
    assert (str(error), error.hint) == ("file: tensor w is damaged", "look")


def test_what_a_keeper_stores_before_it_ends_is_seen_by_who_looks_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends once all that it had is in storage: who asks storage first, and memory then, sees it in neither."""

    def ended(place: Path) -> list[Any]:
        dcp.save({"w": torch.ones(2)}, storage_writer=TransomStorageWriter(place, memory=False), checkpoint_id="3")
        return []

    monkeypatch.setattr("transomd.tce.dcp.newest.look", ended)
    state = {"w": torch.zeros(2)}
    assert load_newest(state, tmp_path) == 3
    assert state["w"].tolist() == [1.0, 1.0]
