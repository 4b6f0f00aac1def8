"""Mixed precision and gradient accumulation: a resume anywhere, also amid an accumulation, changes not one bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transomd.tce import CheckpointEngine  # noqa: E402

ACCUMULATE = 4
MICRO_STEPS = 22
"""Of data: five steps of the optimizer, and half of one more."""


@dataclass
class Program:
    """A training program that says all of its state: what a user of accumulation must save is in ``state``."""

    dtype: Any
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 2),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=6)
        # Grows after every step that went well, and shrinks after one that did not: its state is needed at once.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)

    def state(self) -> dict[str, Any]:
        """Everything that the next micro-step depends on."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "rng": torch.get_rng_state(),
        }

    def load(self, engine: CheckpointEngine) -> int:
        """Bring the newest checkpoint in; returns the micro-step after it."""
        state = self.state()
        step = engine.load(state)
        assert step is not None
        for parameter, gradient in zip(self.model.parameters(), state["gradients"], strict=True):
            parameter.grad = gradient
        torch.set_rng_state(state["rng"])
        return step + 1

    def run(self, begin: int, engine: CheckpointEngine | None = None) -> Program:
        """Train from one micro-step on to the end, saving after each."""
        for micro in range(begin, MICRO_STEPS):
            self.micro_step(micro)
            if engine is not None:
                engine.save(micro, self.state()).wait("storage")
        return self

    def micro_step(self, micro: int) -> None:
        """One forward and backward; each fourth steps the optimizer. The third step meets an overflow."""
        data = torch.randn(5, 6, generator=torch.Generator().manual_seed(micro))
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.model(data).square().mean() / ACCUMULATE
        self.scaler.scale(loss).backward()
        if micro == 2 * ACCUMULATE + 1:
            self.model[0].weight.grad[0, 0] = float("inf")
        self.losses.append(loss.item())
        if micro % ACCUMULATE == ACCUMULATE - 1:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())


def weights(program: Program) -> list[Any]:
    return [value.clone() for value in program.model.state_dict().values()]


# The scheduler says so of the step that the scaler skips, and that is meant here.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before")
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_resume_after_any_micro_step_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path, rank=0, world_size=1, epoch=1, keep=100, memory=False)
    whole = Program(getattr(torch, kind)).run(0, engine)
    assert max(whole.scales) > 256  # it grew, and shrank once:
    assert any(after < before for before, after in zip(whole.scales, whole.scales[1:], strict=False))
    for micro in range(MICRO_STEPS - 1):
        resumed = Program(getattr(torch, kind))
        reader = CheckpointEngine(tmp_path, rank=0, world_size=1, resume_step=micro, memory=False)
        resumed.run(resumed.load(reader))
        assert resumed.losses == whole.losses[micro + 1 :], f"after micro-step {micro}"
        assert resumed.scales == whole.scales[micro + 1 :]
        assert all(torch.equal(*pair) for pair in zip(weights(resumed), weights(whole), strict=True))


def test_without_the_gradients_it_would_be_seen(tmp_path: Path) -> None:
    """What the test above compares does depend on the gradients of the accumulation that was cut."""
    whole = Program(torch.bfloat16).run(0)
    cut = Program(torch.bfloat16)
    for micro in range(6):
        cut.micro_step(micro)
    cut.optimizer.zero_grad()
    cut.run(6)
    assert cut.losses != whole.losses
