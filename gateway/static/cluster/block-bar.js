// How many blocks of a pool are in which state: a bar, and the same in words.

import { STATES } from "../block-states.js";
import { count, share } from "../format.js";
import { make, setText } from "../elements.js";

const SHOWN = ["held", "reserved", "copying", "cached", "free"];

export class BlockBar {
  #parts = new Map();
  #words = make("p", { class: "bar-words quiet" });

  constructor() {
    const bar = make("div", { class: "bar", "aria-hidden": "true" });
    for (const name of SHOWN) {
      const part = make("span", { class: `bar-part bar-${name}` });
      part.style.background = `var(${STATES.find((state) => state.name === name).css})`;
      this.#parts.set(name, part);
      bar.append(part);
    }
    this.element = make("div", {}, bar, this.#words);
  }

  /** `title`: what the words begin with. */
  show(counts, title = "") {
    for (const [name, part] of this.#parts) part.style.flexGrow = String(counts[name]);
    const words = SHOWN.filter((name) => counts[name] > 0 || name === "held" || name === "cached").map(
      (name) => `${name} ${share(counts[name], counts.capacity)}`,
    );
    const shared = counts.shared > 0 ? `, ${count(counts.shared)} shared` : "";
    setText(this.#words, `${title}${count(counts.capacity)} blocks: ${words.join(", ")}${shared}`);
  }
}
