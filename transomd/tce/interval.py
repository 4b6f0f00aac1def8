"""How often a stage is worth having: from what it takes, and from how often the job fails. Pure.

Sources. The interval that loses least: J. W. Young, "A first order approximation to the optimum checkpoint interval",
CACM 17 (1974): ``sqrt(2 C M)``; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22 (2006), which corrects it where ``C`` is not small beside ``M``. Failures of nodes: A. Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters" (2024): 6.50e-3 and 2.34e-3 a node-day on two
clusters of eight-GPU nodes, and a job's MTTF is that of a node over the number of its nodes.
"""

from __future__ import annotations

import math

NODE_MTTF_S = 86400 / 6.5e-3
"""Of one node, where nothing else is told: 154 days, of the worse of the two clusters."""
SLACK = 1.25
"""So far beyond its bounds, as a factor, what is wanted must be before an interval changes."""


def job_mttf_s(nodes: int, node_mttf_s: float = NODE_MTTF_S) -> float:
    """Seconds from one failure of the job to the next; its nodes fail independently of each other."""
    return node_mttf_s / nodes


def daly_s(cost_s: float, mttf_s: float) -> float:
    """Seconds of training between two checkpoints that cost ``cost_s`` each at which least is lost; at most the MTTF.

    Lost is what checkpoints cost, and what failures throw back.
    """
    if cost_s >= 2 * mttf_s:
        return mttf_s
    ratio = cost_s / (2 * mttf_s)
    return math.sqrt(2 * cost_s * mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def interval_s(busy_s: float, mttf_s: float) -> float:
    """Seconds between two steps that a stage gets which is busy for ``busy_s`` with each of them.

    As if it took all of that from the training: a stage in the background takes less, but of a store that others use,
    too. Never so short that the stage could not keep up.
    """
    return max(daly_s(busy_s, mttf_s), busy_s)


def settled(current: int, wanted: float) -> int:
    """The power of two, in steps, that ``wanted`` steps come to: itself or the next below, at least 1.

    ``current`` stays unless ``wanted`` is well beyond what it stands for: measures vary.
    """
    if current / SLACK <= wanted < 2 * current * SLACK:
        return current
    return 1 << max(0, math.floor(math.log2(max(wanted, 1.0))))
