# SPDX-License-Identifier: Apache-2.0
"""gRPC as Shoal uses it: credentials, channels, servers, and errors that cross the wire.

Every channel and server is made here, so limits, keepalive and pinning are the same everywhere.
"""

import asyncio
import random
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio

from shoal.protocol.authority import AuthorityProof, peer_host, peer_id_from_uri
from shoal.protocol.errors import (
    CapacityError,
    OversizedStreamError,
    ShoalError,
    UnknownPeerError,
    UnreachableError,
    VersionError,
    error_class,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.join_link import split_address
from shoal.protocol.printable import printable

R = TypeVar("R")

DEADLINE_S: Final = 10.0
"""For a unary call that does no heavy work. Bulk transfers bring their own."""

CONNECT_DEADLINE_S: Final = 5.0
"""For reaching a peer at all: name lookup, TCP, TLS."""

MAX_MESSAGE_BYTES: Final = 8 * 2**20

_MAX_DETAIL_CHARS: Final = 1000  # percent-encoded UTF-8 must fit into 8 KiB of metadata

# Two ways of going silent. Packets vanish: gRPC also gives keepalive_timeout to the kernel, as
# TCP_USER_TIMEOUT, which counts only while nothing at all is acknowledged, so that 1 s to the next
# ping and 2 s of silence end the connection after about 3 s, yet a full uplink doesn't. A process
# hangs (or the system has no TCP_USER_TIMEOUT): only the missing answer to a ping tells. gRPC
# waits ping_timeout for it, 60 s unless set, whatever keepalive_timeout says; it must be longer
# than the seconds of data that a ping waits behind on a slow, busy uplink.
_COMMON_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # proxy variables must never capture traffic between peers
    ("grpc.use_local_subchannel_pool", 1),  # no connection is shared between two pins
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),  # whoever calls decides what is safe to repeat
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_DEADLINE_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
SERVER_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server behind it
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 128),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


# ---- credentials -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Certificates:
    private_key_pem: bytes = field(repr=False)
    leaf_pem: bytes
    authority_pem: bytes


class Credentials:
    """A process's TLS key and leaf, and the one authority that it trusts. PEM throughout.

    After `replace`, running servers present the new leaf to whoever connects next, and new
    channels use it. Open connections and channels keep the old one; a channel that lives longer
    than its leaf can't reconnect, so open it anew after a renewal.
    """

    def __init__(self, *, private_key_pem: bytes, leaf_pem: bytes, authority_pem: bytes) -> None:
        self._current = _Certificates(private_key_pem, leaf_pem, authority_pem)

    def replace(self, *, leaf_pem: bytes, private_key_pem: bytes | None = None) -> None:
        """Puts a renewed leaf in place; with `private_key_pem` when the key is new too."""
        old = self._current
        # One assignment: gRPC's threads read the fields together or not at all.
        self._current = _Certificates(
            private_key_pem or old.private_key_pem, leaf_pem, old.authority_pem
        )

    @property
    def leaf_pem(self) -> bytes:
        return self._current.leaf_pem

    @property
    def authority_pem(self) -> bytes:
        return self._current.authority_pem

    def server_credentials(self) -> grpc.ServerCredentials:
        """Mutual TLS: only clients with a leaf of this authority get in."""
        return grpc.dynamic_ssl_server_credentials(
            self._mutual_configuration(),
            self._mutual_configuration,
            require_client_authentication=True,
        )

    def admission_server_credentials(self) -> grpc.ServerCredentials:
        """For the coordinator's admission port, where clients have no certificate yet."""
        return grpc.dynamic_ssl_server_credentials(
            self._admission_configuration(),
            self._admission_configuration,
            require_client_authentication=False,
        )

    def channel(self, address: str, peer_id: PeerId) -> grpc.aio.Channel:
        """A channel to whoever proves to be `peer_id` at host:port; nobody else is talked to.

        Connects at the first call. `UnreachableError` when the address isn't host:port.
        """
        current = self._current
        credentials = grpc.ssl_channel_credentials(
            root_certificates=current.authority_pem,
            private_key=current.private_key_pem,
            certificate_chain=current.leaf_pem,
        )
        return _pinned_channel(address, peer_id, credentials)

    def _mutual_configuration(self) -> grpc.ServerCertificateConfiguration:
        current = self._current
        return grpc.ssl_server_certificate_configuration(
            [(current.private_key_pem, current.leaf_pem)], root_certificates=current.authority_pem
        )

    def _admission_configuration(self) -> grpc.ServerCertificateConfiguration:
        current = self._current
        return grpc.ssl_server_certificate_configuration(
            [(current.private_key_pem, current.leaf_pem)]
        )


def admission_channel(address: str, proof: AuthorityProof) -> grpc.aio.Channel:
    """A channel to the admission port, pinned to the coordinator that `fetch_authority` found."""
    credentials = grpc.ssl_channel_credentials(root_certificates=proof.authority_pem)
    return _pinned_channel(address, proof.server_peer_id, credentials)


def _pinned_channel(
    address: str, peer_id: PeerId, credentials: grpc.ChannelCredentials
) -> grpc.aio.Channel:
    try:
        split_address(address)
    except ValueError as error:
        raise UnreachableError(f"can't call peer {peer_id}: its address {error}") from error
    # The scheme is spelled out: addresses come from peers, and "unix:1" would name a socket.
    return grpc.aio.secure_channel(
        f"dns:///{address}",
        credentials,
        options=[*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", peer_host(peer_id))],
    )


# ---- servers -----------------------------------------------------------------------------


def create_server(*, maximum_concurrent_rpcs: int | None = None) -> grpc.aio.Server:
    """A server with Shoal's limits; further calls are refused with RESOURCE_EXHAUSTED."""
    return grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=maximum_concurrent_rpcs)


def serve_secure(server: grpc.aio.Server, address: str, creds: grpc.ServerCredentials) -> int:
    """Binds a server of `create_server` to host:port and returns the port (0 picks a free one).

    Call before `server.start()`. `CapacityError` when the port is taken or not to be had.
    """
    try:
        port = server.add_secure_port(address, creds)
    except (RuntimeError, ValueError) as error:
        raise CapacityError(_cannot_listen(address)) from error
    if port == 0:
        raise CapacityError(_cannot_listen(address))
    return port


def _cannot_listen(address: str) -> str:
    return (
        f"can't listen on {address}: another program holds the port, or the address isn't this "
        "machine's; stop that program, or choose another port (0 picks a free one)"
    )


def peer_id_from_context(context: grpc.aio.ServicerContext[Any, Any]) -> PeerId:
    """The caller's peer id, out of the certificate that TLS has verified.

    `UnknownPeerError` when the caller showed no certificate or it names not exactly one peer.
    """
    names = context.auth_context().get("x509_subject_alternative_name", ())
    found = [peer_id_from_uri(name.decode("ascii", "replace")) for name in names]
    peer_ids = [peer_id for peer_id in found if peer_id is not None]
    if len(peer_ids) != 1:
        raise UnknownPeerError(
            f"the caller's certificate names {len(peer_ids)} Shoal peers instead of one; join the "
            "run first, and call with the certificate that it gave"
        )
    return peer_ids[0]


# ---- errors across the wire --------------------------------------------------------------


_CLASS_AND_MESSAGE: Final = re.compile(r"([A-Z][A-Za-z]{1,60}Error): (.*)", re.DOTALL)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ShoalError) -> NoReturn:
    """Ends the call with this error, for `error_from_rpc` on the other side."""
    details = f"{type(error).__name__}: {error}"[:_MAX_DETAIL_CHARS]
    await context.abort(error.grpc_status, details)


async def reply_of(call: Awaitable[R]) -> R:
    """A unary call's reply, for callers that outlive the channel.

    gRPC ends a call whose channel is closed here with `CancelledError`, as if somebody had
    cancelled the task that waits. That becomes `UnreachableError`.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnreachableError("the connection was closed before the answer came") from None


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> ShoalError:
    """What a failed call means: the other side's `ShoalError`, or why nobody answered."""
    code = rpc_error.code()
    raw_details = (rpc_error.details() or "no details")[:_MAX_DETAIL_CHARS]
    details = printable(raw_details, kept="\n")
    match = _CLASS_AND_MESSAGE.fullmatch(details)
    if match is not None and (cls := error_class(match[1])) is not ShoalError:
        return cls(match[2])
    if code in _UNREACHABLE or "Stream removed" in details or "RST_STREAM" in details:
        return UnreachableError(f"the call got no answer ({code.name}: {details})")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return VersionError(
            f"the other side doesn't offer this call ({details}); install the same release of "
            "shoal on both sides"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return OversizedStreamError(f"a message is over {MAX_MESSAGE_BYTES} bytes ({details})")
    return ShoalError(f"the call failed on the other side ({code.name}: {details})")


_UNREACHABLE: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


def backoff(
    attempt: int, rng: random.Random, *, base_s: float = 0.25, limit_s: float = 10.0
) -> float:
    """Seconds to wait before try `attempt` + 1 (from 0): doubling up to the limit, half jittered
    so that nodes which lost the same peer don't return at the same moment.
    """
    span_s = min(limit_s, base_s * 2.0 ** min(max(attempt, 0), 32))
    return span_s * rng.uniform(0.5, 1.0)
