# SPDX-License-Identifier: Apache-2.0
"""Prometheus reads what the view says."""

from prometheus_client.parser import text_string_to_metric_families

from shoal.coordinator.dashboard.metrics import exposition, new_registry
from shoal.coordinator.dashboard.views import RunView

from .fake_view import peer, training_view, troubled_view, waiting_view


def scrape(view: RunView) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values (sorted by label, without the run) -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    text = exposition(new_registry(lambda: view)).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(v for k, v in sorted(sample.labels.items()) if k != "run")
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_gauges_follow_the_view() -> None:
    view = training_view()
    found = scrape(view)
    assert found["shoal_step"][()] == view.step
    assert found["shoal_loss"][()] == view.loss
    assert found["shoal_transferred_bytes_total"][()] == view.bytes_total
    assert found["shoal_receipts_taken_total"][()] == view.receipts_taken
    assert found["shoal_run_state"][("training",)] == 1
    assert sum(found["shoal_run_state"].values()) == 1
    assert found["shoal_nodes"][("left",)] == 1


def test_every_node_has_its_series_and_gone_nodes_keep_counters_only() -> None:
    found = scrape(training_view())
    name = training_view().nodes[6].name
    gone = (name, peer(6))
    assert found["shoal_node_contributed_microbatches_total"][gone] == 474
    assert all(key[1] != peer(6) for key in found["shoal_node_queue_depth"])
    assert any(key[1] == peer(0) for key in found["shoal_node_queue_depth"])


def test_bytes_are_told_by_boundary_and_kind() -> None:
    found = scrape(training_view())
    assert found["shoal_boundary_bytes"]["1-2", "forward"] == 2_230_000
    assert found["shoal_boundary_bf16_bytes"]["0-1", "backward"] == 4_194_304
    assert "shoal_boundary_bytes" not in scrape(waiting_view())


def test_back_offs_and_the_logs_budget_are_told() -> None:
    found = scrape(troubled_view())
    assert found["shoal_back_offs"][()] == 2
    assert found["shoal_boundary_log_budget_bytes"][()] == 1_024_000_000


def test_absent_loss_is_absent_and_every_name_is_ours() -> None:
    found = scrape(waiting_view())
    assert "shoal_loss" not in found
    assert found
    assert all(name.startswith("shoal_") for name in found)


def test_hostile_names_stay_inside_their_label() -> None:
    view = training_view()
    nasty = view.nodes[0].model_copy(update={"name": 'x"} 1\nshoal_step 99'})
    found = scrape(view.model_copy(update={"nodes": [nasty]}))
    assert found["shoal_step"] == {(): view.step}


def test_two_runs_in_one_process_do_not_mix() -> None:
    one, two = new_registry(lambda: training_view(1)), new_registry(lambda: training_view(2))
    assert b"shoal_step{run=" in exposition(one)
    assert exposition(one) != exposition(two)
