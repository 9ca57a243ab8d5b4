# SPDX-License-Identifier: Apache-2.0
"""A node's share of a step, alone and in a whole pipeline whose messages come in any order."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.node.step_work import LeaseFacts, Push, StepWork
from shoal.protocol.errors import WrongLeaseError
from shoal.protocol.ids import NOBODY, Incarnation, MicrobatchId
from shoal.protocol.schedule import Task

UP, DOWN, OTHER = Incarnation(11), Incarnation(12), Incarnation(13)

Tensor = tuple[str, int, int]
"""(direction, microbatch, stage that computed it): all that a receiver can tell apart."""

Work = StepWork[Tensor, Tensor]


def m(number: int) -> MicrobatchId:
    return MicrobatchId(number)


def lease(
    number: int, upstream: Incarnation = UP, downstream: Incarnation = DOWN, **done: bool
) -> LeaseFacts:
    return LeaseFacts(m(number), upstream, downstream, **done)


def work(
    *numbers: int, stage: int = 1, num_stages: int = 3, window: int = 9, credits: int = 9
) -> Work:
    """Work with training microbatches 0 to 9 and leases for `numbers`."""
    made: Work = StepWork(
        stage=stage, num_stages=num_stages, num_microbatches=10, window=window, credits=credits
    )
    assert made.update_leases(lease(number) for number in numbers) == []
    return made


def run(node: Work, *, stage: int = 1, last: bool = False) -> tuple[Task, list[Push[Tensor]]]:
    """The next task, done."""
    task = node.next_task()
    assert task is not None
    if task.kind == "forward" and not last:
        return task, node.forward_done(task.microbatch, ("forward", task.microbatch, stage))
    return task, node.backward_done(task.microbatch, ("backward", task.microbatch, stage))


# ---- one node ----------------------------------------------------------------------------


def test_a_leaver_gives_back_what_is_not_in_its_sums_and_not_being_computed() -> None:
    node = work(0, 1, 2, 3)
    for number in (0, 1, 2):
        node.receive("forward", m(number), UP, ("forward", number, 0))
    run(node)
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    run(node)  # microbatch 0 is in the sums
    run(node)  # forward of 1
    task = node.next_task()  # forward of 2 runs
    assert task == Task("forward", m(2))
    assert node.release() == [1, 3]
    assert node.leased == {0, 2}
    node.forward_done(m(2), ("forward", 2, 1))
    assert node.release(m(2)) == [2]
    assert node.next_task() is None
    with pytest.raises(WrongLeaseError):
        node.receive("backward", m(1), DOWN, ("backward", 1, 2))


def test_a_lease_that_comes_back_goes_on_where_it_was() -> None:
    node = work(0)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    run(node)
    assert node.release() == [0]
    assert [push.to for push in node.update_leases([lease(0, downstream=OTHER)])] == [OTHER]
    assert not node.receive("forward", m(0), UP, ("forward", 0, 0))
    node.receive("backward", m(0), OTHER, ("backward", 0, 2))
    assert run(node)[0] == Task("backward", m(0))


def test_a_validation_microbatch_that_was_sent_on_is_not_given_back() -> None:
    node = work(10, 11)
    node.receive("forward", m(10), UP, ("forward", 10, 0))
    run(node)
    assert node.release() == [11]


def test_a_node_lacks_a_gradient_rather_than_an_activation_and_nobodys_while_it_can_compute() -> (
    None
):
    node = work(0, 1)
    assert node.lacks() == UP
    node.receive("forward", m(1), UP, ("forward", 1, 0))
    assert node.lacks() == NOBODY
    assert node.next_task() == Task("forward", m(1)), "asking changes nothing"
    assert node.lacks() == NOBODY
    node.forward_done(m(1), ("forward", 1, 1))
    assert node.lacks() == DOWN


def test_tensor_without_lease_or_from_a_stranger_is_refused() -> None:
    node = work(0)
    with pytest.raises(WrongLeaseError, match="not leased"):
        node.receive("forward", m(1), UP, ("forward", 1, 0))
    with pytest.raises(WrongLeaseError, match="neighbour is 11"):
        node.receive("forward", m(0), DOWN, ("forward", 0, 0))
    with pytest.raises(WrongLeaseError, match="neighbour is 12"):
        node.receive("backward", m(0), UP, ("backward", 0, 2))


def test_duplicate_changes_nothing_even_after_its_use() -> None:
    node = work(0)
    assert node.receive("forward", m(0), UP, ("forward", 0, 0))
    assert not node.receive("forward", m(0), UP, ("forward", 0, 99))
    task = node.next_task()
    assert task is not None
    assert node.input_of(task) == ("forward", 0, 0)
    node.forward_done(m(0), ("forward", 0, 1))
    assert not node.receive("forward", m(0), UP, ("forward", 0, 0))
    assert node.next_task() is None


def test_one_task_runs_at_a_time_and_a_failed_one_is_chosen_again() -> None:
    node = work(0, 1)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    node.receive("forward", m(1), UP, ("forward", 1, 0))
    first = node.next_task()
    assert first == Task("forward", m(0))
    assert node.next_task() is None
    node.task_failed()
    assert node.next_task() == first


def test_backward_goes_before_forwards() -> None:
    node = work(0, 1)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    run(node)
    node.receive("forward", m(1), UP, ("forward", 1, 0))
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    assert run(node)[0] == Task("backward", m(0))
    assert run(node)[0] == Task("forward", m(1))


def test_window_holds_forwards_back_until_a_backward_is_done() -> None:
    node = work(0, 1, 2, window=2)
    for number in range(3):
        node.receive("forward", m(number), UP, ("forward", number, 0))
    run(node)
    run(node)
    assert node.next_task() is None
    node.receive("backward", m(1), DOWN, ("backward", 1, 2))
    assert run(node)[0] == Task("backward", m(1))
    assert run(node)[0] == Task("forward", m(2))


def test_no_forward_for_a_replica_whose_credits_are_spent() -> None:
    other = Incarnation(DOWN + 10)
    node = work(0, 1, 2, credits=1)
    node.update_leases([lease(2, downstream=other)])
    for number in range(3):
        node.receive("forward", m(number), UP, ("forward", number, 0))
    assert run(node)[0] == Task("forward", m(0))
    assert run(node)[0] == Task("forward", m(2))  # 1 goes to the replica that has 0
    assert node.next_task() is None
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    assert run(node)[0] == Task("backward", m(0))
    assert run(node)[0] == Task("forward", m(1))


def test_first_stage_needs_no_input_and_pushes_nothing_back() -> None:
    node = work(stage=0)
    node.update_leases([lease(0, upstream=NOBODY)])
    _, pushes = run(node, stage=0)
    assert pushes == [Push(DOWN, "forward", m(0), ("forward", 0, 0))]
    node.receive("backward", m(0), DOWN, ("backward", 0, 1))
    assert node.input_of(Task("backward", m(0))) == ("backward", 0, 1)
    assert node.next_task() == Task("backward", m(0))
    assert node.backward_done(m(0), None) == []


def test_last_stage_does_both_in_one_task() -> None:
    node = work(stage=2)
    node.update_leases([lease(0, downstream=NOBODY)])
    node.receive("forward", m(0), UP, ("forward", 0, 1))
    _, pushes = run(node, stage=2, last=True)
    assert pushes == [Push(UP, "backward", m(0), ("backward", 0, 2))]
    assert node.next_task() is None
    assert node.waits_for() == []


def test_validation_goes_forward_only_and_takes_no_room_in_the_window() -> None:
    node = work(0, 10, 11, window=1)
    for number in (0, 10, 11):
        node.receive("forward", m(number), UP, ("forward", number, 0))
    assert node.is_validation(10)
    assert not node.is_validation(9)
    assert run(node)[0] == Task("forward", m(0))
    assert node.next_task() is None
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    assert [run(node)[0] for _ in range(3)] == [
        Task("backward", m(0)), Task("forward", m(10)), Task("forward", m(11))
    ]  # fmt: skip
    assert node.next_task() is None
    assert node.waits_for() == []


def test_new_downstream_gets_the_kept_output_again() -> None:
    node = work(0, 1)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    run(node)
    again = node.update_leases([lease(0, downstream=OTHER), lease(1, downstream=OTHER)])
    assert again == [Push(OTHER, "forward", m(0), ("forward", 0, 1))]
    # Its gradient counts from the new one only; the old one's is refused.
    with pytest.raises(WrongLeaseError):
        node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    assert node.receive("backward", m(0), OTHER, ("backward", 0, 2))


def test_new_upstream_gets_the_kept_gradient_again() -> None:
    node = work(0)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    run(node)
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    run(node)
    again = node.update_leases([lease(0, upstream=OTHER)])
    assert again == [Push(OTHER, "backward", m(0), ("backward", 0, 1))]
    assert node.update_leases([lease(0, upstream=OTHER)]) == []


def test_neighbours_that_are_done_are_spared_unless_they_die() -> None:
    node: Work = StepWork(stage=1, num_stages=3, num_microbatches=10, window=9, credits=9)
    node.update_leases([lease(0, downstream_done=True, upstream_done=True)])
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))  # may come before the forward
    assert run(node) == (Task("forward", m(0)), [])
    assert run(node) == (Task("backward", m(0)), [])
    replaced = node.update_leases([lease(0, upstream=OTHER, downstream=OTHER)])
    assert {push.direction for push in replaced} == {"forward", "backward"}


def test_status_names_what_is_missing_and_what_waits_for_the_processor() -> None:
    node = work(0, 1)
    assert node.waits_for() == [("forward", m(0), UP), ("forward", m(1), UP)]
    assert node.queue_depth() == 0
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    assert node.queue_depth() == 1
    run(node)
    assert node.queue_depth() == 0
    assert node.waits_for() == [("backward", m(0), DOWN), ("forward", m(1), UP)]


# ---- a whole pipeline --------------------------------------------------------------------


@dataclass
class Node:
    stage: int
    work: Work
    commands: deque[list[LeaseFacts]] = field(default_factory=deque)
    parked: list[tuple[str, MicrobatchId, Incarnation, Tensor]] = field(default_factory=list)
    computed: Counter[tuple[str, int]] = field(default_factory=Counter)
    in_flight: set[int] = field(default_factory=set)


class Pipeline:
    """Nodes, what is on its way between them, and a coordinator that moves leases.

    Like the real ones: commands reach a node in order, tensors of one sender reach one receiver in
    order, receipts reach the coordinator in order per node; beyond that anything goes.
    """

    def __init__(
        self, replicas: list[int], *, training: int, validation: int, window: int, credits: int
    ) -> None:
        self.last = len(replicas) - 1
        self.training, self.window = training, window
        self.nodes: dict[Incarnation, Node] = {}
        self.wires: dict[tuple[Incarnation, Incarnation], deque[Push[Tensor]]] = defaultdict(deque)
        self.receipts: dict[Incarnation, deque[MicrobatchId]] = defaultdict(deque)
        self.done: set[tuple[MicrobatchId, int]] = set()
        for stage, count in enumerate(replicas):
            for _ in range(count):
                made: Work = StepWork(
                    stage=stage,
                    num_stages=len(replicas),
                    num_microbatches=training,
                    window=window,
                    credits=credits,
                )
                self.nodes[Incarnation(len(self.nodes) + 1)] = Node(stage, made)
        self.microbatches = [m(i) for i in range(training + validation)]
        self.holders = {
            (number, stage): self.replicas(stage)[number % replicas[stage]]
            for number in self.microbatches
            for stage in range(len(replicas))
        }
        for who, node in self.nodes.items():
            node.commands.append([self.lease(slot) for slot, h in self.holders.items() if h == who])

    def replicas(self, stage: int) -> list[Incarnation]:
        return [who for who, node in self.nodes.items() if node.stage == stage]

    def lease(self, slot: tuple[MicrobatchId, int]) -> LeaseFacts:
        number, stage = slot
        up, down = (number, stage - 1), (number, stage + 1)
        return LeaseFacts(
            number,
            self.holders.get(up, NOBODY),
            self.holders.get(down, NOBODY),
            downstream_done=down in self.done,
            upstream_done=up in self.done,
        )

    def kill(self, victim: Incarnation, rng: Random) -> None:
        stage = self.nodes.pop(victim).stage
        self.receipts.pop(victim, None)
        moved = [slot for slot, who in self.holders.items() if who == victim]
        for slot in moved:
            self.holders[slot] = rng.choice(self.replicas(stage))
            self.done.discard(slot)
        affected = {(n, s + offset) for n, s in moved for offset in (-1, 0, 1)}
        told: dict[Incarnation, list[LeaseFacts]] = defaultdict(list)
        for slot in sorted(affected & self.holders.keys()):
            told[self.holders[slot]].append(self.lease(slot))
        for who, leases in told.items():
            self.nodes[who].commands.append(leases)

    # What can happen next. Each returns whether anything did.

    def obey(self, who: Incarnation) -> bool:
        node = self.nodes[who]
        if not node.commands:
            return False
        self.send(who, node.work.update_leases(node.commands.popleft()))
        parked, node.parked = node.parked, []
        for tensor in parked:
            self.receive(who, *tensor)
        return True

    def compute(self, who: Incarnation) -> bool:
        node = self.nodes[who]
        task = node.work.next_task()
        if task is None:
            return False
        node.computed[task.kind, task.microbatch] += 1
        validation = task.microbatch >= self.training
        got = node.work.input_of(task)
        if task.kind == "forward":
            source = node.stage - 1
            assert got == (("forward", task.microbatch, source) if node.stage else None)
            assert len(node.in_flight) < self.window
        else:
            assert got == ("backward", task.microbatch, node.stage + 1)
        output: Tensor = (task.kind, task.microbatch, node.stage)
        if task.kind == "forward" and node.stage != self.last:
            self.send(who, node.work.forward_done(task.microbatch, output))
            if not validation:
                node.in_flight.add(task.microbatch)
            return True
        node.in_flight.discard(task.microbatch)
        gradient: Tensor | None = ("backward", task.microbatch, node.stage)
        if validation or node.stage == 0:
            gradient = None
        self.send(who, node.work.backward_done(task.microbatch, gradient))
        self.receipts[who].append(task.microbatch)
        return True

    def deliver(self, wire: tuple[Incarnation, Incarnation], *, keep: bool = False) -> bool:
        sender, receiver = wire
        queue = self.wires[wire]
        if not queue:
            return False
        push = queue[0] if keep else queue.popleft()
        if receiver in self.nodes and sender in self.nodes:  # a fenced sender is refused
            self.receive(receiver, push.direction, push.microbatch, sender, push.payload)
        return not keep

    def receive(
        self, who: Incarnation, direction: str, number: MicrobatchId, sender: Incarnation, t: Tensor
    ) -> None:
        node = self.nodes[who]
        try:
            node.work.receive(direction, number, sender, t)  # type: ignore[arg-type]  # a Literal
        except WrongLeaseError:
            node.parked.append((direction, number, sender, t))

    def send(self, who: Incarnation, pushes: list[Push[Tensor]]) -> None:
        for push in pushes:
            self.wires[who, push.to].append(push)

    def count(self, who: Incarnation) -> bool:
        """A receipt reaches the coordinator."""
        if not self.receipts[who]:
            return False
        slot = (self.receipts[who].popleft(), self.nodes[who].stage)
        assert self.holders[slot] == who
        assert slot not in self.done, "a receipt counts once"
        self.done.add(slot)
        return True

    def anything(self, rng: Random) -> bool:
        """One random event; False when nothing can happen any more."""
        moves: list[Callable[[], bool]] = [partial(self.deliver, wire) for wire in self.wires]
        for act in (self.obey, self.compute, self.count):
            moves += [partial(act, who) for who in self.nodes]
        rng.shuffle(moves)
        return any(move() for move in moves)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    training=st.integers(1, 6),
    validation=st.integers(0, 2),
    window=st.integers(1, 4),
    credits=st.integers(1, 4),
    death_rate=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_every_microbatch_is_done_exactly_once_whatever_the_order_and_whoever_dies(
    seed: int,
    replicas: list[int],
    training: int,
    validation: int,
    window: int,
    credits: int,
    death_rate: float,
) -> None:
    rng = Random(seed)
    swarm = Pipeline(
        replicas, training=training, validation=validation, window=window, credits=credits
    )
    moving = True
    while moving:
        if rng.random() < death_rate:
            victim = rng.choice(list(swarm.nodes))
            if len(swarm.replicas(swarm.nodes[victim].stage)) > 1:
                swarm.kill(victim, rng)
        if swarm.wires and rng.random() < 0.1:  # a connection broke before the acknowledgement
            swarm.deliver(rng.choice(list(swarm.wires)), keep=True)
        moving = swarm.anything(rng)
    training_slots = {slot for slot in swarm.holders if slot[0] < training}
    last_slots = {slot for slot in swarm.holders if slot[1] == swarm.last}
    assert swarm.done >= training_slots | last_slots
    for who, node in swarm.nodes.items():
        assert set(node.computed.values()) <= {1}
        held = {number for (number, _), holder in swarm.holders.items() if holder == who}
        assert node.work.leased == held
        assert {number for kind, number in node.computed if kind == "forward"} == held
        backward = {number for kind, number in node.computed if kind == "backward"}
        expected = set() if node.stage == swarm.last else {n for n in held if n < training}
        assert backward == expected
        assert node.work.waits_for() == []


# ---- bad numbers -------------------------------------------------------------------------


def test_a_microbatch_that_is_given_back_is_not_computed_and_its_tensors_are_refused() -> None:
    node = work(0)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    assert node.next_task() is not None
    node.give_back(m(0))
    assert node.next_task() is None
    assert node.leased == set()
    with pytest.raises(WrongLeaseError):
        node.receive("forward", m(0), UP, ("forward", 0, 0))


def test_a_microbatch_that_comes_back_begins_from_nothing() -> None:
    node = work(0)
    node.receive("forward", m(0), UP, ("forward", 0, 0))
    run(node)
    node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    task = node.next_task()
    assert task is not None
    assert task.kind == "backward"
    node.give_back(m(0))
    assert node.update_leases([lease(0)]) == []
    assert node.next_task() is None
    assert node.receive("forward", m(0), UP, ("forward", 0, 0))
    assert run(node)[0].kind == "forward"
    assert node.receive("backward", m(0), DOWN, ("backward", 0, 2))
    assert run(node)[0].kind == "backward"


def test_giving_one_back_leaves_the_others() -> None:
    node = work(0, 1)
    for number in (0, 1):
        node.receive("forward", m(number), UP, ("forward", number, 0))
    task = node.next_task()
    assert task is not None
    node.give_back(task.microbatch)
    assert run(node)[0].microbatch == m(1 - task.microbatch)
