"""Slurm's hooks: one self-contained program for Prolog, Epilog and HealthCheckProgram, and how it gets onto nodes."""

from __future__ import annotations
