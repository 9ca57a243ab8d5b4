# SPDX-License-Identifier: Apache-2.0
"""What a node has promised to a run's coordinators, and the records that it keeps for them.

A promise is on disk before it is answered: from then on the node follows no coordinator of a lower
term, also after a restart. The newest record is written before it is applied, without waiting for
the disk: a lost one costs no correctness, only work.
"""

import contextlib
import hashlib
import json
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from shoal.protocol.atomic_file import AtomicFile, storage_error
from shoal.protocol.errors import OversizedStreamError, ProtocolError, StorageError, TermError
from shoal.protocol.ids import RunId
from shoal.protocol.join_link import split_address
from shoal.protocol.proto import coordinator_pb2
from shoal.protocol.spec import canonical_json
from shoal.protocol.step_record import MAX_RECORD_BYTES, SignedRecord, open_step_record

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 64
MAX_RECORDS_BYTES: Final = 4 << 20
MAX_STANDBYS: Final = 8

_MAX_RUNS = 64
"""Runs whose promises are kept in a node's folder."""

_MAX_ID_CHARS = 200

_MAX_FILE_BYTES = 2 * MAX_RECORD_BYTES + 4096


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True)

    admission: str
    session: str


class Promised(BaseModel):
    model_config = ConfigDict(frozen=True)

    term: Annotated[int, Field(ge=0)] = 0
    coordinator_id: str = ""
    address: str = ""
    """Session address of whom `term` was promised to."""
    proof: Annotated[str, Field(pattern=r"^[0-9a-f]{0,256}$")] = ""
    """That this coordinator claimed the term, in hex."""
    standbys: tuple[_Place, ...] = ()


class _KeptRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    record: str
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]


class Promises:
    """Of one node to one run: the run and its authority, for a run's id may be used again."""

    def __init__(self, folder: Path, run_id: RunId, fingerprint: str) -> None:
        """`fingerprint` is that of the run's authority (64 hex digits)."""
        self._run_id = run_id
        self._path = folder / "promises" / f"{run_id}-{fingerprint[:16]}.json"
        self._record_path = self._path.with_suffix(".record.json")
        self._authority_der = b""
        self._fingerprint = fingerprint
        self._records: deque[SignedRecord] = deque()
        self._lock = threading.Lock()
        self._promised = _read_promised(self._path)

    def trust(self, authority_der: bytes) -> None:
        """Whose signature records must carry; what lies on the disk is read now. Raises
        `ProtocolError` for another authority than the run's."""
        if hashlib.sha256(authority_der).hexdigest() != self._fingerprint:
            raise ProtocolError("the authority's certificate is another run's")
        self._authority_der = authority_der
        if not self._records and (kept := self._read_record()) is not None:
            self._records.append(kept)

    @property
    def term(self) -> int:
        return self._promised.term

    @property
    def admission_addresses(self) -> list[str]:
        """Of the coordinators that stood by, as this node has last heard."""
        return [place.admission for place in self._promised.standbys]

    @property
    def session_addresses(self) -> list[str]:
        return [place.session for place in self._promised.standbys]

    # ---- promises ------------------------------------------------------------------------

    def answer(self, lead: coordinator_pb2.Lead, address: str) -> coordinator_pb2.Promise:
        """Promise a term to the coordinator at `address`, or refuse it for a higher one. Blocks.

        Raises `StorageError` when the promise can't be kept, and `ProtocolError` for a record that
        the authority has not signed; nothing is promised then.
        """
        if len(lead.coordinator_id) > _MAX_ID_CHARS:
            raise OversizedStreamError(
                f"a coordinator's id of {len(lead.coordinator_id)} characters; at most "
                f"{_MAX_ID_CHARS}"
            )
        with self._lock:
            held = self._promised
            asked = (lead.term, lead.coordinator_id)
            if lead.term < held.term or (
                lead.term == held.term and asked[1] != held.coordinator_id
            ):
                return coordinator_pb2.Promise(
                    term=held.term,
                    refused=True,
                    coordinator_id=held.coordinator_id,
                    address=held.address,
                    proof=bytes.fromhex(held.proof),
                )
            record = self._open(lead.record) if lead.HasField("record") else None
            if asked != (held.term, held.coordinator_id) or address != held.address:
                self._write(
                    held.model_copy(
                        update={
                            "term": lead.term,
                            "coordinator_id": lead.coordinator_id,
                            "address": address,
                            "proof": lead.proof[:128].hex(),
                        }
                    )
                )
            if record is not None and self._lacks(record):
                self._keep(record)
            return coordinator_pb2.Promise(
                term=lead.term,
                records=[
                    coordinator_pb2.SignedRecord(record=r.content, signature=r.signature)
                    for r in self._records
                    if r.commits >= lead.commits
                ],
                commits=self._records[-1].commits if self._records else 0,
                record_term=self._records[-1].term if self._records else 0,
            )

    def know_standbys(self, standbys: coordinator_pb2.Standbys) -> None:
        """Remember where else the run may be found. Blocks. Raises `StorageError`."""
        places = []
        for standby in standbys.standbys[:MAX_STANDBYS]:
            try:
                split_address(standby.admission)
                split_address(standby.session)
            except ValueError as error:
                log.info("ignored a standby's address: %s", error)
                continue
            places.append(_Place(admission=standby.admission, session=standby.session))
        with self._lock:
            if tuple(places) != self._promised.standbys:
                self._write(self._promised.model_copy(update={"standbys": tuple(places)}))

    # ---- records -------------------------------------------------------------------------

    def keep(self, commit: coordinator_pb2.Commit) -> None:
        """Keep a commit's record, before it is applied. Blocks. Raises `TermError` for a commit
        in another term than the one promised, `ProtocolError` for a bad record."""
        with self._lock:
            if commit.term != self._promised.term:
                raise TermError(
                    f"a commit in term {commit.term}; this node has promised "
                    f"term {self._promised.term}",
                    term=self._promised.term,
                )
            sealed = coordinator_pb2.SignedRecord(record=commit.record, signature=commit.signature)
            self._keep(self._open(sealed))

    def _open(self, sealed: coordinator_pb2.SignedRecord) -> SignedRecord:
        return open_step_record(sealed.record, sealed.signature, self._run_id, self._authority_der)

    def _lacks(self, record: SignedRecord) -> bool:
        """Whether a claimant's newest record is news: it may not lead in the end, so it replaces
        only what was committed in a lower term."""
        newest = self._records[-1] if self._records else None
        if newest is None or newest.commits < record.commits:
            return True
        return newest.commits == record.commits and newest.term < record.term

    def _keep(self, record: SignedRecord) -> None:
        """Numbers rise without a hole; a record replaces another one of its number, and those
        after it, which nobody has built on."""
        while self._records and self._records[-1].commits >= record.commits:
            self._records.pop()
        if self._records and self._records[-1].commits != record.commits - 1:
            self._records.clear()
        self._records.append(record)
        while len(self._records) > MAX_RECORDS or (
            len(self._records) > 1
            and sum(len(r.content) for r in self._records) > MAX_RECORDS_BYTES
        ):
            self._records.popleft()
        self._write_record(record)

    # ---- the disk ------------------------------------------------------------------------

    def _write(self, promised: Promised) -> None:
        with AtomicFile(self._path) as file:
            file.write(canonical_json(promised.model_dump()))
        self._promised = promised
        self._forget_old_runs()

    def _write_record(self, record: SignedRecord) -> None:
        kept = _KeptRecord(record=record.content.decode(), signature=record.signature.hex())
        try:
            with AtomicFile(self._record_path, durable=False) as file:
                file.write(canonical_json(kept.model_dump()))
        except StorageError as error:  # it is in memory, and any other node has it too
            log.warning("%s", error)

    def _read_record(self) -> SignedRecord | None:
        try:
            with self._record_path.open("rb") as file:
                kept = _KeptRecord.model_validate(json.loads(file.read(_MAX_FILE_BYTES)))
            sealed = coordinator_pb2.SignedRecord(
                record=kept.record.encode(), signature=bytes.fromhex(kept.signature)
            )
            return self._open(sealed)
        except FileNotFoundError:  # it has taken part in no step yet
            return None
        except (OSError, ValueError, ProtocolError) as error:
            log.warning("no record kept of %s: %s", self._run_id, error)
            return None

    def _forget_old_runs(self) -> None:
        files = [p for p in self._path.parent.glob("*.json") if not p.name.startswith(".")]
        own = {self._path, self._record_path}
        files = sorted((p for p in files if p not in own), key=lambda p: p.stat().st_mtime)
        for path in files[: max(0, len(files) - 2 * _MAX_RUNS)]:
            with contextlib.suppress(OSError):  # they cost little; another time
                path.unlink()


def _read_promised(path: Path) -> Promised:
    """Raises `StorageError` when there is a promise that can't be read: it must not be broken."""
    try:
        with path.open("rb") as file:
            return Promised.model_validate(json.loads(file.read(_MAX_FILE_BYTES)))
    except FileNotFoundError:
        return Promised()
    except OSError as error:
        raise storage_error(path, error) from error
    except ValueError as error:
        raise storage_error(path, OSError(f"damaged ({type(error).__name__})")) from error
