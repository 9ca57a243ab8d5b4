# SPDX-License-Identifier: Apache-2.0
"""The one line that a person needs to join a run.

    shoal://HOST:PORT/RUN?fp=SHA256&token=…&expires=UNIX&also=HOST:PORT&dht=MULTIADDR

`fp` is the SHA-256 of the run's authority certificate, so whoever holds the right link can't be
sent to another coordinator. `also` (further admission addresses) and `dht` may repeat.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from shoal.protocol.authority import expired_message
from shoal.protocol.errors import AdmissionError
from shoal.protocol.identity import MAX_TOKEN_CHARS
from shoal.protocol.ids import RunId

SCHEME: Final = "shoal"
MAX_LINK_CHARS: Final = 8 * 1024
MAX_ADDRESSES: Final = 8
MAX_DISCOVERY: Final = 16

_RUN_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,39}-[0-9a-f]{8}")
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_TOKEN: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_TOKEN_CHARS}}}")
_EXPIRES: Final = re.compile(r"[0-9]{1,12}")
_MULTIADDR: Final = re.compile(r"/[\x21-\x7e]{1,511}")
_HOST_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")
_PORT: Final = re.compile(r"[0-9]{1,5}")


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host without brackets, port). `ValueError` says what's wrong.

    Nothing else passes: no scheme, path, user or IPv6 zone.
    """
    host, colon, port_text = address.rpartition(":")
    if not colon:
        raise ValueError(f"{address[:80]!r} has no port; write HOST:PORT")
    port = int(port_text) if _PORT.fullmatch(port_text) else 0
    if not 1 <= port <= 65535:
        raise ValueError(f"{port_text[:20]!r} is no port; it must be 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(_without_zone(host[1:-1]))), port
        except ValueError as error:
            raise ValueError(f"{host[:80]!r} is no IPv6 address") from error
    if ":" in host:
        raise ValueError(f"{host[:80]!r} is no host name; write IPv6 addresses in [brackets]")
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{host[:80]!r} is no host name or IP address")
    return host, port


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _without_zone(host: str) -> str:
    if "%" in host:
        raise ValueError("an IPv6 zone means something on one machine only")
    return host


@dataclass(frozen=True, slots=True)
class JoinLink:
    """What a link carries. `str()` gives the text, `parse` reads it."""

    addresses: tuple[str, ...]
    """host:port of the coordinator's admission port, the preferred one first; 1 to 8."""
    run_id: RunId
    fingerprint: str
    """SHA-256 of the authority certificate's DER, 64 lower-case hex digits."""
    token: str = field(repr=False)
    expires_s: int
    """Unix time. For messages only: the token carries its own, which counts."""
    discovery: tuple[str, ...] = ()
    """Multiaddresses of discovery peers; at most 16."""

    def __str__(self) -> str:
        query = [("fp", self.fingerprint), ("token", self.token), ("expires", str(self.expires_s))]
        query += [("also", address) for address in self.addresses[1:]]
        query += [("dht", address) for address in self.discovery]
        return (
            f"{SCHEME}://{self.addresses[0]}/{quote(self.run_id, safe='')}"
            f"?{urlencode(query, safe='/:[]')}"
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a link. `AdmissionError` names the part that is wrong; expiry is not checked."""
        text = text.strip()
        if len(text) > MAX_LINK_CHARS:
            raise _malformed(f"it has {len(text)} characters, at most {MAX_LINK_CHARS} are read")
        try:
            parts = urlsplit(text)
            pairs = parse_qsl(
                parts.query,
                keep_blank_values=True,
                strict_parsing=bool(parts.query),
                max_num_fields=3 + MAX_ADDRESSES + MAX_DISCOVERY,
            )
        except ValueError as error:
            raise _malformed(str(error)) from error
        if parts.scheme != SCHEME:
            raise _malformed(f"it begins with {text[:16]!r}, not '{SCHEME}://'")
        if parts.fragment:
            raise _malformed(f"it ends in {'#' + parts.fragment[:16]!r}")
        query: dict[str, list[str]] = {}
        for name, value in pairs:
            query.setdefault(name, []).append(value)
        run_id = _match(_RUN_ID, "run", parts.path.removeprefix("/"))
        fingerprint = _match(_FINGERPRINT, "fp", _single(query, "fp").lower())
        token = _match(_TOKEN, "token", _single(query, "token"))
        expires_s = int(_match(_EXPIRES, "expires", _single(query, "expires")))
        addresses = (parts.netloc, *query.pop("also", []))
        discovery = tuple(query.pop("dht", []))
        if query:
            raise _malformed(f"it has the unknown part {next(iter(query))[:32]!r}; update shoal")
        if len(addresses) > MAX_ADDRESSES or len(discovery) > MAX_DISCOVERY:
            raise _malformed(
                f"it has {len(addresses)} addresses and {len(discovery)} dht entries, at most "
                f"{MAX_ADDRESSES} and {MAX_DISCOVERY} are read"
            )
        for address in addresses:
            try:
                split_address(address)
            except ValueError as error:
                raise _malformed(str(error)) from error
        for multiaddr in discovery:
            _match(_MULTIADDR, "dht", multiaddr)
        return cls(
            addresses=addresses,
            run_id=RunId(run_id),
            fingerprint=fingerprint,
            token=token,
            expires_s=expires_s,
            discovery=discovery,
        )

    def require_fresh(self, now_s: float) -> None:
        """Raises `AdmissionError` once the link has expired, before anybody is asked."""
        if now_s >= self.expires_s:
            raise AdmissionError(expired_message(self.expires_s, now_s))


def _single(query: dict[str, list[str]], name: str) -> str:
    values = query.pop(name, [])
    if len(values) != 1:
        raise _malformed(f"it has {name}= {len(values)} times instead of once")
    return values[0]


def _match(pattern: re.Pattern[str], name: str, value: str) -> str:
    if pattern.fullmatch(value) is None:
        raise _malformed(f"{value[:40]!r} is no valid {name}")
    return value


def _malformed(reason: str) -> AdmissionError:
    return AdmissionError(
        f"the join link is malformed: {reason}; copy the whole line again, in quotes, as in "
        f"shoal join '{SCHEME}://HOST:PORT/RUN?fp=…&token=…&expires=…'"
    )
