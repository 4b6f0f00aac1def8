"""A simulated dmesg: prints the kern.log named by its first argument in dmesg's own forms."""

from __future__ import annotations

import re
import sys
import time

LINE = re.compile(r"^\S+ +\S+ \S+ \S+ kernel: \[ *(\d+)\.(\d+)\] (.*)$")
IGNORED = {"-k", "--kernel", "-P", "--nopager", "-x", "--decode", "-L", "--color"}


def boot_time() -> float:
    """When the machine was started, Unix seconds; dmesg derives it in the same way."""
    with open("/proc/uptime") as file:
        return time.time() - float(file.read().split()[0])


def stamp(form: str, seconds: int, micros: int, booted: float) -> str:
    """The start of a line in one of dmesg's time formats."""
    if form == "notime":
        return ""
    if form == "raw":
        return f"[{seconds:5d}.{micros:06d}] "
    moment = time.localtime(booted + seconds + micros / 1e6)
    if form == "ctime":
        return time.strftime("[%a %b %e %H:%M:%S %Y] ", moment)
    zone = time.strftime("%z", moment)
    return time.strftime(f"%Y-%m-%dT%H:%M:%S,{micros:06d}{zone[:3]}:{zone[3:]} ", moment)


def chosen(argv: list[str]) -> str:
    """The time format asked for; :class:`ValueError` for what this dmesg does not know."""
    form, words = "raw", iter(argv)
    for word in words:
        key, sep, value = word.partition("=")
        if key in ("-T", "--ctime"):
            form = "ctime"
        elif key in ("-t", "--notime"):
            form = "notime"
        elif key == "--time-format":
            form = value if sep else next(words, "")
        elif key not in IGNORED:
            raise ValueError(f"dmesg: unrecognized option '{word}'")
    if form not in ("raw", "ctime", "iso", "notime"):
        raise ValueError(f"dmesg: unknown time format: {form}")
    return form


def main() -> int:
    """Run as ``dmesg.py KERN_LOG ARGUMENTS...``."""
    try:
        form = chosen(sys.argv[2:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    booted = boot_time()
    with open(sys.argv[1]) as file:
        for line in file:
            found = LINE.match(line)
            if found:
                micros = int(found[2].ljust(6, "0")[:6])
                print(stamp(form, int(found[1]), micros, booted) + found[3])
    return 0


if __name__ == "__main__":
    sys.exit(main())
