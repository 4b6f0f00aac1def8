"""Train a byte-level language model on the sources of Python's standard library, on any number of ranks, with DDP.

The lines that end in "# TCE" are all that checkpoints and an exact resume take. Started by transom, by torchrun or by
hand (one rank), it goes on from the newest checkpoint, and the loss of every step is, bit for bit, what it would have
been without the interruption. Rank 0 prints one line per step.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from pytext import Batches, standard_library
from tinylm import TinyLM
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from transomd.tce import CheckpointEngine  # TCE

LENGTH, BATCH, SEED = 96, 4, 1234
PEAK_RATE, WARM_UP = 3e-3, 20


class Randomness:
    """Torch's random numbers (dropout), as an object with a state."""

    def state_dict(self) -> dict[str, Tensor]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["torch"])


def sum_in_rank_order(bucket: Any) -> torch.futures.Future[Tensor]:
    """Average gradients by adding them in the order of the ranks.

    DDP's own all-reduce adds in an order that depends on where a gradient lies in its bucket, and DDP arranges its
    buckets anew after the first step: a program that was started again would differ in the last bit.
    """
    mine = bucket.buffer()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    gathered = dist.all_gather(everyones, mine, async_op=True).get_future()

    def average(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = everyones[0]
        for each in everyones[1:]:
            total += each
        return total.div_(len(everyones))

    averaged: torch.futures.Future[Tensor] = gathered.then(average)
    return averaged


def mean_loss(loss: Tensor) -> float:
    """The mean over the ranks, in double precision and in the order of the ranks."""
    everyones = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, loss.detach())
    return sum(each.item() for each in everyones) / len(everyones)


def learning_rate(step: int) -> float:
    """Rises for the first steps, then falls with the root of the step."""
    return PEAK_RATE * min(step / WARM_UP, math.sqrt(WARM_UP / step))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="train until this step (default 100)")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="N", help="save every N steps (default 10)")
    parser.add_argument("--step-time", type=float, default=0, metavar="S", help="let a step take at least S seconds")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}.items():
        os.environ.setdefault(name, alone)
    os.environ.setdefault("TRANSOM_CHECKPOINT_DIR", "checkpoints")  # TCE
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s: %(message)s")

    torch.manual_seed(SEED)
    model = DistributedDataParallel(TinyLM(LENGTH))
    model.register_comm_hook(None, lambda _, bucket: sum_in_rank_order(bucket))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
    batches = Batches(standard_library(), rank=rank, world_size=world_size, size=BATCH, length=LENGTH, seed=SEED)
    torch.manual_seed(SEED + 1 + rank)

    engine = CheckpointEngine.from_env(replicated=("model", "optimizer"))  # TCE
    state = {"model": model, "optimizer": optimizer, "batches": batches, "random": Randomness()}  # TCE
    resumed = engine.load(state)  # TCE
    if rank == 0:
        print("starting from step 0" if resumed is None else f"resumed from step {resumed}", flush=True)

    for step in range((resumed or 0) + 1, args.steps + 1):
        begun = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(batches.next())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = mean_loss(loss)
        time.sleep(max(0.0, args.step_time - (time.monotonic() - begun)))
        taken = time.monotonic() - begun
        if rank == 0:
            print(f"step {step} loss {value:.4f} loss_hex {value.hex()} time {taken:.2f}s", flush=True)
        if step % args.checkpoint_every == 0 or step == args.steps:
            engine.save(step, state)  # TCE

    engine.close()  # TCE
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
