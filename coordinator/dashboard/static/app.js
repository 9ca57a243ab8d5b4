// SPDX-License-Identifier: Apache-2.0
// Follows /api/events and keeps the page in step. What peers wrote only ever becomes text.

import { createCharts } from "./charts.js";
import * as format from "./format.js";
import { render } from "./render.js";

const MAX_POINTS = 4000;
const RETRY_MS = 3000;

const charts = createCharts();
let view = null;
let history = [];

function merge(points) {
  const first = points[0].step;
  let end = history.length;
  while (end > 0 && history[end - 1].step >= first) end -= 1;
  history = history.slice(Math.max(0, end - MAX_POINTS), end).concat(points);
}

function show(next, whole) {
  const previous = view;
  view = next;
  if (whole) history = next.history;
  else if (next.history.length) merge(next.history);
  render(view, history);
  if (whole || !previous || next.history.length) charts.show(history, view);
}

function lost() {
  const element = document.getElementById("lost");
  const ended = view && (view.state === "finished" || view.state === "failed");
  element.classList.toggle("bad", !ended);
  element.textContent = !view
    ? "The coordinator does not answer. Trying again…"
    : ended
      ? "The coordinator has gone; this is the run as it ended."
      : `Connection lost. This is how things stood at ${format.clock(view.now_s)}. Trying again…`;
  element.hidden = false;
  document.body.classList.add("stale");
}

function connect() {
  const source = new EventSource("/api/events");
  const found = () => {
    document.getElementById("lost").hidden = true;
    document.body.classList.remove("stale");
  };
  source.addEventListener("view", (event) => { found(); show(JSON.parse(event.data), true); });
  source.addEventListener("update", (event) => { found(); show(JSON.parse(event.data), false); });
  source.onerror = () => {
    lost();
    // After an answer that is no event stream a browser gives up; we don't.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
  addEventListener("pagehide", () => source.close(), { once: true });
}

addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
connect();
