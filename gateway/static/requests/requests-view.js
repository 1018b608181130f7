// The view Requests: the answers of this gateway, newest first, and below them those that came another way.

import { keepList, make, setText } from "../elements.js";
import { count, duration } from "../format.js";
import { store } from "../store.js";
import { defineView } from "../views.js";
import { Lane, legend } from "./lane.js";
import { OtherRequests } from "./other-requests.js";
import { RequestRow } from "./request-row.js";

const REFRESH_MS = 500;

class RequestsView extends HTMLElement {
  #scale = make("p", { class: "quiet" });
  #own = make("ol", { class: "lanes", "aria-label": "Answers of this gateway" });
  #nothing = make("p", { class: "quiet" }, "No request has come yet.");
  #othersTitle = make("h2", { hidden: true }, "By another way");
  #others = make("ol", { class: "lanes", "aria-label": "Answers that came another way" });
  #rows = new Map(); // number → RequestRow
  #otherRequests = new OtherRequests();
  #onPicture = () => this.#takeOthers();
  #onRequests = () => this.#show();
  #timer = null;

  connectedCallback() {
    this.replaceChildren(
      make("h1", {}, "Requests"),
      make("p", { class: "quiet" }, "Where the time of each answer went: first as its reader sees it and, when it has ended, as its worker measured it."),
      legend(),
      this.#scale,
      this.#nothing,
      this.#own,
      this.#othersTitle,
      this.#others,
    );
    store.addEventListener("picture", this.#onPicture);
    store.addEventListener("requests", this.#onRequests);
    this.#timer = setInterval(() => this.#show(), REFRESH_MS);
    this.#takeOthers();
    this.#show();
  }

  disconnectedCallback() {
    store.removeEventListener("picture", this.#onPicture);
    store.removeEventListener("requests", this.#onRequests);
    clearInterval(this.#timer);
  }

  #takeOthers() {
    const own = new Set([...store.requests.values()].map(({ sequence_id }) => sequence_id));
    this.#otherRequests.take(store.workers.values(), own, performance.now());
  }

  #show() {
    const now = performance.now();
    const answers = [...store.requests.values()].reverse();
    const others = this.#otherRequests.all().reverse();
    const ends = answers.map((answer) => answer.end_ms ?? now - answer.began_at);
    const longest = Math.max(1, ...ends, ...others.map((lane) => (lane.end_at ?? now) - lane.began_at));
    this.#nothing.hidden = answers.length + others.length > 0;
    setText(this.#scale, answers.length + others.length ? `A whole bar is ${duration(longest)}.` : "");
    this.#showOwn(answers, ends, longest);
    this.#showOthers(others, now, longest);
  }

  #showOwn(answers, ends, longest) {
    keepList(this.#own, this.#rows, new Map(answers.map((answer) => [answer.number, answer])), () => new RequestRow());
    answers.forEach((answer, index) => this.#rows.get(answer.number).show(answer, ends[index], longest));
  }

  #showOthers(others, now, longest) {
    this.#othersTitle.hidden = others.length === 0;
    this.#others.replaceChildren(
      ...others.map((other) => {
        const lane = new Lane();
        const endMs = (other.end_at ?? now) - other.began_at;
        lane.show(other.parts, endMs, longest);
        const facts = [
          `${count(other.num_tokens)} tokens`,
          `${count(other.num_cached_tokens)} cached`,
          other.worker_id,
          duration(endMs),
          other.end_at === null ? "running" : "ended",
        ];
        return make(
          "li",
          { class: "request", "data-sequence": other.sequence_id },
          make(
            "div",
            { class: "request-head" },
            make("span", { class: "request-name mono", title: other.sequence_id }, other.sequence_id.slice(0, 8)),
            make("span", { class: "quiet" }, facts.join(" · ")),
          ),
          lane.element,
        );
      }),
    );
  }
}

defineView("requests", "Requests", RequestsView);
