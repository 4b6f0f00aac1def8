"""What two ends of a connection show each other to prove that they are of one job. Standard library only."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any


class NotOfThisJob(ConnectionError, ValueError):
    """The other side does not hold this job's token, or speaks something else."""


def proof(token: str, *told: str) -> str:
    """The proof that whoever says ``told`` holds the token; the first word is the protocol's."""
    return hmac.new(token.encode(), json.dumps(told).encode(), sha256).hexdigest()


def text(message: Mapping[str, Any], key: str) -> str:
    """A short text of a message. Raises NotOfThisJob."""
    value = message.get(key)
    if not isinstance(value, str) or not 0 < len(value) < 256:
        raise NotOfThisJob(f"no {key}")
    return value


def check(message: Mapping[str, Any], expected: str) -> None:
    """Compare a message's proof with the one expected, in constant time. Raises NotOfThisJob."""
    if not hmac.compare_digest(text(message, "proof").encode("utf-8", "replace"), expected.encode()):
        raise NotOfThisJob("it does not hold this job's token")
