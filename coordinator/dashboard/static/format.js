// SPDX-License-Identifier: Apache-2.0
// Numbers for people. The same units as `shoal status`.

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  const digits = unit === 0 || count >= 100 ? 0 : count >= 10 ? 1 : 2;
  return `${count.toFixed(digits)} ${units[unit]}`;
}

export function integer(count) {
  return Math.round(count).toLocaleString("en-US");
}

export function count(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(3))} ${unit}`;
  }
  return integer(value);
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function loss(value) {
  return value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 3 : 2);
}

export function plural(number, noun) {
  const ending = number === 1 ? "" : noun.endsWith("ch") ? "es" : "s";
  return `${integer(number)} ${noun}${ending}`;
}
