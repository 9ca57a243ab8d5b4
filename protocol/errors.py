# SPDX-License-Identifier: Apache-2.0
"""Every error that Shoal raises on purpose, mapped once to exit codes and gRPC status codes.

A message names the cause, the value and the remedy. Errors caused by a peer's bytes derive from
`ProtocolError`; the receiver refuses the bytes, reports the sender, and goes on.
"""

from typing import ClassVar

import grpc


class ShoalError(Exception):
    """Root of the tree. `exit_code` is documented in docs/operating.md."""

    exit_code: ClassVar[int] = 1
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL


# ---- the user's side ---------------------------------------------------------------------


class ConfigError(ShoalError):
    """A run spec, node config or flag is wrong: field, value, remedy."""

    exit_code = 2
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class DataError(ShoalError):
    """A text source or tokenizer can't be read or is too small."""

    exit_code = 3


class StorageError(ShoalError):
    """A disk is full, a folder unwritable, a stored file damaged."""

    exit_code = 4
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DiskFullError(StorageError):
    """No room on a disk: it may pass, and nothing was damaged."""

    def __init__(self, message: str, *, folder: str = "", needed_bytes: int = 0) -> None:
        """`folder` is where room is needed; of a disk of this process only."""
        super().__init__(message)
        self.folder = folder
        self.needed_bytes = needed_bytes


class CoordinatorDiskError(StorageError):
    """The coordinator's disk refused what a node sent: not the node's trouble."""


class VersionError(ShoalError):
    """Two versions of something differ: names both and the remedy."""

    exit_code = 5
    grpc_status = grpc.StatusCode.FAILED_PRECONDITION


class AdmissionError(ShoalError):
    """A join link is expired, malformed or for another run, or the identity isn't proven."""

    exit_code = 6
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class UnreachableError(ShoalError):
    """Nobody answers at an address, within the deadline."""

    exit_code = 7
    grpc_status = grpc.StatusCode.UNAVAILABLE


class CapacityError(ShoalError):
    """Hardware, memory or port that is needed isn't to be had."""

    exit_code = 8
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class RunFailedError(ShoalError):
    """The run ended without all its steps, or an invariant did not hold."""

    exit_code = 9


class HandOverError(ShoalError):
    """A node left before others had what only it held."""

    exit_code = 12


# ---- the wire ----------------------------------------------------------------------------


class ProtocolError(ShoalError):
    """A peer sent something that the plan does not allow. Refused; the sender is marked."""

    exit_code = 10
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class MalformedFrameError(ProtocolError):
    """Bytes that can't be parsed, a missing header, or a chunk where a header belongs."""


class TruncatedStreamError(ProtocolError):
    """A stream ended before the announced number of bytes."""


class OversizedStreamError(ProtocolError):
    """More bytes than announced, or than the plan allows."""


class ChecksumError(ProtocolError):
    """Payload and checksum differ."""


class WrongRunError(ProtocolError):
    """A tensor of another run."""


class WrongStepError(ProtocolError):
    """A tensor of a step or attempt that isn't open here."""


class ImpossibleStepError(WrongStepError):
    """A tensor of a step so far from the open one that no delay explains it."""


class WrongLeaseError(ProtocolError):
    """A tensor for a microbatch or stage that this node doesn't hold."""


class ImpossibleLeaseError(WrongLeaseError):
    """A tensor between stages that are no neighbours, or of a microbatch that no step has."""


class WrongShapeError(ProtocolError):
    """Shape, dtype or payload length other than the plan's."""


class WrongCodecError(ProtocolError):
    """Another codec or codec version than the run spec's."""


class NonFiniteError(ProtocolError):
    """NaN or infinity in a boundary tensor or gradient."""


class NonFiniteLossError(NonFiniteError):
    """The loss is NaN or infinite: no loss scale helps."""


class FencedError(ProtocolError):
    """A message of a fenced or unknown incarnation."""

    grpc_status = grpc.StatusCode.FAILED_PRECONDITION


class TermError(FencedError):
    """Another coordinator leads the run, or a node has promised itself to a higher term."""

    exit_code = 11

    def __init__(self, message: str, *, term: int = 0, address: str = "") -> None:
        """`term` and `address` are the other's, where they are known."""
        super().__init__(message)
        self.term = term
        self.address = address


class UnknownPeerError(ProtocolError):
    """A peer whose certificate does not belong to anybody in the plan."""

    grpc_status = grpc.StatusCode.PERMISSION_DENIED


class CodecError(ProtocolError):
    """An encoded payload that its codec can't decode."""


class ReduceMismatchError(ProtocolError):
    """A reduce manifest and an accumulator, or two replicas' sums, disagree."""


class NumericOverflowError(ProtocolError):
    """A gradient does not fit the fixed-point scale."""

    grpc_status = grpc.StatusCode.OUT_OF_RANGE


class BoundaryHoleError(ProtocolError):
    """A replay lacks what a peer's boundary log should hold; `peer_id` says whose."""

    def __init__(self, message: str, peer_id: str = "") -> None:
        super().__init__(message)
        self.peer_id = peer_id


class ReplayMismatchError(ProtocolError):
    """A replayed step gave other sums or weights than its record."""


class RecordError(ProtocolError):
    """A discovery record that is forged, expired, or speaks for somebody else."""


def error_class(name: str) -> type[ShoalError]:
    """The class with this name, or `ShoalError` for a name that isn't known here."""
    pending: list[type[ShoalError]] = [ShoalError]
    while pending:
        candidate = pending.pop()
        if candidate.__name__ == name:
            return candidate
        pending.extend(candidate.__subclasses__())
    return ShoalError
