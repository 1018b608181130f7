// Elements in one expression. Texts go in as text, never as markup: names and tokens of a cluster are not to be trusted.

/**
 * make("button", {class: "quiet", onclick: f, "aria-pressed": "false"}, "Drain")
 * @param {string} name of the element
 * @param {Object} attributes; on… are listeners, null and false are left out (aria-… has "false"), true is empty
 * @param {...(Node|string|number|null)} children
 * @returns {HTMLElement}
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("aria-")) element.setAttribute(key, String(value));
    else if (value === false) continue;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A figure of a list `<dl class="figures">`. @param {HTMLElement|string} value a <dd>, or what it says */
export function figure(title, value) {
  return make("div", {}, make("dt", {}, title), value instanceof Node ? value : make("dd", {}, value));
}

/** Write a text only if it is another one: screen readers repeat what is written. */
export function setText(element, text) {
  const words = String(text);
  if (element.textContent !== words) element.textContent = words;
}

/**
 * Keep one part of a list for each item, in the items' order: parts whose items are gone are removed, new ones are made.
 * @param {HTMLElement} list; @param {Map} parts by key, each with `element`; @param {Map} items by key; @param {function} makePart of an item
 */
export function keepList(list, parts, items, makePart) {
  for (const [key, part] of parts) {
    if (items.has(key)) continue;
    part.element.remove();
    parts.delete(key);
  }
  [...items].forEach(([key, item], index) => {
    if (!parts.has(key)) parts.set(key, makePart(item));
    const { element } = parts.get(key);
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
  });
}
