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
  element.append(...children.filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Write a text only if it is another one: screen readers repeat what is written. */
export function setText(element, text) {
  const words = String(text);
  if (element.textContent !== words) element.textContent = words;
}
