"""Power cuts at random points of saves, on a disk that loses, tears and reorders what was not synced.

``python tests/chaos/tce_torn.py --seconds 600``: one line of JSON per run of a program, which is cut after every change
that it made; exit code 1 if anything was lost or torn. Model and oracle: tests/unit/tce_disk.py and tce_cuts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import torch
from tce_cuts import found

SHARES = (1.0, 0.0, 0.9, 0.5, 0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, whatever is left")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, disks, bad = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(
        prefix="tcet-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as base:
        for seed in range(options.first, options.first + options.seeds):
            if time.monotonic() - begun > options.seconds:
                break
            ranks = 1 + seed % 2
            count, wrong = found(seed, ranks, SHARES, Path(base) / str(seed))
            disks, bad = disks + count, bad + len(wrong)
            print(json.dumps({"seed": seed, "ranks": ranks, "disks": count, "wrong": wrong}), flush=True)
    print(json.dumps({"disks": disks, "wrong": bad, "seconds": round(time.monotonic() - begun)}), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
