"""The operator: observe, decide, admit, record, act. It owns a job's life on the head node."""

from __future__ import annotations
