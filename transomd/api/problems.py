"""What a request gets for an answer that fails: one sentence, the next thing to type, and the exit code."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from transom_slurm.errors import SlurmError
from transom_sql.store import StoreError

from transomd.errors import SpecError, TransomError
from transomd.words import ExitCode

log = logging.getLogger("transom.api")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {
    ExitCode.USAGE: 400,
    ExitCode.REFUSED: 403,
    ExitCode.NOT_FOUND: 404,
    ExitCode.UNREACHABLE: 503,
    ExitCode.ERROR: 500,
}


@web.middleware
async def told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer whatever a handler raises."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except TransomError as error:
        faults = list(error.faults) if isinstance(error, SpecError) else []
        return _problem(_STATUS.get(error.exit_code, 500), error.message, error.hint, error.exit_code, faults)
    except SlurmError as error:
        return _problem(503, str(error), error.hint or "sinfo", ExitCode.UNREACHABLE)
    except StoreError as error:
        log.warning("%s %s: %s", request.method, request.path, error)
        return _problem(503, str(error), error.hint, ExitCode.UNREACHABLE)
    except PermissionError as error:
        return _problem(403, str(error), "", ExitCode.REFUSED)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return _problem(400, f"{request.method} {request.path}: not understood: {error}", "", ExitCode.USAGE)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _problem(500, f"{request.method} {request.path} failed", "see the log of transomd", ExitCode.ERROR)


def _problem(status: int, message: str, hint: str, code: ExitCode, faults: list[str] | None = None) -> web.Response:
    error = {"message": message, "hint": hint, "code": int(code), "faults": faults or []}
    return web.json_response({"error": error}, status=status)
