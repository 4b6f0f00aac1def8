"""TEE, Transom Eagle Eye: turns logs, exit codes, heartbeats and Slurm's own words into one verdict."""

from __future__ import annotations
