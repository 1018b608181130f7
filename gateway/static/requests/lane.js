// One answer's time as a bar: its parts one after the other, all bars of a page on one scale.

import { make } from "../elements.js";
import { duration } from "../format.js";

/** What an answer does, in the order of the legend. */
export const PARTS = [
  { state: "waiting", title: "waiting" },
  { state: "prefill", title: "prefill" },
  { state: "decode", title: "decode" },
  { state: "preempted", title: "preempted (in all)" },
  { state: "moving", title: "moving to another worker" },
];

export class Lane {
  element = make("div", { class: "lane", role: "img" });

  /**
   * @param {{state: string, worker_id: string, start_ms: number}[]} parts in order
   * @param {number} endMs where the last one ends
   * @param {number} longestMs what the whole width stands for
   */
  show(parts, endMs, longestMs) {
    const ends = parts.map((_, index) => Math.max(parts[index].start_ms, parts[index + 1]?.start_ms ?? endMs));
    const known = this.element.children;
    while (known.length > parts.length) known[known.length - 1].remove();
    while (known.length < parts.length) this.element.append(make("span", {}));
    const words = parts.map(({ state, worker_id, start_ms }, index) => {
      const said = `${state} ${duration(ends[index] - start_ms)}${worker_id ? ` on ${worker_id}` : ""}`;
      const part = known[index];
      part.className = `lane-part part-${state}`;
      part.title = said;
      part.style.width = `${(100 * (ends[index] - start_ms)) / Math.max(1, longestMs)}%`;
      return said;
    });
    this.element.setAttribute("aria-label", words.join(", "));
  }
}

export function legend() {
  return make(
    "ul",
    { class: "lane-legend", "aria-label": "Legend" },
    ...PARTS.map(({ state, title }) =>
      make("li", {}, make("span", { class: `swatch part-${state}`, "aria-hidden": "true" }), title),
    ),
  );
}
