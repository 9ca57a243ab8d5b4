# SPDX-License-Identifier: Apache-2.0
"""The run as Prometheus metrics. Derived from the view at each scrape; keeps nothing."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.coordinator.dashboard.views import RunView

STATES = ("waiting", "training", "paused", "draining", "finished", "failed")

_RUN_GAUGES: tuple[tuple[str, str, Callable[[RunView], float | None]], ...] = (
    ("shoal_step", "Committed optimizer steps", lambda v: v.step),
    ("shoal_steps_planned", "Steps of the whole run", lambda v: v.total_steps),
    ("shoal_step_attempt", "Attempt of the open step", lambda v: v.attempt),
    ("shoal_receipts_done", "Receipts of the open step", lambda v: v.receipts_done),
    ("shoal_receipts_needed", "Receipts that the open step needs", lambda v: v.receipts_total),
    ("shoal_loss", "Mean training loss of the last step, nats a token", lambda v: v.loss),
    ("shoal_validation_loss", "Last validation loss, nats a token", lambda v: v.validation_loss),
    ("shoal_tokens_per_second", "Training tokens per second", lambda v: v.tokens_per_s),
    (
        "shoal_step_boundary_bytes",
        "Encoded bytes over stage boundaries in the last step",
        lambda v: v.boundary_bytes_per_step,
    ),
    (
        "shoal_step_reduce_bytes",
        "Bytes between replicas for gradient sums in the last step",
        lambda v: v.reduce_bytes_per_step,
    ),
    ("shoal_microbatches_missing", "Microbatches missing from commits, must be 0",
     lambda v: v.microbatches_missing),
    ("shoal_microbatches_double", "Microbatches counted twice, must be 0",
     lambda v: v.microbatches_double),
    ("shoal_steps_lost", "Committed steps that were lost, must be 0", lambda v: v.steps_lost),
    ("shoal_term", "Term in which the coordinator leads", lambda v: v.term),
    ("shoal_standbys", "Standby coordinators that are connected",
     lambda v: sum(standby.connected for standby in v.standbys)),
    ("shoal_snapshot_step", "Step of the newest complete snapshot", lambda v: v.snapshot_step),
    ("shoal_boundary_log_bytes", "Bytes held by all boundary logs", lambda v: v.log_bytes),
    ("shoal_boundary_log_budget_bytes", "What each node may use for its boundary log",
     lambda v: v.log_budget_bytes),
    ("shoal_replays", "Lost stages that were replayed from logs", lambda v: v.replays),
    ("shoal_rollbacks", "Losses after which all stages went back", lambda v: v.rollbacks),
    ("shoal_back_offs", "Steps redone with another scale for NaN or overflow",
     lambda v: v.back_offs.count if v.back_offs is not None else 0),
    ("shoal_start_time_seconds", "Unix time of the launch", lambda v: v.started_s),
)  # fmt: skip


class ViewCollector(Collector):
    """Turns `view()` into metric families."""

    def __init__(self, view: Callable[[], RunView]) -> None:
        self._view = view

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask for a view."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        run = [view.run_id]
        for name, text, read in _RUN_GAUGES:
            value = read(view)
            if value is not None:
                gauge = GaugeMetricFamily(name, text, labels=["run"])
                gauge.add_metric(run, value)
                yield gauge
        transferred = CounterMetricFamily(
            "shoal_transferred_bytes", "Bytes between nodes, whole run", labels=["run"]
        )
        transferred.add_metric(run, view.bytes_total)
        yield transferred
        taken = CounterMetricFamily(
            "shoal_receipts_taken",
            "(Microbatch, stage) pairs computed since the coordinator began, recomputed ones too",
            labels=["run"],
        )
        taken.add_metric(run, view.receipts_taken)
        yield taken
        state = GaugeMetricFamily(
            "shoal_run_state", "1 for the run's state", labels=["run", "state"]
        )
        for name in STATES:
            state.add_metric([*run, name], float(view.state == name))
        yield state
        yield from _boundaries(view)
        yield from _nodes(view)


def _boundaries(view: RunView) -> Iterator[Metric]:
    labels = ["run", "boundary", "kind"]
    sent = GaugeMetricFamily(
        "shoal_boundary_bytes", "Encoded bytes over a boundary in the last step", labels=labels
    )
    plain = GaugeMetricFamily(
        "shoal_boundary_bf16_bytes", "What the same tensors take in bf16", labels=labels
    )
    for boundary in view.boundaries:
        for part in boundary.traffic:
            values = [view.run_id, f"{boundary.from_stage}-{boundary.to_stage}", part.kind]
            sent.add_metric(values, part.encoded_bytes)
            if part.bf16_bytes is not None:
                plain.add_metric(values, part.bf16_bytes)
    yield from (sent, plain)


def _nodes(view: RunView) -> Iterator[Metric]:
    labels = ["run", "peer_id", "name", "stage"]
    counts = GaugeMetricFamily("shoal_nodes", "Nodes by state", labels=["run", "state"])
    by_state: dict[str, int] = {}
    for node in view.nodes:
        by_state[node.state] = by_state.get(node.state, 0) + 1
    for state, count in sorted(by_state.items()):
        counts.add_metric([view.run_id, state], count)
    yield counts

    queue = GaugeMetricFamily("shoal_node_queue_depth", "Waiting tasks", labels=labels)
    speed = GaugeMetricFamily(
        "shoal_node_microbatches_per_second", "While busy, forward plus backward", labels=labels
    )
    memory = GaugeMetricFamily("shoal_node_memory_bytes", "Memory in use", labels=labels)
    for node in view.live_nodes:
        values = [
            view.run_id,
            node.peer_id,
            node.name,
            "" if node.stage is None else str(node.stage),
        ]
        queue.add_metric(values, node.queue_depth)
        speed.add_metric(values, node.microbatches_per_s)
        memory.add_metric(values, node.memory_bytes)
    yield from (queue, speed, memory)

    labels = ["run", "peer_id", "name"]
    sent = CounterMetricFamily("shoal_node_sent_bytes", "Payload bytes sent", labels=labels)
    received = CounterMetricFamily(
        "shoal_node_received_bytes", "Payload bytes received", labels=labels
    )
    work = CounterMetricFamily(
        "shoal_node_contributed_microbatches", "Committed (microbatch, stage) pairs", labels=labels
    )
    marks = CounterMetricFamily("shoal_node_marks", "Refused messages", labels=labels)
    for node in view.nodes:
        values = [view.run_id, node.peer_id, node.name]
        sent.add_metric(values, node.bytes_sent)
        received.add_metric(values, node.bytes_received)
        work.add_metric(values, node.contributed_microbatches)
        marks.add_metric(values, node.marks)
    yield from (sent, received, work, marks)


def new_registry(view: Callable[[], RunView]) -> CollectorRegistry:
    """A registry of its own: two runs in one process don't mix."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ViewCollector(view))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The text format 0.0.4."""
    return generate_latest(registry)
