"""Lightning's CheckpointIO: what it does with plain dicts, and real runs where Lightning is installed.

Lightning is none of the development packages: see docs/checkpoint.md for how to run the rest of these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transomd.tce.catalogue import list_checkpoints
from transomd.tce.errors import CheckpointError
from transomd.tce.manifest import MANIFEST

torch = pytest.importorskip("torch")

from transomd.tce.adapters.lightning import TransomCheckpointIO  # noqa: E402

WITHOUT_LIGHTNING = "Lightning is not installed: see 'Frameworks' in docs/checkpoint.md"


def a_checkpoint(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"w": torch.full((4,), float(step))}, "hyper": {"lr": 0.1}, "raw": b""}


@pytest.fixture
def io(tmp_path: Path) -> TransomCheckpointIO:
    return TransomCheckpointIO(tmp_path / "ck", memory=False)


def test_with_the_memory_tier_every_save_is_there_in_the_end(tmp_path: Path) -> None:
    io = TransomCheckpointIO(tmp_path / "ck")
    for step in (5, 6, 7):
        io.save_checkpoint(a_checkpoint(step), tmp_path / f"{step}.ckpt")
    io.remove_checkpoint(tmp_path / "5.ckpt")
    assert io.load_checkpoint(tmp_path / "6.ckpt")["global_step"] == 6
    assert io.load_checkpoint(io.newest())["global_step"] == 7
    io.teardown()
    assert steps(io) == [(1, 7), (1, 6)]


def steps(io: TransomCheckpointIO) -> list[tuple[int, int]]:
    return [(item.epoch, item.step) for item in list_checkpoints(io.directory) if item.complete]


def test_what_is_saved_is_loaded_from_the_path_and_by_name(io: TransomCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint(a_checkpoint(5), tmp_path / "lightning/a.ckpt")
    for path in (tmp_path / "lightning/a.ckpt", io.newest()):
        found = io.load_checkpoint(path, map_location="cpu", weights_only=True)
        assert torch.equal(found["state_dict"]["w"], torch.full((4,), 5.0))
        assert (found["hyper"], found["raw"], found["global_step"]) == ({"lr": 0.1}, b"", 5)
    assert steps(io) == [(1, 5)]


def test_two_paths_of_one_step_are_one_checkpoint(io: TransomCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint(a_checkpoint(5), tmp_path / "a.ckpt")
    io.save_checkpoint(a_checkpoint(5), tmp_path / "last.ckpt")
    io.save_checkpoint(a_checkpoint(6), tmp_path / "b.ckpt")
    assert steps(io) == [(1, 6), (1, 5)]
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5
    io.save_checkpoint(a_checkpoint(6), tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 6


def test_the_newest_complete_one_goes_only_once_a_newer_one_is_there(io: TransomCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint(a_checkpoint(5), tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert steps(io) == [(1, 5)]
    io.save_checkpoint(a_checkpoint(6), tmp_path / "b.ckpt")
    assert steps(io) == [(1, 6)]
    assert not (tmp_path / "a.ckpt").exists()


def test_a_program_that_goes_back_overwrites_nothing(io: TransomCheckpointIO, tmp_path: Path) -> None:
    for step in (5, 6):
        io.save_checkpoint(a_checkpoint(step), tmp_path / f"{step}.ckpt")
    again = {**a_checkpoint(5), "hyper": "another"}
    io.save_checkpoint(again, tmp_path / "again.ckpt")
    assert io.load_checkpoint(tmp_path / "5.ckpt")["hyper"] == {"lr": 0.1}
    assert io.load_checkpoint(tmp_path / "again.ckpt")["hyper"] == "another"
    assert io.load_checkpoint(io.newest())["hyper"] == "another"


def test_going_back_within_an_epoch_that_was_given_is_refused(tmp_path: Path) -> None:
    io = TransomCheckpointIO(tmp_path / "ck", memory=False, epoch=3)
    for step in (5, 6):
        io.save_checkpoint(a_checkpoint(step), tmp_path / f"{step}.ckpt")
    with pytest.raises(CheckpointError, match="step 5 was saved in epoch 3 already"):
        io.save_checkpoint(a_checkpoint(5), tmp_path / "again.ckpt")
    assert not (tmp_path / "again.ckpt").exists()


def test_a_pointer_removes_nothing_outside_of_the_directory(io: TransomCheckpointIO, tmp_path: Path) -> None:
    io.save_checkpoint(a_checkpoint(5), tmp_path / "a.ckpt")
    other = tmp_path / "other/step-000000001.epoch-000001"
    other.mkdir(parents=True)
    forged = json.dumps({"transom": 1, "directory": str(other.parent), "folder": other.name})
    (tmp_path / "forged.ckpt").write_text(forged)
    (tmp_path / "up.ckpt").write_text(json.dumps({"transom": 1, "directory": str(io.directory), "folder": ".."}))
    (tmp_path / "own.ckpt").write_bytes(b"a file of Lightning's")
    for name in ("forged", "up", "own"):
        io.remove_checkpoint(tmp_path / f"{name}.ckpt")
        assert not (tmp_path / f"{name}.ckpt").exists()
    assert other.is_dir()
    assert steps(io) == [(1, 5)]


def test_the_newest_good_one_is_named(io: TransomCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert io.newest() is None
    for step in (5, 6, 7, 8):
        io.save_checkpoint(a_checkpoint(step), tmp_path / f"{step}.ckpt")
    by_step = {item.step: item.path for item in list_checkpoints(io.directory)}
    (by_step[8] / MANIFEST).unlink()
    data = by_step[7] / "replica-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert io.newest() == str(by_step[6])
    monkeypatch.setenv("TRANSOM_RESUME_STEP", "5")
    assert io.newest() == str(by_step[5])


def test_what_is_no_pointer_is_told(io: TransomCheckpointIO, tmp_path: Path) -> None:
    torch.save(a_checkpoint(1), tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match="is no pointer to a checkpoint of transom's"):
        io.load_checkpoint(tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match="No such file"):
        io.load_checkpoint(tmp_path / "gone.ckpt")


def test_what_could_not_be_loaded_again_is_refused_when_saving(io: TransomCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['callback'\]"):
        io.save_checkpoint({**a_checkpoint(1), "callback": object()}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


# ------------------------------------------------------------------------------------------------ with Lightning itself


def run(place: Path, epochs: int, resume: bool = False) -> tuple[list[float], Any]:
    """Train a model with dropout; returns its losses by step and its weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 8})
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    pl.seed_everything(5)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    io = TransomCheckpointIO(place / "ck", memory=False)
    callback = ModelCheckpoint(
        place / "lightning", filename="{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max"
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        plugins=[io],
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=io.newest() if resume else None)
    return model.losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason=WITHOUT_LIGHTNING)
    losses, weights = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    resumed, again = run(tmp_path / "cut", 4, resume=True)
    assert resumed == losses[-len(resumed) :]
    assert len(resumed) == len(losses) // 2
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert len([item for item in list_checkpoints(tmp_path / "cut/ck") if item.complete]) == 2
    assert len(list((tmp_path / "cut/lightning").iterdir())) == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_takes_it_for_its_own(tmp_path: Path) -> None:
    io = pytest.importorskip("lightning.pytorch.plugins.io", reason=WITHOUT_LIGHTNING)
    assert issubclass(TransomCheckpointIO, io.CheckpointIO)


class Loader:
    """A data loader that keeps its place, and draws the order of each epoch from torch's random state."""

    def __init__(self) -> None:
        self.at = self.seed = 0
        self.going_on = False

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[Any]:
        if not self.going_on or self.at == len(self):
            self.at, self.seed = 0, int(torch.randint(1 << 30, ()))
        self.going_on = False
        while self.at < len(self):
            self.at += 1
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(self.seed + self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seed, self.going_on = state["at"], state["seed"], True


def exact_run(place: Path, scaled: bool, cut: int = 0) -> tuple[list[float], Any]:
    """Train with dropout and an accumulation over four batches, up to the ``cut``-th batch; losses and weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import MixedPrecision

    from transomd.tce.adapters.lightning import ExactResume

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            if len(self.losses) + 1 == cut:
                raise RuntimeError("cut")
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index in (5, 13, 21):
                trainer.save_checkpoint(place / f"lightning/{trainer.current_epoch}-{index}.ckpt")

    pl.seed_everything(5 if not place.exists() else 6)
    io = TransomCheckpointIO(place / "ck", memory=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    trainer = pl.Trainer(
        max_epochs=3,
        accumulate_grad_batches=4,
        plugins=[io, *([MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaled else [])],
        callbacks=[ExactResume(), Save()],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    model = Model()
    trainer.fit(model, Loader(), ckpt_path=io.newest())
    return model.losses, {name: value.clone() for name, value in model.state_dict().items()}


# Amid an accumulation of the first and second epoch, and at the end of the first.
@pytest.mark.parametrize(("cut", "left"), [(18, 52), (40, 30), (26, 44)])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_lightning_goes_on_to_the_bit_amid_an_accumulation(scaled: bool, cut: int, left: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", reason=WITHOUT_LIGHTNING)
    losses, weights = exact_run(tmp_path / "whole", scaled)
    with pytest.raises(RuntimeError, match="cut"):
        exact_run(tmp_path / "cut", scaled, cut)
    resumed, again = exact_run(tmp_path / "cut", scaled)
    assert resumed == losses[-left:]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.filterwarnings("ignore")
def test_exact_resume_is_for_one_device() -> None:
    from transomd.tce.adapters.lightning import ExactResume

    with pytest.raises(CheckpointError, match="ExactResume is for one device"):
        ExactResume().setup(SimpleNamespace(world_size=2), None, "fit")
