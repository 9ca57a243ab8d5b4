// SPDX-License-Identifier: Apache-2.0
// What crosses boundaries, who leads, what is kept against losses, and which losses there were.

import { at, keep, make, put } from "./elements.js";
import * as format from "./format.js";

const MAX_RECOVERIES = 12;

// ---- bytes across boundaries ---------------------------------------------------------------

const encoded = (parts) => parts.reduce((sum, part) => sum + part.encoded_bytes, 0);

// What bf16 would take; null as soon as one part has no such measure.
function plain(parts) {
  return parts.some((part) => part.bf16_bytes === null) ? null
    : parts.reduce((sum, part) => sum + part.bf16_bytes, 0);
}

// The two of all boundaries together, for the chart: [encoded, in bf16], or null.
export function totals(view) {
  const parts = (view.boundaries ?? []).flatMap((boundary) => boundary.traffic);
  const compared = parts.filter((part) => part.bf16_bytes !== null);
  return parts.length && compared.length ? [encoded(parts), plain(compared)] : null;
}

export function renderTraffic(view) {
  const boundaries = view.boundaries ?? [];
  at("traffic").hidden = !boundaries.length;
  at("facts").classList.toggle("single", !boundaries.length);
  if (!boundaries.length) return;
  const both = totals(view);
  const fewer = both && both[0] > 0 ? both[1] / both[0] : 1;
  put(at("traffic-note"), `in the last step, as the nodes measured it${
    both && fewer > 1.005 ? `: ${fewer.toFixed(fewer < 10 ? 1 : 0)} times fewer than in bf16` : ""}`);
  const rows = boundaries.flatMap((boundary) => boundary.traffic.map((part, index) => ({
    ...part, place: `${boundary.from_stage}–${boundary.to_stage}`, isFirst: index === 0 })));
  const most = Math.max(1, ...rows.map((row) => Math.max(row.encoded_bytes, row.bf16_bytes ?? 0)));
  keep(at("traffic-rows"), rows, (row) => `${row.place} ${row.kind}`, (row) => {
    const line = make("tr", row.isFirst ? "first" : "");
    const place = make("th", "", row.isFirst ? row.place : "");
    place.scope = "row";
    const bar = make("td", "share-of");
    const track = make("span", "track");
    track.append(make("span", "fill"));
    bar.append(track);
    line.append(place, make("td", "", row.kind), bar, make("td", "number"), make("td", "number muted"));
    return line;
  }, (line, row) => {
    line.querySelector(".track").style.width = `${(100 * (row.bf16_bytes ?? row.encoded_bytes) / most).toFixed(1)}%`;
    const share = row.bf16_bytes ? Math.min(1, row.encoded_bytes / row.bf16_bytes) : 1;
    line.querySelector(".fill").style.transform = `scaleX(${share.toFixed(4)})`;
    put(line.children[3], format.bytes(row.encoded_bytes));
    put(line.children[4], row.bf16_bytes === null ? "–" : format.bytes(row.bf16_bytes));
  });
}

// ---- safeguards ----------------------------------------------------------------------------

function standby(one) {
  const state = !one.connected ? "away"
    : one.events_behind ? `follows, ${format.plural(one.events_behind, "event")} behind` : "follows, up to date";
  return `${one.address}: ${state}`;
}

function facts(view) {
  const found = [];
  const standbys = view.standbys ?? [];
  const who = view.coordinator || "this coordinator";
  if (view.term) found.push(["Coordinator", `${who} ${view.leads === false ? "doesn’t lead" : "leads"} in term ${view.term}`]);
  if (standbys.length) found.push([standbys.length === 1 ? "Standby" : "Standbys", standbys.map(standby).join("\n")]);
  if (view.snapshot_step !== null) found.push(["Snapshot", `of step ${format.integer(view.snapshot_step)}`]);
  if (view.log_bytes) {
    found.push(["Boundary logs", `${format.bytes(view.log_bytes)} in all, at most ${format.bytes(view.log_budget_bytes)} at each node`]);
  }
  if (view.replays) {
    found.push(["Replays", `${format.integer(view.replays)}, in ${format.duration(view.replay_seconds)}, out of ${format.bytes(view.replay_bytes)} of logs`]);
  }
  if (view.rollbacks) {
    found.push(["Rollbacks", `${format.integer(view.rollbacks)}${view.rollback_seconds ? `, in ${format.duration(view.rollback_seconds)}` : ""}`]);
  }
  const offs = view.back_offs;
  if (offs) {
    const now = [offs.coarser_bits ? `sums ${format.plural(offs.coarser_bits, "bit")} coarser` : "",
      offs.loss_scale > 1 ? `loss scale ${format.integer(offs.loss_scale)} in fp16` : ""].filter(Boolean).join(", ");
    found.push(["Numbers", `${format.plural(offs.count, "back-off")}, the last in step ${format.integer(offs.step)}: ${offs.reason}${now ? ` (now ${now})` : ""}`]);
  }
  return found;
}

function recoveryText(one) {
  const took = one.seconds === null ? "" : `, ${one.seconds.toFixed(1)} s`;
  const [from, to] = [format.integer(one.from_step), format.integer(one.to_step)];
  return one.kind === "replay"
    ? `stage ${one.stage} was replayed from step ${from} to ${to}${took}, ${format.bytes(one.log_bytes)} of logs`
    : `the run went back from step ${from} to ${to}${took}${one.seconds === null ? "; not caught up yet" : ""}: ${one.reason}`;
}

export function renderSafeguards(view) {
  keep(at("replaying"), view.replaying ?? [], (one) => `${one.stage} ${one.node} ${one.to_step}`, () => {
    const item = make("li");
    const track = make("span", "track");
    track.append(make("span", "fill"));
    item.append(make("p"), track);
    return item;
  }, (item, one) => {
    const [done, of] = [one.step - one.from_step, one.to_step - one.from_step];
    put(item.firstElementChild, `${one.node} computes stage ${one.stage} again: ${format.integer(done)} of ${
      format.plural(of, "step")}, up to step ${format.integer(one.to_step)}, for ${format.duration(one.seconds)}`);
    item.querySelector(".fill").style.transform = `scaleX(${(of ? done / of : 1).toFixed(4)})`;
  });
  const told = facts(view);
  at("safety").hidden = !told.length;
  keep(at("safeguards"), told, (fact) => fact[0], ([name]) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd"));
    return row;
  }, (row, [, value]) => put(row.lastElementChild, value));
  const recent = (view.recoveries ?? []).slice(-MAX_RECOVERIES).reverse();
  at("recoveries").hidden = !recent.length;
  keep(at("recoveries"), recent, (one) => `${one.kind} ${one.time_s} ${one.from_step}`, (one) => {
    const item = make("li");
    item.append(make("time", "", format.clock(one.time_s)), make("span"));
    item.firstElementChild.dateTime = new Date(one.time_s * 1000).toISOString();
    return item;
  }, (item, one) => put(item.lastElementChild, recoveryText(one)));
}
