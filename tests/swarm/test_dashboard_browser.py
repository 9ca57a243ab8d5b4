# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: headless Chromium against a served, made-up run."""

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from shoal.coordinator.dashboard.app import create_app, serve

pytestmark = pytest.mark.swarm

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}

PAINTED = """() => [...document.querySelectorAll(".chart canvas")].map((canvas) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
  return painted;
})"""
CONTRAST = """() => {
  const lum = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!words || !element.checkVisibility() || element.closest("svg, .tip")) continue;
    const [a, b] = [lum(parse(getComputedStyle(element).color).slice(0, 3)), lum(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.className}: ${element.textContent} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def _load_fake() -> ModuleType:
    # By path, so that it doesn't matter how pytest was started.
    path = Path(__file__).parents[1] / "unit" / "coordinator" / "fake_view.py"
    spec = importlib.util.spec_from_file_location("browser_fake_view", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["browser_fake_view"] = module
    spec.loader.exec_module(module)
    return module


fake = _load_fake()


def browser_path() -> str:
    """The first Chromium on PATH. A test run without one fails: the page would go unseen."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.fail(
        f"No browser: none of {', '.join(BROWSERS)} is on PATH. Install one, on Debian or Ubuntu "
        "with `apt-get install chromium`, or leave out the swarm tests with -m 'not swarm'."
    )


class Served:
    """A fake run behind a real server, and pages onto it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.source = fake.FakeSource()
        self.problems: list[str] = []
        self.task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        app = create_app(self.source, operator_token="secret")
        self.task, self.port = await serve(app, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def open(self, view: Any, *, size: dict[str, int] = WIDE, scheme: str = "light") -> Page:
        await self.source.show(view)
        context = await self.browser.new_context(
            viewport=size,  # type: ignore[arg-type]
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        page = await context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda m: self.problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        await page.goto(f"http://127.0.0.1:{self.port}/")
        await page.wait_for_selector("#run-state:not([hidden])")
        return page


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=browser_path(), args=ARGUMENTS)
        run = Served(browser)
        await run.start()
        try:
            yield run
        finally:
            await browser.close()
            await run.stop()


async def text(page: Page, selector: str) -> str:
    return (await page.text_content(selector)) or ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_page_is_whole_readable_and_fits(
    served: Served, size: dict[str, int], scheme: str
) -> None:
    for view in (
        fake.training_view(),
        fake.waiting_view(),
        fake.training_view(200, state="finished"),
        fake.crowded_view(),
        fake.troubled_view(),
    ):
        page = await served.open(view, size=size, scheme=scheme)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == size["width"]
        assert await page.evaluate(CONTRAST) == []
        if view.history:
            await expect(page.locator(".chart canvas")).to_have_count(3)
            assert min(await page.evaluate(PAINTED)) > 500
        assert await text(page, "#events") != ""
        await page.context.close()
    assert served.problems == []


async def test_training_page_shows_nodes_numbers_and_events(served: Served) -> None:
    page = await served.open(fake.training_view())
    assert await text(page, "#step") == "132"
    assert await page.locator("#banner").is_hidden()
    assert await page.locator("#summary").is_hidden()
    assert await page.locator(".stage").count() == 3
    names = await page.locator("#pipeline .node-name").all_text_contents()
    staged = [node.name for stage in fake.training_view().stages for node in stage.nodes]
    assert names == staged
    assert "keen-wren fell silent at step 61" in await text(page, "#events")
    assert "6.42 MB" in await text(page, "#pipeline")
    assert await page.locator("#work li").count() == 7
    assert await page.get_attribute("#bar", "aria-valuenow") == "132"


async def test_bytes_of_each_boundary_stand_beside_what_bf16_would_take(served: Served) -> None:
    page = await served.open(fake.training_view())
    cells = await page.locator("#traffic-rows tr > *").all_text_contents()
    assert [cells[i : i + 5] for i in range(0, len(cells), 5)] == [
        ["0–1", "forward", "", "2.23 MB", "4.19 MB"],
        ["", "backward", "", "4.19 MB", "4.19 MB"],
        ["1–2", "forward", "", "2.23 MB", "4.19 MB"],
        ["", "backward", "", "4.19 MB", "4.19 MB"],
    ]
    assert "1.3 times fewer than in bf16" in await text(page, "#traffic-note")
    page = await served.open(fake.training_view(boundaries=[]))
    assert await page.locator("#traffic").is_hidden()
    assert await page.locator("#key-bf16").is_hidden()


async def test_losses_and_safeguards_are_told_only_where_there_are_any(served: Served) -> None:
    page = await served.open(fake.training_view())
    assert await page.locator("#recoveries").is_hidden()
    assert await page.locator("#replaying li").count() == 0
    for absent in ("Replays", "Rollbacks", "Numbers", "Standby", "Boundary logs"):
        assert absent not in await text(page, "#safeguards")
    page = await served.open(fake.troubled_view())
    assert "computes stage 1 again: 17 of 31 steps" in await text(page, "#replaying")
    for told in (
        "10.0.0.5:7600 leads in term 3",
        "10.0.0.7:7601: follows, 2 events behind",
        "10.0.0.9:7601: away",
        "at most 1.02 GB at each node",
        "2 back-offs, the last in step 90",
    ):
        assert told in await text(page, "#safeguards")
    recoveries = await page.locator("#recoveries li span").all_text_contents()
    assert recoveries[0].startswith("the run went back from step 130 to 100; not caught up yet")
    assert recoveries[1] == "stage 1 was replayed from step 60 to 84, 12.4 s, 96.0 MB of logs"
    pipeline = await text(page, "#pipeline")
    assert "21 s of its grace left" in pipeline
    assert "holder · log 48.0 MB from step 101" in pipeline
    assert served.problems == []


RINGS = """() => {
  const canvas = document.querySelector("#chart-loss canvas");
  const coral = getComputedStyle(document.documentElement).getPropertyValue("--coral").trim();
  const [r, g, b] = coral.match(/\\w\\w/g).map((hex) => parseInt(hex, 16));
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  for (let i = 0; i < data.length; i += 4) {
    painted += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 24;
  }
  return painted;
}"""


async def test_many_validation_points_are_a_line_and_few_are_rings(served: Served) -> None:
    few = [fake.point(step) for step in range(1, 132)]
    many = [
        point.model_copy(update={"validation_loss": point.loss + 0.3})
        for point in map(fake.point, range(1, 801))
    ]
    page = await served.open(fake.training_view(history=few))
    assert "dot" in (await page.get_attribute("#key-validation", "class") or "")
    page = await served.open(fake.training_view(800, history=many, total_steps=1000))
    assert "dot" not in (await page.get_attribute("#key-validation", "class") or "")
    width = await page.evaluate("document.querySelector('#chart-loss canvas').width")
    # A line of 1.5 pixels, not a band of rings that are 7 high.
    assert await page.evaluate(RINGS) < 5 * width


async def test_waiting_page_says_why_in_a_banner(served: Served) -> None:
    page = await served.open(fake.waiting_view())
    assert await page.locator("#banner").is_visible()
    assert "One more node starts the run" in await text(page, "#banner")
    assert await page.locator(".nobody:visible").count() == 1


async def test_finished_page_sums_the_run_up(served: Served) -> None:
    page = await served.open(fake.training_view(200, state="finished"))
    summary = await text(page, "#summary")
    assert "200 of 200" in summary
    assert "7.609 → 3.087" in summary
    assert "0 steps lost, 0 microbatches missing" in summary


async def test_stages_of_a_run_that_is_over_are_not_shown_as_lacking_nodes(served: Served) -> None:
    view = fake.training_view(200, state="finished")
    stages = [stage.model_copy(update={"nodes": []}) for stage in view.stages]
    page = await served.open(view.model_copy(update={"stages": stages}))
    await expect(page.locator(".nobody.over")).to_have_text(["The run is over"] * len(stages))


async def test_updates_arrive_and_keep_the_elements(served: Served) -> None:
    page = await served.open(fake.training_view())
    await page.evaluate("document.querySelector('.node').dataset.witness = 'kept'")
    points = "document.querySelector('#chart-loss').getAttribute('aria-label')"
    await served.source.show(fake.one_more_step)
    await expect(page.locator("#step")).to_have_text("133", timeout=15_000)
    assert "at step 1," in await page.evaluate(points)
    assert "at step 133" in await page.evaluate(points)
    assert "Step 133 committed" in await text(page, "#events li:first-child")
    assert await page.get_attribute(".node", "data-witness") == "kept"
    assert served.problems == []


async def test_hostile_names_stay_text(served: Served) -> None:
    nasty = "<img src=x onerror=alert(1)><b>bold</b>"
    node = fake.node(0, name=nasty, device_name=nasty, waiting_for=nasty)
    view = fake.training_view(nodes=[node], stages=[], waiting_for=nasty, name=nasty)
    page = await served.open(view)
    assert await text(page, ".node-name") == nasty
    assert await text(page, "#banner") == nasty
    assert await page.locator("main img, main b").count() == 0
    assert served.problems == []


async def test_a_lost_coordinator_is_said_and_found_again(served: Served) -> None:
    page = await served.open(fake.training_view())
    await served.stop()
    await page.wait_for_selector("#lost:not([hidden])")
    assert "Connection lost" in await text(page, "#lost")
    assert await text(page, "#step") == "132"
    await served.source.show(fake.one_more_step)
    await served.start()  # the same port
    await expect(page.locator("#step")).to_have_text("133", timeout=15_000)
    assert await page.locator("#lost").is_hidden()
