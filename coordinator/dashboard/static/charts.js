// SPDX-License-Identifier: Apache-2.0
// The three charts, drawn by uPlot (global, vendored).

import { totals } from "./facts.js";
import * as format from "./format.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ROOM_PX = 12;
const MARK_PX = 6;
const FONT = "12px system-ui, sans-serif";

function axis(values, size) {
  const grid = { stroke: css("--line"), width: 1 };
  return {
    stroke: css("--muted"), font: FONT, size, gap: 6, grid, ticks: { show: false },
    ...(values ? { values: (_, splits) => splits.map((v) => (v === null ? "" : values(v))) } : {}),
  };
}

function line(label, colour, fill) {
  return { label, stroke: css(colour), width: 1.75, fill: fill ? css(fill) : undefined,
           points: { show: false }, spanGaps: false };
}

// Sparse values are rings on a line; where these would run into each other, the line alone.
function dots(label, colour) {
  return { label, stroke: css(colour), width: 1.5, spanGaps: true,
           points: { show: (plot, index) => isSparse(plot.data[index], plot.over.clientWidth), size: 7, width: 2,
                     stroke: css(colour), fill: css("--surface") } };
}

function dashed(label, colour) {
  return { label, stroke: css(colour), width: 1.25, dash: [5, 4], points: { show: false } };
}

function isSparse(values, width) {
  let count = 0;
  for (const value of values) count += value !== null && value !== undefined;
  return count * ROOM_PX <= width;
}

// Steps at which the run was hit, as broken uprights; those too close to one that is drawn are left out.
function drawMarks(plot, steps) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = css("--amber");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  let last = -Infinity;
  for (const step of [...steps].sort((a, b) => a - b)) {
    const x = Math.round(plot.valToPos(step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width || x - last < MARK_PX * devicePixelRatio) continue;
    last = x;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

class Chart {
  constructor(element, makeSeries, yFormat, fromZero) {
    this.element = element;
    this.makeSeries = makeSeries;
    this.yFormat = yFormat;
    this.fromZero = fromZero;
    this.data = null;
    this.plot = null;
    this.marks = [];
    new ResizeObserver(() => this.resize()).observe(element);
  }

  size() {
    return { width: Math.max(120, Math.floor(this.element.clientWidth)), height: this.element.clientHeight };
  }

  resize() {
    const { width, height } = this.size();
    if (this.plot && (this.plot.width !== width || this.plot.height !== height)) {
      this.plot.setSize({ width, height });
    }
  }

  show(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else this.build();
  }

  build() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (!this.data) return;
    const range = this.fromZero
      ? (_, __, max) => [0, max > 0 ? max * 1.12 : 1]
      : (_, min, max) => {
        if (min === null) return [0, 1];
        const pad = Math.max((max - min) * 0.08, 0.02);
        return [Math.max(0, min - pad), max + pad];
      };
    this.plot = new window.uPlot({
      ...this.size(),
      padding: [8, 18, 0, 0],
      legend: { show: false },
      cursor: { show: true, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
                y: { range } },
      axes: [axis((v) => (Number.isInteger(v) ? format.integer(v) : ""), 28), axis(this.yFormat, 58)],
      series: [{}, ...this.makeSeries()],
      hooks: { setCursor: [(plot) => this.tip(plot)], drawClear: [(plot) => drawMarks(plot, this.marks)] },
    }, this.data, this.element);
    this.note = document.createElement("div");
    this.note.className = "tip";
    this.note.hidden = true;
    this.plot.over.append(this.note);
  }

  tip(plot) {
    if (!this.note) return;
    const index = plot.cursor.idx;
    const outside = index === null || index === undefined || plot.cursor.left < 0;
    this.note.hidden = outside;
    if (outside) return;
    const shown = plot.series.slice(1)
      .map((series, i) => [series.label, plot.data[i + 1][index]])
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([label, value]) => `${label} ${this.yFormat(value, true)}`);
    this.note.textContent = `step ${format.integer(plot.data[0][index])} · ${shown.join(" · ")}`;
    const left = plot.cursor.left > plot.over.clientWidth / 2;
    this.note.classList.toggle("left", left);
  }
}

export function createCharts() {
  const at = (id) => document.getElementById(id);
  const charts = {
    loss: new Chart(at("chart-loss"),
      () => [line("training", "--accent", "--accent-wash"), dots("validation", "--coral")],
      (v, exact) => v.toFixed(exact ? 4 : 2), false),
    speed: new Chart(at("chart-speed"),
      () => [line("tokens/s", "--accent", "--accent-wash")], (v) => format.count(v), true),
    bytes: new Chart(at("chart-bytes"),
      () => [line("boundary", "--accent", "--accent-wash"), line("reduce", "--coral"),
             dashed("boundary in bf16", "--muted")],
      (v) => format.bytes(v), true),
  };
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of Object.values(charts)) chart.build();
  });
  return {
    show(history, view) {
      for (const id of ["chart-loss", "chart-speed", "chart-bytes"]) {
        at(id).classList.toggle("empty", !history.length);
      }
      if (!history.length) return;
      const steps = history.map((p) => p.step);
      charts.loss.marks = (view.recoveries ?? []).map((one) => (one.kind === "replay" ? one.to_step : one.from_step));
      at("key-marks").hidden = !charts.loss.marks.length;
      const validated = history.map((p) => p.validation_loss ?? null);
      at("key-validation").classList.toggle("dot", isSparse(validated, at("chart-loss").clientWidth));
      charts.loss.show([steps, history.map((p) => p.loss), validated]);
      charts.speed.show([steps, history.map((p) => p.tokens_per_s)]);
      const both = totals(view);
      const isSmaller = both !== null && both[1] > 1.005 * both[0];
      at("key-bf16").hidden = !isSmaller;
      charts.bytes.show([steps, history.map((p) => p.boundary_bytes), history.map((p) => p.reduce_bytes),
        steps.map(() => (isSmaller ? both[1] : null))]);
      const first = history[0], last = history[history.length - 1];
      at("chart-loss").setAttribute("aria-label",
        `Loss by step: ${format.loss(first.loss)} at step ${first.step}, ${format.loss(last.loss)} at step ${last.step}`);
      at("chart-speed").setAttribute("aria-label", `Tokens per second by step, now ${format.integer(last.tokens_per_s)}`);
      at("chart-bytes").setAttribute("aria-label",
        `Bytes by step, now ${format.bytes(last.boundary_bytes)} boundary and ${format.bytes(last.reduce_bytes)} reduce`);
    },
  };
}
