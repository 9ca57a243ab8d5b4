# SPDX-License-Identifier: Apache-2.0
"""Numbers for people. The dashboard's format.js gives the same."""


def human_bytes(count: float) -> str:
    """Decimal units, three digits: "1.25 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    if unit == "B":
        return f"{count:.0f} B"
    return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"


def human_count(count: float) -> str:
    """ "6.52 M"; plain below ten thousand."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"


def human_seconds(seconds: float) -> str:
    """ "4 min 12 s"; the two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
