// What the colours of the map mean, with the number of blocks of each. A press shows only these.

import { make, setText } from "../elements.js";
import { count } from "../format.js";

export class Legend {
  element = make("div", { class: "legend", role: "group", "aria-label": "Legend: press to show only these" });
  #counts = [];
  #onChoice;

  /** @param {function(number|null): void} onChoice: the class to show alone; null: all */
  constructor(onChoice) {
    this.#onChoice = onChoice;
  }

  /** @param {{title: string, css: string}[]} classes; @param {number|null} chosen */
  show(classes, chosen) {
    this.#counts = classes.map(() => make("span", { class: "legend-count" }));
    this.element.replaceChildren(
      ...classes.map(({ title, css }, index) => {
        const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
        swatch.style.background = `var(${css})`;
        const pressed = index === chosen;
        return make(
          "button",
          { type: "button", "aria-pressed": pressed, onclick: () => this.#onChoice(pressed ? null : index) },
          swatch,
          title,
          " ",
          this.#counts[index],
        );
      }),
    );
  }

  /** @param {number[]} counts of blocks, by class; empty classes are hidden */
  count(counts) {
    counts.forEach((value, index) => {
      setText(this.#counts[index], count(value));
      const button = this.element.children[index];
      button.hidden = value === 0 && button.getAttribute("aria-pressed") !== "true";
    });
  }
}
