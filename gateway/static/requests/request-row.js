// One answer: its lane, its tokens and, when it is asked for, why no more of its prompt was cached.

import { getJson } from "../api.js";
import { make, setText } from "../elements.js";
import { count, duration } from "../format.js";
import { sentencesOf } from "../why/explanation.js";
import { Lane } from "./lane.js";

export class RequestRow {
  #name = make("span", { class: "request-name mono" });
  #outcome = make("span", { class: "request-outcome" });
  #prompt = make("span", {});
  #bar = make("span", { class: "prompt-bar", "aria-hidden": "true" });
  #cached = make("span", { class: "prompt-bar-cached" });
  #facts = make("span", { class: "quiet" });
  #lane = new Lane();
  #why = make("details", { hidden: true, ontoggle: () => this.#ask() }, make("summary", {}, "Why was no more cached?"));
  #number = null;
  #asked = false;

  constructor() {
    this.#bar.append(this.#cached, make("span", { class: "prompt-bar-computed" }));
    const head = make("div", { class: "request-head" }, this.#name, this.#outcome, this.#bar, this.#prompt, this.#facts);
    this.element = make("li", { class: "request" }, head, this.#lane.element, this.#why);
  }

  /** @param {Object} answer as the gateway sends it; @param {number} endMs of its last part; @param {number} longestMs of the page */
  show(answer, endMs, longestMs) {
    this.#number = answer.number;
    this.element.className = `request request-${answer.outcome}`;
    this.element.dataset.sequence = answer.sequence_id;
    setText(this.#name, answer.choice ? `${answer.request_id.slice(0, 8)} · ${answer.choice + 1}` : answer.request_id.slice(0, 8));
    this.#name.title = answer.request_id;
    setText(this.#outcome, outcomeOf(answer));
    const known = answer.num_prompt_tokens !== null;
    this.#bar.hidden = !known;
    this.#cached.style.width = known ? `${(100 * answer.num_cached_tokens) / Math.max(1, answer.num_prompt_tokens)}%` : "0";
    setText(this.#prompt, known ? `${count(answer.num_cached_tokens)} of ${count(answer.num_prompt_tokens)} prompt tokens cached` : "");
    setText(this.#facts, factsOf(answer, endMs));
    this.#lane.show(answer.parts, endMs, longestMs);
    this.#why.hidden = !answer.explained;
  }

  async #ask() {
    if (!this.#why.open || this.#asked) return;
    this.#asked = true;
    try {
      const { explanation } = await getJson("/api/requests", { number: this.#number });
      this.#why.append(make("p", { class: "quiet" }, "As the manager saw it before the prompt was computed:"), sentencesOf(explanation));
    } catch (failure) {
      this.#why.append(make("p", { role: "status" }, failure.message));
    }
  }
}

function outcomeOf({ outcome, reason }) {
  if (outcome === "finished") return reason === "length" ? "reached its length limit" : "finished";
  return { running: "running", failed: `failed: ${reason}`, left: "left by its reader" }[outcome];
}

function factsOf(answer, endMs) {
  const tokens = `${count(answer.num_generated_tokens)} generated`;
  const preempted = answer.num_preemptions ? `preempted ${count(answer.num_preemptions)}×` : null;
  return [tokens, duration(endMs), preempted, answer.model].filter(Boolean).join(" · ");
}
