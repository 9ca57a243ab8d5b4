// SPDX-License-Identifier: Apache-2.0
// Elements by id, made, filled, and kept by key: changed in place, so that focus, scroll position
// and transitions survive an update.

export const at = (id) => document.getElementById(id);

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Children of `parent` become one element per item, in order.
export function keep(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let child = old.get(name);
    if (child) old.delete(name);
    else { child = create(item); child.dataset.key = name; }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of old.values()) child.remove();
}
