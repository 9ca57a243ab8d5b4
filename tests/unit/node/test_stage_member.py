# SPDX-License-Identifier: Apache-2.0
"""A member whose numbers go wrong gives the microbatch back and goes on with the others."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from shoal.compression.registry import parse_boundary
from shoal.node import boundary_log
from shoal.node.boundary_log import BoundaryLog
from shoal.node.hardware import Device
from shoal.node.inbox import BoundaryTensor
from shoal.node.log_file import Sent, write_step
from shoal.node.stage_member import StageMember
from shoal.node.stage_worker import StageWorker
from shoal.node.swarm_view import SwarmView
from shoal.protocol.errors import NonFiniteError, NonFiniteLossError, NumericOverflowError
from shoal.protocol.ids import Incarnation, MicrobatchId
from shoal.protocol.proto import coordinator_pb2, types_pb2
from shoal.protocol.scale import scale_exponent
from shoal.protocol.spec import ResolvedRun

from .tiny_run import tiny_run

RUN = tiny_run(1)
ME = Incarnation(5)
UPSTREAM = Incarnation(4)
WAIT_S = 30.0

Loss = Callable[..., Any]


class Tokens:
    async def ensure_training(self, step: int, microbatches: Any) -> None:
        pass

    async def ensure_validation(self, microbatches: Any) -> None:
        pass

    def training(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(9).unsqueeze(0) + microbatch
        return tokens[:, :-1], tokens[:, 1:]

    def validation(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.training(0, index)


class Bench:
    """The last stage of a run, held by a real worker on the CPU."""

    def __init__(self, run: ResolvedRun = RUN, log: BoundaryLog | None = None) -> None:
        boundary = parse_boundary("fp32")
        tokens: Any = Tokens()
        device = Device(torch.device("cpu"), "test", 1 << 30, 1.0, "fp32", 1)
        stage = run.spec.pipeline.stages - 1
        self.worker = StageWorker(run, stage, boundary=boundary, device=device, tokens=tokens)
        self.log = log
        self.sent: asyncio.Queue[coordinator_pb2.NodeEvent] = asyncio.Queue()

    async def open(self, *, num_validation: int = 0) -> None:
        credentials: Any = None
        await self.worker.create()
        await self.worker.initialise()
        self.member = StageMember(
            self.worker, incarnation=ME, boundary=parse_boundary("fp32"), swarm=SwarmView(),
            credentials=credentials, device=torch.device("cpu"), send=self.sent.put_nowait,
            log=self.log,
        )  # fmt: skip
        self._num_validation = num_validation

    async def step(self, *, attempt: int = 3, loss_scale: float = 1.0) -> None:
        leases = [
            coordinator_pb2.Lease(microbatch=m, upstream=UPSTREAM)
            for m in range(2 + self._num_validation)
        ]
        await self.member.open_step(
            coordinator_pb2.StepOpen(
                step=1, attempt=attempt, num_microbatches=2, num_validation=self._num_validation,
                scale_exponent=scale_exponent(16), loss_scale=loss_scale, leases=leases, window=9,
                credits=9,
            )
        )  # fmt: skip

    async def compute(self, *, attempt: int = 3) -> None:
        """What the stage before sends arrives, and is worked off."""
        for m in map(MicrobatchId, range(2)):
            x = torch.full((1, 8, 16), 0.5 + m)
            self.member._deliver(BoundaryTensor(1, attempt, "forward", m, UPSTREAM, x))
        for _ in range(2):
            assert (await self.next()).HasField("receipt")

    async def reduce(self, *, attempt: int = 3) -> None:
        part = coordinator_pb2.ReducePart(incarnation=ME, microbatches=[0, 1])
        await self.member.reduce(
            coordinator_pb2.Reduce(step=1, attempt=attempt, round=1, parts=[part])
        )

    async def lease(self, microbatch: int) -> None:
        await self.member.update_leases(
            coordinator_pb2.LeaseUpdate(
                step=1, attempt=3, leases=[coordinator_pb2.Lease(microbatch=microbatch)]
            )
        )

    async def next(self) -> coordinator_pb2.NodeEvent:
        return await asyncio.wait_for(self.sent.get(), WAIT_S)

    def spoil_once(self, monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[Loss], Loss]) -> None:
        """The next loss goes wrong."""
        runtime = self.worker.runtime
        good = runtime.forward_backward_loss

        def once(*arguments: Any) -> Any:
            monkeypatch.setattr(runtime, "forward_backward_loss", good)
            return spoilt(good)(*arguments)

        monkeypatch.setattr(runtime, "forward_backward_loss", once)


def before_adding(error: Exception) -> Callable[[Loss], Loss]:
    def spoilt(good: Loss) -> Loss:
        def fail(*_: Any) -> Any:
            raise error

        return fail

    return spoilt


def after_adding(good: Loss) -> Loss:
    def fail(*arguments: Any) -> Any:
        good(*arguments)
        raise NonFiniteError("encoding it")

    return fail


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    await made.open()
    yield made
    await made.member.close()
    made.worker.close()


@pytest.mark.parametrize(
    ("error", "leg"),
    [
        (NonFiniteError("a gradient"), coordinator_pb2.TASK_LEG_BACKWARD),
        (NumericOverflowError("a gradient"), coordinator_pb2.TASK_LEG_BACKWARD),
        (NonFiniteLossError("the loss"), coordinator_pb2.TASK_LEG_FORWARD),
    ],
)
async def test_what_went_wrong_is_given_back_and_can_be_leased_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, leg: int
) -> None:
    bench.spoil_once(monkeypatch, before_adding(error))
    await bench.step()
    trouble = (await bench.next()).trouble
    assert trouble.kind == coordinator_pb2.TROUBLE_KIND_NUMBERS
    assert (trouble.incarnation, trouble.step, trouble.attempt) == (ME, 1, 3)
    assert (trouble.microbatch, trouble.error, trouble.leg) == (0, type(error).__name__, leg)
    assert (await bench.next()).receipt.microbatch == 1
    assert bench.worker.runtime.accumulated == {1}, "others may add it"
    await bench.lease(0)
    assert (await bench.next()).receipt.microbatch == 0
    assert bench.worker.runtime.accumulated == {0, 1}


async def test_what_is_in_the_sums_already_is_said_to_be(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.spoil_once(monkeypatch, after_adding)
    await bench.step()
    trouble = (await bench.next()).trouble
    assert (trouble.microbatch, trouble.leg) == (0, coordinator_pb2.TASK_LEG_SUMMED)
    assert (await bench.next()).receipt.microbatch == 1
    assert bench.sent.empty(), "it is not tried again in this attempt"


async def test_a_validation_loss_that_is_not_finite_is_no_receipt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench._num_validation = 1

    def bad(*_: Any) -> float:
        raise NonFiniteLossError("the loss")

    monkeypatch.setattr(bench.worker.runtime, "evaluate_loss", bad)
    await bench.step()
    events = [await bench.next() for _ in range(3)]
    troubles = [e.trouble for e in events if e.HasField("trouble")]
    assert [(t.microbatch, t.leg) for t in troubles] == [(2, coordinator_pb2.TASK_LEG_FORWARD)]


async def test_a_neighbours_refusal_of_an_older_attempt_is_not_reported(bench: Bench) -> None:
    await bench.step()
    for _ in range(2):
        assert (await bench.next()).HasField("receipt")
    member = types_pb2.Member(name="neighbour")
    for attempt in (2, 3):
        key = types_pb2.TensorKey(
            step=1, attempt=attempt, microbatch=1, direction=types_pb2.DIRECTION_BACKWARD
        )
        bench.member._report_refused(member, key, NonFiniteError("NaN"))
    trouble = (await bench.next()).trouble
    assert (trouble.attempt, trouble.microbatch) == (3, 1)
    assert trouble.leg == coordinator_pb2.TASK_LEG_SUMMED
    assert bench.sent.empty()


# ---- the boundary log --------------------------------------------------------------------

TWO_STAGES = tiny_run(2)


class LoggingBench(Bench):
    """The second stage of two, with a boundary log on a disk that can be held up."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, patience_s: float = 3600.0
    ) -> None:
        self.files = folder / RUN.run_id
        self.disk_goes_on = threading.Event()
        self.disk_goes_on.set()
        monkeypatch.setattr(boundary_log, "write_step", self._write)
        log = BoundaryLog(
            folder, RUN.run_id, boundary="fp32", budget_bytes=10**6, patience_s=patience_s
        )
        super().__init__(TWO_STAGES, log)
        self.boundary_log = log

    def _write(self, path: Path, entries: Sequence[Sent], boundary: str) -> None:
        assert self.disk_goes_on.wait(WAIT_S)
        write_step(path, entries, boundary)

    async def gradients(self) -> list[bytes | None]:
        """What the log has of the step, by microbatch."""
        places = await self.boundary_log.places(1, 1)
        keys = [key for key in places if key[0] == "backward"]
        assert keys == list(places)
        return [await self.boundary_log.read(1, 1, places[key]) for key in sorted(keys)]

    async def __aenter__(self) -> "LoggingBench":
        await self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.disk_goes_on.set()
        await self.member.close()
        self.worker.close()
        await self.boundary_log.close()


async def test_who_says_that_it_is_prepared_has_its_log_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoggingBench(tmp_path, monkeypatch) as bench:
        bench.disk_goes_on.clear()
        await bench.step()
        await bench.compute()
        await bench.reduce()
        while not bench.boundary_log.is_awaited:  # noqa: ASYNC110  # the log has no event for it
            await asyncio.sleep(0)
        assert bench.sent.empty()
        assert bench.member.waiting_for() == "its disk, to write the boundary log"
        bench.disk_goes_on.set()
        assert (await bench.next()).HasField("prepared")
        assert [path.name for path in bench.files.iterdir()] == ["step-00000001-stage-1.bin"]
        assert [len(payload or b"") for payload in await bench.gradients()] == [4 * 8 * 16] * 2


async def test_a_disk_that_hangs_costs_only_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoggingBench(tmp_path, monkeypatch, patience_s=0.0) as bench:
        bench.disk_goes_on.clear()
        await bench.step()
        await bench.compute()
        await bench.reduce()
        assert (await bench.next()).HasField("prepared")
        assert not bench.files.exists()


async def test_a_step_at_another_loss_scale_leaves_no_bytes_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoggingBench(tmp_path, monkeypatch) as bench:
        await bench.step()
        await bench.compute()
        await bench.reduce()
        assert (await bench.next()).HasField("prepared")
        first = await bench.gradients()

        await bench.step(attempt=4, loss_scale=2.0)
        assert await bench.gradients() == []
        await bench.compute(attempt=4)
        await bench.reduce(attempt=4)
        assert (await bench.next()).HasField("prepared")
        again = await bench.gradients()
        assert len(first) == len(again) == 2
        for before, after in zip(first, again, strict=True):
            assert before is not None
            assert after is not None
            doubled = 2 * torch.frombuffer(bytearray(before), dtype=torch.float32)
            assert torch.equal(torch.frombuffer(bytearray(after), dtype=torch.float32), doubled)
