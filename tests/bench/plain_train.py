"""The example's training loop with plain torch.save in the place of TCE: what people run under ``sbatch --requeue``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import train


class TorchSave:
    """One file a rank, written beside, synced and renamed; the newest step that every rank has is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def from_env(cls, **_: Any) -> TorchSave:
        return cls(Path(os.environ["TRANSOM_CHECKPOINT_DIR"]))

    def load(self, state: dict[str, Any]) -> int | None:
        for step in sorted({int(p.name.split("-")[1]) for p in self.folder.glob("step-*-*.pt")}, reverse=True):
            files = [self.folder / f"step-{step}-{rank}.pt" for rank in range(self.world)]
            if all(file.exists() for file in files):
                saved = torch.load(files[self.rank], weights_only=False)
                for name, part in state.items():
                    part.load_state_dict(saved[name])
                return step
        return None

    def save(self, step: int, state: dict[str, Any]) -> None:
        target = self.folder / f"step-{step}-{self.rank}.pt"
        temporary = target.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            torch.save({name: part.state_dict() for name, part in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def close(self) -> None:
        return


if __name__ == "__main__":
    train.CheckpointEngine = TorchSave  # type: ignore[misc,assignment]
    train.main()
