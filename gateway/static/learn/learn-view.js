// The view Learn: stories on the manager's real core and a worker's real cache side, a step at a time, forwards and backwards.

import { getJson } from "../api.js";
import { make, setText } from "../elements.js";
import { currentRoute, defineView, keepParameters } from "../views.js";
import { drawStep } from "./story-step.js";

class LearnView extends HTMLElement {
  #stories = make("div", { class: "row", role: "group", "aria-label": "Stories" });
  #place = make("p", { class: "quiet story-place" });
  #title = make("h2", {});
  #text = make("p", { class: "story-text" });
  #told = make("div", { "aria-live": "polite" }, this.#place, this.#title, this.#text);
  #back = make("button", { onclick: () => this.#go(this.#index - 1) }, "← Back");
  #next = make("button", { class: "primary", onclick: () => this.#go(this.#index + 1) }, "Next →");
  #state = make("div", {});
  #story = null;
  #index = 0;
  #onKey = (event) => this.#press(event);

  connectedCallback() {
    this.replaceChildren(
      make("h1", {}, "Learn"),
      make("p", { class: "quiet" }, "Each story runs on the manager's real core and a worker's real cache side. Arrow keys step forwards and backwards; Home and End go to the ends."),
      this.#stories,
      this.#told,
      make("div", { class: "row" }, this.#back, this.#next),
      this.#state,
    );
    addEventListener("keydown", this.#onKey);
    this.#showStories();
  }

  disconnectedCallback() {
    removeEventListener("keydown", this.#onKey);
  }

  routeChanged(parameters) {
    const name = parameters.get("story");
    if (name && name !== this.#story?.name) this.#open(name, Number(parameters.get("step") ?? 1) - 1);
  }

  async #showStories() {
    try {
      const stories = await getJson("/static/stories/index.json");
      this.#stories.replaceChildren(
        ...stories.map(({ name, summary }) =>
          make("button", { "data-story": name, "aria-pressed": "false", title: summary, onclick: () => this.#open(name, 0) }, name),
        ),
      );
      const { parameters } = currentRoute();
      await this.#open(parameters.get("story") ?? stories[0].name, Number(parameters.get("step") ?? 1) - 1);
    } catch (failure) {
      setText(this.#text, failure.message);
    }
  }

  async #open(name, index) {
    try {
      this.#story = await getJson(`/static/stories/${encodeURIComponent(name)}.json`);
    } catch (failure) {
      setText(this.#text, failure.message);
      return;
    }
    for (const button of this.#stories.children) {
      button.setAttribute("aria-pressed", String(button.dataset.story === name));
    }
    this.#go(index);
  }

  #go(index) {
    const steps = this.#story?.steps;
    if (!steps) return;
    this.#index = Math.min(Math.max(Number.isInteger(index) ? index : 0, 0), steps.length - 1);
    const step = steps[this.#index];
    setText(this.#place, `step ${this.#index + 1} of ${steps.length} · ${this.#story.summary}`);
    setText(this.#title, step.title);
    setText(this.#text, step.text);
    this.#state.replaceChildren(drawStep(this.#story, step));
    this.#back.setAttribute("aria-disabled", String(this.#index === 0));
    this.#next.setAttribute("aria-disabled", String(this.#index === steps.length - 1));
    keepParameters({ story: this.#story.name, step: String(this.#index + 1) });
  }

  #press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.("input, select, textarea")) return;
    const moves = { ArrowRight: this.#index + 1, ArrowLeft: this.#index - 1, Home: 0, End: (this.#story?.steps.length ?? 1) - 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#go(moves[event.key]);
  }
}

defineView("learn", "Learn", LearnView);
