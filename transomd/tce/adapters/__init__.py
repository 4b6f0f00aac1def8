"""Checkpoints of transom's for training frameworks: PyTorch Lightning and Hugging Face's Trainer.

Each module can be imported without its framework.
"""

from __future__ import annotations
