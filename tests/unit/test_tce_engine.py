"""The engine on one process: what save and load promise, and what they do when something is wrong.

Several ranks are several engines here: no rank waits for another, so one process can play them in turn.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transomd.tce import CheckpointEngine, CheckpointError, persist
from transomd.tce.catalogue import list_checkpoints, verify
from transomd.tce.manifest import MANIFEST

TRANSOM_VARIABLES = ("CHECKPOINT_DIR", "EPOCH", "RESUME_STEP", "CHECKPOINT_KEEP")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of fsyncs on a busy disk take minutes."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tce-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, and no memory tier: here ``save`` writes to storage by itself."""
    for name in (*(f"TRANSOM_{name}" for name in TRANSOM_VARIABLES), "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSOM_CHECKPOINT_MEMORY", "off")


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """A state that says in every part which step and rank it is of."""
    return {
        "model": {"w": torch.full((3, 4), float(step)), "b": torch.full((5,), step, dtype=torch.int64)},
        "mine": [torch.full((2,), float(100 * step + rank)), {"step": step, "rank": rank}],
    }


def engines(directory: Path, count: int, epoch: int = 1, **settings: Any) -> list[CheckpointEngine]:
    return [
        CheckpointEngine(directory, rank=rank, world_size=count, epoch=epoch, replicated=("model",), **settings)
        for rank in range(count)
    ]


def save_all(ranks: list[CheckpointEngine], step: int) -> None:
    handles = [engine.save(step, state_of(step, engine.rank)) for engine in ranks]
    for handle in handles:
        handle.wait(timeout=60)


def loaded(engine: CheckpointEngine) -> tuple[int | None, dict[str, Any]]:
    state = state_of(0, 99)
    return engine.load(state), state


def assert_is(state: dict[str, Any], step: int, rank: int = 0) -> None:
    wanted = state_of(step, rank)
    assert state["mine"][1] == wanted["mine"][1]
    assert state["mine"][0].equal(wanted["mine"][0])
    assert state["model"]["w"].equal(wanted["model"]["w"])
    assert state["model"]["b"].equal(wanted["model"]["b"])


def names(directory: Path) -> list[tuple[int, int]]:
    return [(c.step, c.epoch) for c in list_checkpoints(directory)]


def test_the_newest_comes_back_in_place(tmp_path: Path) -> None:
    with CheckpointEngine(tmp_path) as engine:
        for step in (5, 10):
            engine.save(step, state_of(step)).wait(timeout=60)
    model = torch.nn.Linear(4, 3)
    state = {"model": {"w": model.weight, "b": None}, "mine": None}
    again = CheckpointEngine(tmp_path)
    assert again.load(state) == 10
    assert again.epoch == 2
    assert state["model"]["w"] is model.weight
    assert model.weight.requires_grad
    assert model.weight.detach().equal(torch.full((3, 4), 10.0))
    assert_is(state, 10)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert CheckpointEngine(tmp_path / "absent").load(state_of(0)) is None
    assert not (tmp_path / "absent").exists()


def test_an_empty_state_receives_everything(tmp_path: Path) -> None:
    CheckpointEngine(tmp_path).save(3, state_of(3))
    state: dict[str, Any] = {}
    assert CheckpointEngine(tmp_path).load(state) == 3
    assert_is(state, 3)


def test_only_the_keys_that_are_asked_for_are_loaded(tmp_path: Path) -> None:
    CheckpointEngine(tmp_path).save(3, state_of(3))
    state: dict[str, Any] = {"model": {}}
    assert CheckpointEngine(tmp_path).load(state) == 3
    assert state.keys() == {"model"}
    assert state["model"]["w"].equal(torch.full((3, 4), 3.0))


def test_what_changes_after_save_does_not_leak_in(tmp_path: Path) -> None:
    engine, state = CheckpointEngine(tmp_path), state_of(1)
    engine.save(1, state)
    state["model"]["w"].fill_(-1)
    state["mine"][1]["step"] = -1
    assert_is(loaded(CheckpointEngine(tmp_path))[1], 1)


def test_objects_load_themselves_and_containers_become_what_was_saved(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine = CheckpointEngine(tmp_path)
    engine.save(
        1, {"model": model, "optimizer": optimizer, "log": {"a": 1}, "list": [1, 2, 3], "pair": (1, torch.ones(2))}
    )
    torch.manual_seed(2)
    other = torch.nn.Linear(2, 2)
    second = torch.optim.AdamW(other.parameters(), lr=9.0)
    inside = torch.zeros(2)
    log = {"a": 0, "gone": 5}
    state = {"model": other, "optimizer": second, "log": log, "list": [9], "pair": (0, inside)}
    assert engine.load(state) == 1
    assert other.weight.equal(model.weight)
    assert second.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert second.state_dict()["state"][0]["exp_avg"].equal(optimizer.state_dict()["state"][0]["exp_avg"])
    assert state["log"] is log
    assert log == {"a": 1}
    assert state["list"] == [1, 2, 3]
    assert state["pair"][1] is inside
    assert inside.equal(torch.ones(2))


def test_new_shapes_and_new_keys_between_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = CheckpointEngine(tmp_path)
    engine.save(1, {"t": torch.ones(2)})
    engine.save(2, {"t": torch.ones(3, 3), "more": torch.zeros(1, dtype=torch.float8_e4m3fn)})
    old = torch.zeros(2)
    state = {"t": old, "more": None}
    assert engine.load(state) == 2
    assert state["t"].shape == (3, 3)
    assert old.equal(torch.zeros(2))
    assert "state['t']: saved as torch.float32 [3, 3], in the program torch.float32 [2]" in caplog.text


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"w": torch.zeros(3, 4), "new": torch.zeros(1)}},
        {"absent": 1},
        {"mine": [None, None, torch.nn.Linear(1, 1)]},
    ],
    ids=["tensor", "key", "object"],
)
def test_what_the_checkpoint_lacks_is_named_before_anything_changes(tmp_path: Path, state: dict[str, Any]) -> None:
    CheckpointEngine(tmp_path).save(3, state_of(3))
    with pytest.raises(CheckpointError, match=r"nothing for state\['(model|mine)'\]|does not hold absent"):
        CheckpointEngine(tmp_path).load(state)
    if "model" in state:
        assert state["model"]["w"].equal(torch.zeros(3, 4))


def test_an_unloadable_state_is_refused_whatever_strict_says(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, strict=False)
    with pytest.raises(CheckpointError, match=r"state\['opt'\]\['hook'\]"):
        engine.save(1, {"opt": {"hook": print}})
    assert names(tmp_path) == []


def test_replicated_keys_are_written_once(tmp_path: Path) -> None:
    save_all(engines(tmp_path, 4), 7)
    folder = list_checkpoints(tmp_path)[0].path
    replicas = sorted(path.name for path in folder.glob("replica-*"))
    assert replicas == ["replica-00000.pt", "replica-00000.safetensors"]
    assert all(b"model.w" not in path.read_bytes() for path in folder.glob("rank-*.safetensors"))
    for engine in engines(tmp_path, 4, epoch=2):
        step, state = loaded(engine)
        assert step == 7
        assert_is(state, 7, engine.rank)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_replicated_state_goes_to_any_number_of_ranks(tmp_path: Path, count: int) -> None:
    for rank in range(4):
        CheckpointEngine(tmp_path, rank=rank, world_size=4, epoch=1, replicated=True).save(1, state_of(1))
    for rank in range(count):
        engine = CheckpointEngine(tmp_path, rank=rank, world_size=count, epoch=2, replicated=True)
        step, state = loaded(engine)
        assert step == 1
        assert_is(state, 1)


def test_state_of_single_ranks_names_both_world_sizes(tmp_path: Path) -> None:
    save_all(engines(tmp_path, 2), 1)
    other = CheckpointEngine(tmp_path, rank=0, world_size=1, epoch=2)
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks and this program has 1: mine differ"):
        other.load(state_of(0))
    state = {"model": state_of(0)["model"]}
    assert other.load(state) == 1
    assert state["model"]["w"].equal(torch.ones(3, 4))


def test_no_checkpoint_before_every_rank_has_written(tmp_path: Path) -> None:
    first, second = engines(tmp_path, 2)
    save_all([first, second], 1)
    handle = first.save(2, state_of(2, 0))
    assert not handle.done()
    with pytest.raises(TimeoutError, match="step 2 is not complete"):
        handle.wait(timeout=0.05)
    assert [c.complete for c in list_checkpoints(tmp_path)] == [False, True]
    assert engines(tmp_path, 2, epoch=2)[0].load(state_of(0, 0)) == 1
    assert first.saved == 2


def test_a_lagging_rank_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = engines(tmp_path, 2)
    first.save(1, state_of(1))
    first.save(2, state_of(2))
    assert "step 1 is still incomplete: rank 1 has not written" in caplog.text
    handle = second.save(2, state_of(2, 1))
    assert handle.done()
    first.close()
    assert names(tmp_path) == [(2, 1)], "the step that can never be complete is cleaned by rank 0"


def test_a_handle_remembers_what_retention_removed_since(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, keep=1)
    handles = [engine.save(step, state_of(step)) for step in (1, 2)]
    assert names(tmp_path) == [(2, 1)]
    assert handles[0].done()
    handles[0].wait(timeout=0)


def test_the_other_stages_say_that_they_are_not_there(tmp_path: Path) -> None:
    handle = CheckpointEngine(tmp_path).save(1, state_of(1))
    assert [handle.done(stage) for stage in ("memory", "replica", "storage")] == [False, False, True]
    for stage in ("memory", "replica"):
        with pytest.raises(CheckpointError, match=f"stage '{stage}' is not there yet"):
            handle.wait(stage)
    with pytest.raises(ValueError, match="stage 'disk' is none of"):
        handle.wait("disk")


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "longer":
        path.write_bytes(content + b"\0")
    else:
        content[(len(content) - 1 if how == "last bit" else len(content) // 2)] ^= 16
        path.write_bytes(content)


FILES = [
    MANIFEST,
    *(f"rank-0000{rank}.{kind}" for rank in (0, 1) for kind in ("json", "pt", "safetensors")),
    "replica-00000.pt",
    "replica-00000.safetensors",
]


@pytest.mark.parametrize("how", ["removed", "truncated", "longer", "middle bit", "last bit"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_never_chosen(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = engines(tmp_path, 2)
    for step in (1, 2):
        save_all(ranks, step)
    newest = list_checkpoints(tmp_path)[0].path
    damage(newest / name, how)
    for engine in engines(tmp_path, 2, epoch=2):
        step, state = loaded(engine)
        assert step == 1
        assert_is(state, 1, engine.rank)
    problems = verify(newest)
    assert problems
    if (name, how) != (MANIFEST, "removed"):
        assert name in problems[0]
        assert name in caplog.text
    if name.endswith(".safetensors") and how == "last bit":
        assert "tensor" in problems[0]


def test_the_damaged_tensor_is_named(tmp_path: Path) -> None:
    CheckpointEngine(tmp_path).save(1, {"a": torch.zeros(1000), "b": torch.zeros(9000), "c": torch.zeros(10)})
    folder = list_checkpoints(tmp_path)[0].path
    assert verify(folder) == []
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[4096 + 4000 + 20000] ^= 1
    path.write_bytes(content)
    assert verify(folder) == ["rank-00000.safetensors: tensor b is damaged"]
    content[4096 + 4000 + 20000] ^= 1
    content[100] ^= 1
    path.write_bytes(content)
    assert verify(folder) == ["rank-00000.safetensors: is damaged outside its tensors"]


def test_when_none_is_good_the_program_does_not_start_from_the_beginning(tmp_path: Path) -> None:
    CheckpointEngine(tmp_path).save(1, state_of(1))
    damage(list_checkpoints(tmp_path)[0].path / "rank-00000.pt", "middle bit")
    with pytest.raises(CheckpointError, match=r"none can be loaded: .*rank-00000.pt") as caught:
        CheckpointEngine(tmp_path).load(state_of(0))
    assert "move them" in caught.value.hint


def test_the_resume_step_bounds_the_step(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, epoch=1)
    for step in (10, 20, 30):
        engine.save(step, state_of(step))
    assert [CheckpointEngine(tmp_path, resume_step=n).load(state_of(0)) for n in (30, 25, 10, 0)] == [30, 20, 10, None]
    with pytest.raises(CheckpointError, match="no checkpoint of step 5 or before"):
        CheckpointEngine(tmp_path, resume_step=5).load(state_of(0))


def test_after_a_rollback_the_epoch_in_force_is_newest(tmp_path: Path) -> None:
    first = CheckpointEngine(tmp_path, epoch=1)
    for step in (100, 200):
        first.save(step, state_of(step))
    second = CheckpointEngine(tmp_path, epoch=2, resume_step=100)
    assert second.load(state_of(0)) == 100
    second.save(150, state_of(150))
    assert CheckpointEngine(tmp_path, epoch=3).load(state_of(0)) == 150


def test_retention_keeps_the_newest_and_the_resume_source(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, keep=2)
    for step in (8, 9, 10, 11):
        engine.save(step, state_of(step))
    assert names(tmp_path) == [(11, 1), (10, 1)]
    again = CheckpointEngine(tmp_path, keep=2, resume_step=10)
    assert again.load(state_of(0)) == 10
    for step in (11, 12, 13):
        again.save(step, state_of(step))
    assert names(tmp_path) == [(13, 2), (12, 2), (10, 1)]


def test_a_late_writer_is_fenced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = engines(tmp_path, 2, epoch=1)
    save_all(late, 1)
    half = late[0].save(2, state_of(2))
    engines(tmp_path, 2, epoch=2)
    handle = late[1].save(2, state_of(2, 1))
    with pytest.raises(CheckpointError, match="epoch 1 is fenced: epoch 2 has started since"):
        handle.wait()
    assert "is fenced" in caplog.text
    assert not half.done()
    assert [c.step for c in list_checkpoints(tmp_path) if c.complete] == [1]
    with pytest.raises(CheckpointError, match="fenced"):
        CheckpointEngine(tmp_path, rank=0, world_size=2, epoch=1)


def test_a_fence_raised_between_writing_and_completing_holds(tmp_path: Path) -> None:
    first, second = engines(tmp_path, 2, epoch=1)
    first.save(1, state_of(1))
    # All files of the step are there, but nobody has completed it when the next start claims its epoch.
    second._writer.write(1, [payload.image() for payload, _ in second._plan(state_of(1, 1))[0]])
    engines(tmp_path, 2, epoch=2)
    first.close()
    assert not list_checkpoints(tmp_path)[0].complete


def test_a_step_that_another_rank_has_completed_is_complete_though_the_next_start_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank is about to complete the step when the first one does, and its program begins anew at once."""
    first, second = engines(tmp_path, 2, epoch=1)
    check = persist.check_epoch
    first.save(1, state_of(1))

    def beaten(directory: Path, epoch: int) -> None:
        if first._writer.missing_rank(1) is None:
            monkeypatch.setattr(persist, "check_epoch", check)
            assert first._writer.commit(1)
            engines(tmp_path, 2, epoch=2)
        check(directory, epoch)

    monkeypatch.setattr(persist, "check_epoch", beaten)
    handle = second.save(1, state_of(1, 1))
    assert (handle.done(), handle.error) == (True, None)


def test_leftovers_of_an_older_epoch_go_once_a_newer_step_is_complete(tmp_path: Path) -> None:
    first, second = engines(tmp_path, 2, epoch=1)
    save_all([first, second], 1)
    first.save(2, state_of(2))
    ranks = engines(tmp_path, 2, epoch=2)
    assert ranks[0].load(state_of(0)) == 1
    assert names(tmp_path) == [(2, 1), (1, 1)]
    save_all(ranks, 2)
    ranks[0].close()
    assert names(tmp_path) == [(2, 2), (1, 1)]


def test_a_program_that_begins_again_in_its_epoch_does_not_mix_old_files_in(tmp_path: Path) -> None:
    first, second = engines(tmp_path, 2, epoch=1)
    second.save(1, state_of(55, 1))
    ranks = engines(tmp_path, 2, epoch=1)
    assert not ranks[0].save(1, state_of(1)).done()
    ranks[1].save(1, state_of(1, 1)).wait(timeout=60)
    assert_is(loaded(engines(tmp_path, 2, epoch=2)[1])[1], 1, 1)
    assert first.epoch == 1


def test_a_step_that_is_complete_is_not_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = CheckpointEngine(tmp_path)
    engine.save(1, state_of(1))
    assert engine.save(1, state_of(7)).done()
    assert "saved in this epoch already" in caplog.text
    assert_is(loaded(CheckpointEngine(tmp_path))[1], 1)


def fail_writes(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("transomd.tce.files._reserve", refuse)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_save_never_stops_the_training(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = CheckpointEngine(tmp_path)
    engine.save(1, state_of(1))
    with monkeypatch.context() as context:
        fail_writes(context, code)
        handles = [engine.save(step, state_of(step)) for step in (2, 3, 4)]
    assert engine.failed == 3
    assert not any(handle.done() for handle in handles)
    with pytest.raises(CheckpointError, match=f"step 2: rank 0 could not write.*{os.strerror(code)}"):
        handles[0].wait()
    told = [record for record in caplog.records if "training goes on" in record.message]
    assert len(told) == 3
    assert CheckpointEngine(tmp_path).load(state_of(0)) == 1
    engine.save(5, state_of(5)).wait(timeout=60)
    assert names(tmp_path) == [(5, 1), (1, 1)]


def test_a_failure_of_one_rank_is_told_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = engines(tmp_path, 2)
    with monkeypatch.context() as context:
        context.setattr("transomd.tce.image.write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
        second.save(1, state_of(1, 1))
    handle = first.save(1, state_of(1))
    with pytest.raises(CheckpointError, match=r"rank 1 could not write: .*bad"):
        handle.wait(timeout=60)
    left = [path.name for path in list_checkpoints(tmp_path)[0].path.iterdir()]
    assert left == ["rank-00001.failed"]


def test_a_failed_step_can_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CheckpointEngine(tmp_path)
    with monkeypatch.context() as context:
        context.setattr("transomd.tce.image.write_file", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
        assert not engine.save(1, state_of(1)).done()
    engine.save(1, state_of(1)).wait(timeout=60)
    assert not list(tmp_path.rglob("*.failed"))
    assert_is(loaded(CheckpointEngine(tmp_path))[1], 1)


def test_a_directory_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the checkpoint directory cannot be read: .*file: Not a directory"):
        CheckpointEngine(tmp_path / "file")


def test_strict_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CheckpointEngine(tmp_path, strict=True)
    fail_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(CheckpointError, match=r"needs \d+ bytes, \d+ bytes free"):
        engine.save(1, state_of(1))


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path / "c", epoch=1)
    engine.save(1, state_of(1))
    shutil.rmtree(tmp_path / "c")
    engine.save(2, state_of(2)).wait(timeout=60)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"epoch 1 could not be claimed: .*file"):
        CheckpointEngine(tmp_path / "file" / "c", epoch=1)


def test_a_program_that_only_loads_fences_nobody(tmp_path: Path) -> None:
    training = CheckpointEngine(tmp_path)
    training.save(1, state_of(1))
    assert CheckpointEngine(tmp_path).load(state_of(0)) == 1
    training.save(2, state_of(2)).wait(timeout=60)


def test_two_programs_in_one_directory_are_told(tmp_path: Path) -> None:
    first, second = CheckpointEngine(tmp_path), CheckpointEngine(tmp_path)
    first.save(1, state_of(1)).wait(timeout=60)
    with pytest.raises(CheckpointError, match="two programs write into one directory"):
        second.save(1, state_of(1)).wait()


def test_from_env_reads_what_the_launcher_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TRANSOM_CHECKPOINT_DIR": str(tmp_path), "TRANSOM_EPOCH": "4", "TRANSOM_CHECKPOINT_KEEP": "7"}
    for name, value in {**values, "TRANSOM_RESUME_STEP": "", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    engine = CheckpointEngine.from_env(replicated="model")
    assert (engine.directory, engine.epoch, engine.keep, engine.resume_step) == (tmp_path, 4, 7, None)
    assert (engine.rank, engine.world_size) == (1, 2)
    monkeypatch.setenv("TRANSOM_RESUME_STEP", "12")
    assert CheckpointEngine.from_env().resume_step == 12
    assert CheckpointEngine.from_env(directory=tmp_path / "b", keep=1).keep == 1


def test_outside_of_transom_one_variable_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_CHECKPOINT_DIR", str(tmp_path))
    engine = CheckpointEngine.from_env()
    assert (engine.rank, engine.world_size, engine.epoch) == (0, 1, 1)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "TRANSOM_CHECKPOINT_DIR is not set"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "TRANSOM_EPOCH": "x1"}, "TRANSOM_EPOCH is 'x1'"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "TRANSOM_EPOCH": "1"}, "RANK is not set"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "TRANSOM_EPOCH": "1", "RANK": "0"}, "WORLD_SIZE is not set"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "RANK": "3"}, "rank 3 of None ranks"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "RANK": "3", "WORLD_SIZE": "3"}, "rank 3 of 3 ranks"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "RANK": "0", "WORLD_SIZE": "2"}, "2 ranks need an epoch"),
        ({"TRANSOM_CHECKPOINT_DIR": "d", "TRANSOM_CHECKPOINT_KEEP": "0"}, "keep is 0"),
    ],
    ids=str,
)
def test_from_env_names_what_is_missing_or_wrong(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=told):
        CheckpointEngine.from_env()


@pytest.mark.parametrize("step", [-1, 1.5, "7", None], ids=str)
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match="step is"):
        CheckpointEngine(tmp_path).save(step, state_of(1))


def test_a_step_may_be_a_tensor(tmp_path: Path) -> None:
    CheckpointEngine(tmp_path).save(torch.tensor(4), state_of(4))  # type: ignore[arg-type]
    assert CheckpointEngine(tmp_path).load(state_of(0)) == 4


def test_replicated_must_name_keys_of_the_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="replicated names modle"):
        CheckpointEngine(tmp_path, replicated=("modle",)).save(1, state_of(1))


def test_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="transom.tce")
    with CheckpointEngine(tmp_path) as engine:
        engine.save(1, state_of(1))
        engine.load(state_of(0))
    assert capfd.readouterr() == ("", "")
    assert "step 1 of epoch 1 is complete" in caplog.text
