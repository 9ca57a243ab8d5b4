# SPDX-License-Identifier: Apache-2.0
"""The record of a committed step as nodes keep it: canonical JSON, signed by the run's authority.

A node understands only the record's head. It keeps the newest records, so that whoever leads next
learns of a commit that was announced, though the log that it stands in may be gone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.protocol.authority import verify_with_certificate
from shoal.protocol.errors import MalformedFrameError, OversizedStreamError, RecordError
from shoal.protocol.ids import RunId

MAX_RECORD_BYTES: Final = 1 << 20

_DOMAIN: Final = b"shoal step record v1\0"
_TERM_DOMAIN: Final = b"shoal term v1\0"


class _Head(BaseModel):
    """What every release can read of a record."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    term: Annotated[int, Field(ge=1, lt=1 << 63)]
    commits: Annotated[int, Field(ge=1, lt=1 << 63)]
    step: Annotated[int, Field(ge=1, lt=1 << 63)]


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """`commits` counts records in the order of their commits; after a rollback steps repeat."""

    term: int
    commits: int
    step: int
    content: bytes
    signature: bytes


def sign_step_record(content: bytes, run_id: RunId, sign: Callable[[bytes], bytes]) -> bytes:
    """`sign` is `Authority.sign`."""
    return sign(_statement(content, run_id))


def open_step_record(
    content: bytes, signature: bytes, run_id: RunId, authority_der: bytes
) -> SignedRecord:
    """Verify a record from the wire or from disk.

    Raises `OversizedStreamError`, `RecordError` for a forged one, `MalformedFrameError` for one
    without a head.
    """
    if len(content) > MAX_RECORD_BYTES:
        raise OversizedStreamError(
            f"a step record of {len(content)} bytes; at most {MAX_RECORD_BYTES}"
        )
    if not verify_with_certificate(authority_der, signature, _statement(content, run_id)):
        raise RecordError("a step record that the run's authority has not signed")
    try:
        head = _Head.model_validate_json(content)
    except ValidationError as error:
        raise MalformedFrameError(f"not a step record: {error.errors()[0]['type']}") from None
    return SignedRecord(head.term, head.commits, head.step, content, signature)


def term_statement(run_id: RunId, term: int, coordinator_id: str) -> bytes:
    """What the authority signs for a coordinator that claims a term: so no node can invent one."""
    return _TERM_DOMAIN + f"{run_id}\0{term}\0{coordinator_id}".encode()


def _statement(content: bytes, run_id: RunId) -> bytes:
    return _DOMAIN + run_id.encode() + b"\0" + content
