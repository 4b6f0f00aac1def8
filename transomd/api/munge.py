"""Who sends a request over TCP: a munge credential whose payload is the digest of exactly that request.

``Authorization: Munge <credential>``. The payload is :func:`digest` of method, path with query, and body, so that a
credential that somebody saw fits no other request; munged itself puts the time in, and takes none twice. Standard
library only: the CLI imports this.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass

from transomd.errors import RefusedError, UnreachableError

SCHEME = "Munge"
TTL_S = 60
TIMEOUT_S = 5.0
"""Seconds until munge is given up: without its daemon it would try for 49 s."""
_CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]{16,4096}:")
_NUMBER = re.compile(r"\s*\((\d+)\)$")
_KEYS = ("STATUS", "UID")
UNMUNGE = ("unmunge", f"--keys={','.join(_KEYS)}")
"""Prints the metadata, a blank line, and the payload; exits with munge's error number."""


def digest(method: str, target: str, body: bytes) -> str:
    """Return what a credential for a request has to carry. ``target`` is path and query as they are sent."""
    told = "\n".join(["transom-request-1", method, target, hashlib.sha256(body).hexdigest()])
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()


def credential(method: str, target: str, body: bytes) -> str:
    """Return a credential of the calling user for one request. Raises RefusedError or UnreachableError."""
    argv = ["munge", f"--string={digest(method, target, body)}", f"--ttl={TTL_S}"]
    doing = "proving who you are by munge"
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        hint = "use transom on a machine of the cluster, or the daemon's socket"
        raise RefusedError(f"{doing}: there is no munge command here", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{doing}: munged does not answer", hint="systemctl status munge") from None
    made = done.stdout.strip()
    if done.returncode or not _CREDENTIAL.fullmatch(made):
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise UnreachableError(f"{doing}: {said}", hint="systemctl status munge")
    return made


def read_header(header: str) -> str:
    """Return the credential of an ``Authorization`` header. Raises RefusedError when there is none."""
    scheme, _, found = header.partition(" ")
    if scheme != SCHEME or not _CREDENTIAL.fullmatch(found):
        raise RefusedError(
            "requests over TCP need a munge credential", hint="use transom, or the daemon's socket on the head node"
        )
    return found


@dataclass(frozen=True, slots=True)
class Sender:
    """What munged vouches for: who made a credential, and what it was made for."""

    uid: int
    payload: str


def read_metadata(returncode: int, text: str) -> Sender:
    """Read what ``unmunge`` printed. Raises RefusedError with munge's own reason."""
    head, _, payload = text.partition("\n\n")
    told = {key: value.strip() for key, _, value in (line.partition(":") for line in head.splitlines())}
    number = _NUMBER.search(told.get("UID", ""))
    if returncode or number is None:
        # The words are munge's own ("Replayed credential", "Expired credential"); nothing of the sender's is in them.
        status = _NUMBER.sub("", told.get("STATUS", "")) or f"munge's error {returncode}"
        raise RefusedError(f"the munge credential is not accepted: {status}", hint="check the clocks: date; munge -n")
    return Sender(int(number.group(1)), payload.strip())
