# SPDX-License-Identifier: Apache-2.0
"""What has ended is started again: a coordinator alone, nodes once a coordinator answers."""

from pathlib import Path

import pytest

from shoal import demo_restarter
from shoal.demo_restarter import MAX_CRASHES, RESTART_AFTER_S, Restarter
from shoal.demo_swarm import Process, Swarm
from shoal.protocol.errors import RunFailedError

from .fake_demo_swarm import FakeProcess, fake_swarm, load_fake_view

fake_view = load_fake_view()


class Scene:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(demo_restarter, "monotonic", lambda: self.now_s)
        self.swarm: Swarm = fake_swarm(folder)
        self.said: list[str] = []
        self.on_order: set[int] = set()
        self.restarter = Restarter(self.swarm, self.said.append, self._ended_on_order)

    def _ended_on_order(self, process: Process) -> bool:
        return process.pid in self.on_order

    def node(self, number: int) -> FakeProcess:
        process = self.swarm.nodes[number]
        assert isinstance(process, FakeProcess)
        return process

    def mend(self, *, coordinator_answers: bool = True) -> None:
        """Notice what has ended; some time later do something about it."""
        view = fake_view.training_view() if coordinator_answers else None
        self.restarter.mend(view)
        self.now_s += RESTART_AFTER_S
        self.restarter.mend(view)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_killed_node_is_started_again_a_little_later(scene: Scene) -> None:
    scene.on_order.add(scene.node(2).pid)
    scene.node(2).signal(9)
    scene.restarter.mend(fake_view.training_view())
    assert scene.node(2).starts == 1
    scene.mend()
    assert scene.node(2).starts == 2
    assert scene.restarter.crashes == 0
    assert scene.said == ["starting node-2 again"]


def test_nodes_wait_until_a_coordinator_answers(scene: Scene) -> None:
    coordinator = scene.swarm.coordinator
    assert coordinator is not None
    coordinator.signal(9)
    scene.on_order |= {coordinator.pid, scene.node(0).pid}
    scene.node(0).signal(9)
    scene.mend(coordinator_answers=False)
    assert coordinator.starts == 2
    assert scene.node(0).starts == 1
    scene.mend()
    assert scene.node(0).starts == 2


def test_a_node_started_again_has_joined_once_it_has_a_stage(scene: Scene) -> None:
    scene.on_order.add(scene.node(1).pid)
    scene.node(1).signal(9)
    scene.mend()
    assert scene.restarter.nodes_joined_late == 0
    placed = fake_view.node(1, pid=scene.node(1).pid, state="ready")
    for _ in range(2):
        scene.restarter.mend(fake_view.training_view(nodes=[placed]))
    assert scene.restarter.nodes_joined_late == 1


def test_a_node_that_the_run_let_go_is_no_crash(scene: Scene) -> None:
    scene.node(3).ended_with = 0
    scene.node(4).ended_with = 7
    scene.mend()
    assert scene.restarter.crashes == 0
    assert [scene.node(n).starts for n in (3, 4)] == [2, 2]


def test_a_process_that_ends_of_itself_is_told_of_and_not_restarted_without_end(
    scene: Scene,
) -> None:
    for _ in range(MAX_CRASHES):
        scene.node(5).ended_with = 1
        scene.mend()
    assert scene.restarter.crashes == MAX_CRASHES
    assert "node-5 ended with code 1: last words" in scene.said
    scene.node(5).ended_with = 1
    with pytest.raises(RunFailedError, match=r"node-5 ended with code 1.*once too often"):
        scene.mend()
