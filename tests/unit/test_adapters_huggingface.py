"""Hugging Face's Trainer with transom's callback: a run that was cut goes on to the bit.

transformers and accelerate are none of the development packages: see docs/checkpoint.md for how to run these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
WITHOUT = "transformers and accelerate are not installed: see 'Frameworks' in docs/checkpoint.md"
pytest.importorskip("accelerate", reason=WITHOUT)
transformers = pytest.importorskip("transformers", reason=WITHOUT)

from transomd.tce.adapters.huggingface import FOLDER, TransomCallback, resume_folder  # noqa: E402
from transomd.tce.catalogue import list_checkpoints  # noqa: E402
from transomd.tce.errors import CheckpointError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):  # type: ignore[misc]
    """A model with dropout, so that random states matter, and with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(6, 6)
        self.two = torch.nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        out = self.two(self.drop(self.one(x).relu()))
        return {"loss": (out - labels).square().mean(), "logits": out}


class Data(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.flip(0)}


class Stop(transformers.TrainerCallback):  # type: ignore[misc]
    """Cuts the run after so many steps, as a failure would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def trainer_of(place: Path, callbacks: list[Any]) -> Any:
    transformers.set_seed(11)
    arguments = transformers.TrainingArguments(
        output_dir=str(place / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        save_strategy="no",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=11,
    )
    return transformers.Trainer(
        model=Model(), args=arguments, train_dataset=Data(), eval_dataset=Data(), callbacks=callbacks
    )


def run(
    place: Path, stop: int = 1000, resume: bool = False
) -> tuple[dict[tuple[int, str], float], dict[str, Any], Any]:
    """Train; returns the losses by step, the weights and the Trainer."""
    place.mkdir(exist_ok=True)
    callback = TransomCallback(2, place / "ck", keep=50, memory=False)
    trainer = trainer_of(place, [callback, Stop(stop)])
    trainer.train(resume_from_checkpoint=resume_folder(trainer) if resume else None)
    log = [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]
    losses = {(entry["step"], name): entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry}
    return losses, {name: value.clone() for name, value in trainer.model.state_dict().items()}, trainer


# Steps of the optimizer: 5 an epoch. With an evaluation, without one, and at the end of an epoch.
@pytest.mark.parametrize("stop", [4, 6, 10])
def test_a_run_that_was_cut_goes_on_to_the_bit(stop: int, tmp_path: Path) -> None:
    losses, weights, _ = run(tmp_path / "whole")
    run(tmp_path / "cut", stop=stop)
    assert max(item.step for item in list_checkpoints(tmp_path / "cut/ck") if item.complete) == stop
    again, resumed, trainer = run(tmp_path / "cut", resume=True)
    assert again == losses
    assert len(losses) == 15 + 4
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert trainer.state.global_step == 15


def test_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [TransomCallback(2, tmp_path / "ck", memory=False)])
    assert resume_folder(trainer) is None
    with pytest.raises(CheckpointError, match="the Trainer has no TransomCallback"):
        resume_folder(trainer_of(tmp_path, []))


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run(tmp_path, stop=4)
    newest = list_checkpoints(tmp_path / "ck")[0].path
    data = newest / "replica-00000.safetensors"
    os.truncate(data, data.stat().st_size - 1)
    trainer = trainer_of(tmp_path, [TransomCallback(2, tmp_path / "ck", memory=False)])
    folder = resume_folder(trainer)
    assert folder == str(tmp_path / "out" / FOLDER / "checkpoint-2")
