// SPDX-License-Identifier: Apache-2.0
// A view onto the page.

import { at, keep, make, put } from "./elements.js";
import { renderSafeguards, renderTraffic } from "./facts.js";
import * as format from "./format.js";

const MAX_DOTS = 6;
const MAX_ABREAST = 5;

// ---- nodes and stages ----------------------------------------------------------------------

const TIERS = {
  holder: "it has its stage’s weights and optimizer state",
  worker: "it has its stage’s weights, and not yet the optimizer’s state",
};

function createNode() {
  const card = make("li", "node");
  const head = make("div", "node-head");
  head.append(make("span", "node-name"), make("span", "node-state"));
  const speed = make("div", "node-speed");
  const track = make("span", "track");
  track.append(make("span", "fill"));
  speed.append(track, make("span", "rate"));
  const foot = make("div", "node-foot");
  const queue = make("span", "queue");
  queue.setAttribute("role", "img");
  foot.append(make("span", "device"), queue);
  card.append(head, speed, foot, make("p", "node-keeps"), make("p", "node-note"));
  return card;
}

function updateNode(card, node, fastest) {
  const find = (name) => card.querySelector(`.${name}`);
  card.dataset.state = node.state;
  put(find("node-name"), node.name);
  find("node-name").title = node.peer_id;
  put(find("node-state"), node.state);
  const share = fastest > 0 ? Math.min(1, node.microbatches_per_s / fastest) : 0;
  find("fill").style.transform = `scaleX(${share.toFixed(3)})`;
  put(find("rate"), node.microbatches_per_s > 0
    ? `${node.microbatches_per_s.toFixed(node.microbatches_per_s < 10 ? 2 : 0)}/s` : "–");
  find("rate").title = "microbatches per second, while busy";
  put(find("device"), node.device_name || node.device);
  find("device").title = node.device_name;
  const queue = find("queue");
  const dots = Math.min(node.queue_depth, MAX_DOTS);
  queue.setAttribute("aria-label", `${format.plural(node.queue_depth, "task")} in the queue`);
  queue.title = queue.getAttribute("aria-label");
  keep(queue, Array.from({ length: dots + (node.queue_depth > MAX_DOTS ? 1 : 0) }, (_, i) => i),
    (i) => i, (i) => make("span", i < MAX_DOTS ? "queued" : "more"),
    (dot, i) => { if (i >= MAX_DOTS) put(dot, `+${node.queue_depth - MAX_DOTS}`); });
  const keeps = [node.tier, node.log_bytes ? `log ${format.bytes(node.log_bytes)} from step ${format.integer(node.log_oldest_step)}` : ""];
  put(find("node-keeps"), keeps.filter(Boolean).join(" · "));
  find("node-keeps").hidden = !node.tier && !node.log_bytes;
  find("node-keeps").title = TIERS[node.tier] ?? "";
  const notes = [];
  if (node.leaves_within_s !== null && node.leaves_within_s !== undefined) notes.push(`${format.duration(node.leaves_within_s)} of its grace left`);
  if (node.marks) notes.push(`${format.plural(node.marks, "refused message")}`);
  if (node.waiting_for) notes.push(waitingNote(node.waiting_for));
  put(find("node-note"), notes.join(" · "));
  find("node-note").hidden = !notes.length;
}

// Some reasons say what the node does, the others what it lacks.
function waitingNote(reason) {
  return /^(warming up|worker|leaving|no stage|it |its copy|waiting)\b/i.test(reason) ? reason
    : `waiting for ${reason.replace(/^for /i, "")}`;
}

function flowInto(view, stage) {
  const boundary = (view.boundaries ?? []).find((one) => one.to_stage === stage);
  if (!boundary) return "";
  return `${format.bytes(boundary.traffic.reduce((sum, part) => sum + part.encoded_bytes, 0))}\nper step`;
}

const narrow = window.matchMedia("(max-width: 820px)");
let numStages = 0;

// Side by side while that leaves room for a card, else one below the other.
function arrange() {
  at("pipeline").classList.toggle("stacked", narrow.matches || numStages > MAX_ABREAST);
}
narrow.addEventListener("change", arrange);

function renderPipeline(view) {
  numStages = view.stages.length;
  arrange();
  const fastest = Math.max(0, ...view.nodes.map((node) => node.microbatches_per_s));
  const gone = (node) => node.state === "left" || node.state === "fenced";
  const over = view.state === "finished" || view.state === "failed";
  keep(at("pipeline"), view.stages, (stage) => stage.stage, (stage) => {
    const item = make("li", "stage");
    if (stage.stage > 0) {
      const flow = make("div", "flow");
      const wire = make("span", "wire");
      wire.setAttribute("aria-hidden", "true");
      flow.append(make("span", "flow-bytes"), wire);
      item.append(flow);
    }
    const body = make("div", "stage-body");
    const head = make("div", "stage-head");
    head.append(make("h3", "", `Stage ${stage.stage}`), make("p", "muted small parts"));
    body.append(head, make("ul", "cards"), make("p", "nobody", "Nobody holds this stage"));
    item.append(body);
    return item;
  }, (item, stage) => {
    put(item.querySelector(".parts"), stage.parts);
    const flow = item.querySelector(".flow-bytes");
    if (flow) {
      put(flow, flowInto(view, stage.stage));
      item.querySelector(".flow").classList.toggle("moving", view.state === "training" && !view.waiting_for);
    }
    const nobody = item.querySelector(".nobody");
    nobody.hidden = stage.nodes.length > 0;
    nobody.classList.toggle("over", over);
    put(nobody, over ? "The run is over" : "Nobody holds this stage");
    keep(item.querySelector(".cards"), stage.nodes, (node) => node.peer_id, createNode,
      (card, node) => updateNode(card, node, fastest));
  });
  const staged = new Set(view.stages.flatMap((stage) => stage.nodes.map((node) => node.peer_id)));
  const rest = view.nodes.filter((node) => !gone(node) && !staged.has(node.peer_id));
  at("deck").hidden = !rest.length;
  keep(at("deck-list"), rest, (node) => node.peer_id, createNode,
    (card, node) => updateNode(card, node, fastest));
  const live = view.nodes.filter((node) => !gone(node));
  put(at("nodes"), format.integer(live.length));
  const left = view.nodes.length - live.length;
  const arriving = live.filter((node) => ["joining", "copying", "warming"].includes(node.state)).length;
  put(at("nodes-note"), [arriving ? `${arriving} arriving` : "", left ? `${left} gone` : "nobody has left"]
    .filter(Boolean).join("\n"));
}

// ---- numbers -------------------------------------------------------------------------------

function secondsLeft(view, history) {
  const recent = history.slice(-20).map((point) => point.seconds).sort((a, b) => a - b);
  if (view.state !== "training" || !recent.length) return null;
  return recent[Math.floor(recent.length / 2)] * Math.max(0, view.total_steps - view.step);
}

function renderNumbers(view, history) {
  put(at("step"), format.integer(view.step));
  put(at("total"), `of ${format.plural(view.total_steps, "step")}`);
  const elapsed = view.started_s ? format.duration(view.now_s - view.started_s) : "";
  const left = secondsLeft(view, history);
  put(at("time"), left === null ? elapsed : `${elapsed} · about ${format.duration(left)} left`);
  const bar = at("bar");
  bar.setAttribute("aria-valuemax", String(view.total_steps));
  bar.setAttribute("aria-valuenow", String(view.step));
  const part = view.receipts_total ? view.receipts_done / view.receipts_total : 0;
  const done = Math.min(1, (view.step + Math.min(1, part)) / Math.max(1, view.total_steps));
  bar.firstElementChild.style.transform = `scaleX(${done.toFixed(5)})`;
  const open = view.receipts_total && view.step < view.total_steps
    ? `step ${format.integer(view.step + 1)}: ${view.receipts_done} of ${view.receipts_total} receipts`
      + (view.attempt > 1 ? `, attempt ${view.attempt}` : "")
    : "";
  const kept = [`${format.plural(view.steps_lost, "step")} lost`,
    `${format.plural(view.microbatches_missing, "microbatch")} missing`,
    `${view.microbatches_double} counted twice`].join(" · ");
  put(at("receipts"), [open, kept].filter(Boolean).join("\n"));
  at("receipts").classList.toggle("alarm",
    Boolean(view.steps_lost || view.microbatches_missing || view.microbatches_double));

  put(at("loss"), format.loss(view.loss));
  const notes = [];
  if (view.loss_first !== null) notes.push(`from ${format.loss(view.loss_first)}`);
  if (view.validation_loss !== null) notes.push(`validation ${format.loss(view.validation_loss)}`);
  put(at("loss-note"), notes.join("\n"));
  put(at("speed"), format.integer(view.tokens_per_s));
  put(at("speed-note"), `${format.integer(view.spec_summary.tokens_per_step)} tokens a step`);
  put(at("bytes"), format.bytes(view.boundary_bytes_per_step + view.reduce_bytes_per_step));
  put(at("bytes-note"), `${format.bytes(view.bytes_total)} in all`);
}

// ---- words ---------------------------------------------------------------------------------

const STANDING = {
  waiting: "Waiting.", paused: "Paused.", draining: "Draining: finishing what is open.", failed: "Failed.",
};

function renderWords(view) {
  const spec = view.spec_summary;
  document.title = `${view.name} ${view.step}/${view.total_steps} · Shoal`;
  put(at("run-name"), view.name);
  put(at("run-state"), view.state);
  at("run-state").dataset.state = view.state;
  at("run-state").hidden = false;
  put(at("spec"), [`${format.count(spec.num_params)} parameters`, format.plural(spec.num_layers, "layer"),
    format.plural(spec.num_stages, "stage"), `context ${format.integer(spec.seq_len)}`,
    `vocabulary ${format.integer(spec.vocab_size)}`, `${spec.boundary} on the wire`].join(" · "));
  const text = view.waiting_for || STANDING[view.state] || "";
  const banner = at("banner");
  put(banner, text);
  banner.hidden = !text;
  banner.classList.toggle("bad", view.state === "failed");
  put(at("foot"), `Run ${view.run_id}`);
  at("foot").title = view.weights_digest ?? "";
}

function renderEvents(view) {
  const list = at("events");
  const lines = view.events.map((line, index) => ({ ...line, key: `${line.time_s}|${line.kind}|${line.text}|${
    view.events.slice(0, index).filter((o) => o.time_s === line.time_s && o.text === line.text).length}` }));
  keep(list, lines.reverse(), (line) => line.key, (line) => {
    const item = make("li");
    item.dataset.kind = line.kind;
    const time = make("time", "", format.clock(line.time_s));
    time.dateTime = new Date(line.time_s * 1000).toISOString();
    item.append(time, make("span", "", line.text));
    return item;
  }, () => {});
}

function renderWork(view) {
  const nodes = view.nodes.filter((node) => node.contributed_microbatches > 0)
    .sort((a, b) => b.contributed_microbatches - a.contributed_microbatches).slice(0, 100);
  const most = nodes.length ? nodes[0].contributed_microbatches : 1;
  keep(at("work"), nodes, (node) => node.peer_id, () => {
    const item = make("li");
    const track = make("span", "track");
    track.append(make("span", "fill"));
    item.append(make("span", "who"), track, make("span", "amount muted"), make("span", "share"));
    return item;
  }, (item, node) => {
    const isGone = node.state === "left" || node.state === "fenced";
    item.classList.toggle("gone", isGone);
    put(item.querySelector(".who"), isGone ? `${node.name}, ${node.state}` : node.name);
    item.querySelector(".fill").style.transform = `scaleX(${(node.contributed_microbatches / most).toFixed(4)})`;
    put(item.querySelector(".share"), `${(100 * node.contributed_share).toFixed(node.contributed_share < 0.1 ? 1 : 0)} %`);
    put(item.querySelector(".amount"), format.integer(node.contributed_microbatches));
  });
}

function renderSummary(view) {
  const ended = view.state === "finished" || view.state === "failed";
  at("summary").hidden = !ended;
  if (!ended) return;
  put(at("summary-title"), view.state === "finished" ? "Finished" : "The run failed");
  const facts = [
    ["Steps", `${format.integer(view.step)} of ${format.integer(view.total_steps)} in ${format.duration(view.now_s - view.started_s)}`],
    ["Loss", `${format.loss(view.loss_first)} → ${format.loss(view.loss)}`
      + (view.validation_loss === null ? "" : `, validation ${format.loss(view.validation_loss)}`)],
    ["Tokens", format.integer(view.step * view.spec_summary.tokens_per_step)],
    ["Sent between nodes", format.bytes(view.bytes_total)],
    ["Integrity", `${format.plural(view.steps_lost, "step")} lost, ${format.plural(view.microbatches_missing, "microbatch")} missing, ${view.microbatches_double} counted twice`],
    ["Took part", format.plural(view.nodes.filter((node) => node.contributed_microbatches > 0).length, "node")],
  ];
  if (view.weights_digest) facts.push(["Weights", view.weights_digest]);
  keep(at("summary-list"), facts, (fact) => fact[0], ([name]) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd"));
    return row;
  }, (row, [, value]) => put(row.lastElementChild, value));
}

export function render(view, history) {
  renderWords(view);
  renderNumbers(view, history);
  renderPipeline(view);
  renderTraffic(view);
  renderSafeguards(view);
  renderEvents(view);
  renderWork(view);
  renderSummary(view);
}
