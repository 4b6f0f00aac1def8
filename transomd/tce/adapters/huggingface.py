"""Hugging Face's Trainer: a callback that saves, and a folder to resume from.

::

    trainer = Trainer(..., callbacks=[TransomCallback(every_steps=100)])
    trainer.train(resume_from_checkpoint=resume_folder(trainer))
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from transomd.tce.adapters.randomness import random_states
from transomd.tce.engine import CheckpointEngine
from transomd.tce.environment import at_least
from transomd.tce.errors import CheckpointError

REPLICATED = ("model", "optimizer", "scheduler", "scaler", "trainer")
FOLDER = "transom-resume"


def _callback() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("transformers").TrainerCallback
    return None


_Base: Any = _callback() or object


class TransomCallback(_Base):  # type: ignore[misc]
    """Saves the Trainer's state every so many steps of the optimizer, on every rank, without waiting for the disk.

    ``directory`` is TRANSOM_CHECKPOINT_DIR if it is left out; ``engine``: further arguments of the engine. Set the
    Trainer's own ``save_strategy`` to "no". For one device and for DDP.
    """

    def __init__(self, every_steps: int, directory: str | os.PathLike[str] | None = None, **engine: Any) -> None:
        self.every_steps = at_least(every_steps, 1, "every_steps")
        self.scaler: Any = None
        self._awaited = ""
        self._arguments = {**({"directory": directory} if directory else {}), **engine}
        self._engine: CheckpointEngine | None = None

    @property
    def engine(self) -> CheckpointEngine:
        """The engine; made when it is first asked for, which is after the process group is."""
        if self._engine is None:
            self._engine = CheckpointEngine.from_env(replicated=REPLICATED, **self._arguments)
        return self._engine

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if it is time: after the step's log and evaluation, which a resumed run does not repeat."""
        if state.global_step % self.every_steps == 0:
            self._awaited = "evaluation" if control.should_evaluate else "log" if control.should_log else "nothing"
            self._save_after("nothing", args, state, kwargs)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if the log was awaited."""
        self._save_after("log", args, state, kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, if the evaluation was awaited."""
        self._save_after("evaluation", args, state, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until what was saved is on the disk."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _save_after(self, event: str, args: Any, state: Any, parts: dict[str, Any]) -> None:
        if self._awaited != event:
            return
        self._awaited = ""
        whole = {
            "model": parts["model"],
            "optimizer": parts["optimizer"],
            "scheduler": parts["lr_scheduler"],
            "scaler": self.scaler,
            "trainer": json.dumps(dataclasses.asdict(state)),
            "rng": random_states(args.world_size > 1),
        }
        self.engine.save(state.global_step, whole)


def resume_folder(trainer: Any) -> str | None:
    """The newest good checkpoint as a folder that ``trainer.train(resume_from_checkpoint=...)`` takes; None: anew.

    On every rank. It is written below the Trainer's ``output_dir``, which all ranks must see, in place of an earlier
    one. CheckpointError if the Trainer has no TransomCallback, or there are checkpoints and none is good.
    """
    callback = next((c for c in trainer.callback_handler.callbacks if isinstance(c, TransomCallback)), None)
    if callback is None:
        raise CheckpointError(
            "the Trainer has no TransomCallback", hint="Trainer(..., callbacks=[TransomCallback(100)])"
        )
    callback.scaler = trainer.accelerator.scaler
    state: dict[str, Any] = {}
    step = callback.engine.load(state)
    if step is None:
        return None
    place = Path(trainer.args.output_dir) / FOLDER
    folder = place / f"checkpoint-{step}"
    if trainer.args.process_index == 0:
        shutil.rmtree(place, ignore_errors=True)
        folder.mkdir(parents=True)
        _write(folder, state)
    trainer.accelerator.wait_for_everyone()
    several = trainer.args.world_size > 1
    torch.save(state["rng"], folder / (f"rng_state_{trainer.args.process_index}.pth" if several else "rng_state.pth"))
    trainer.accelerator.wait_for_everyone()
    return str(folder)


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Write what the ranks share, under the names that the Trainer looks for."""
    from transomd.tce.portable import export

    export(state["model"], folder / "model.safetensors", "safetensors")
    torch.save(state["optimizer"], folder / "optimizer.pt")
    torch.save(state["scheduler"], folder / "scheduler.pt")
    if state["scaler"] is not None:
        torch.save(state["scaler"], folder / "scaler.pt")
    (folder / "trainer_state.json").write_text(state["trainer"], encoding="utf-8")
