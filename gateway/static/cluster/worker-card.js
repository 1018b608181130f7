// One worker: what it does, and what its pool holds.

import { Chart } from "../chart.js";
import { figure, make, setText } from "../elements.js";
import { count, groupName, rate, share } from "../format.js";
import { viewAddress } from "../views.js";
import { BlockBar } from "./block-bar.js";
import { askToDrain } from "./drain-dialog.js";

export class WorkerCard {
  #title = make("h2", { class: "mono" });
  #facts = make("p", { class: "quiet worker-facts" });
  #state = make("span", { class: "badge", hidden: true });
  #figures = { rate: make("dd"), hits: make("dd"), running: make("dd"), waiting: make("dd"), evicted: make("dd") };
  #bars = [];
  #barsElement = make("div");
  #chart;
  #drain = make("button", { type: "button" }, "Drain…");
  #blocks = make("a", {}, "Blocks");

  constructor(worker) {
    const id = worker.info.worker_id;
    this.#chart = new Chart(`Tokens per second of ${id}, the last two minutes`);
    setText(this.#title, id);
    this.#blocks.href = viewAddress("blocks", { worker: id });
    this.#blocks.setAttribute("aria-label", `Blocks of ${id}`);
    this.#drain.setAttribute("aria-label", `Drain ${id}`);
    this.#drain.addEventListener("click", () => askToDrain(id, this.element));
    this.element = make(
      "article",
      { class: "card worker", "data-worker": id },
      make("div", { class: "row worker-head" }, this.#title, this.#state, this.#blocks, this.#drain),
      this.#facts,
      make(
        "dl",
        { class: "figures" },
        figure("tokens/s", this.#figures.rate),
        figure("hit rate", this.#figures.hits),
        figure("running", this.#figures.running),
        figure("waiting", this.#figures.waiting),
        figure("evicted", this.#figures.evicted),
      ),
      this.#chart.element,
      this.#barsElement,
    );
  }

  show(worker, rates) {
    const { info } = worker;
    setText(this.#facts, `${info.model_name} · ${info.address} · blocks of ${info.block_size} tokens · at most ${count(info.max_model_len)} tokens`);
    const state = info.recovering ? "recovering" : info.draining ? "draining" : "";
    setText(this.#state, state);
    this.#state.hidden = state === "";
    this.#drain.disabled = info.draining;
    setText(this.#figures.rate, rate(rates.recent()));
    setText(this.#figures.hits, share(info.totals.num_cached_tokens, info.totals.num_prompt_tokens));
    setText(this.#figures.running, count(info.load.num_running));
    setText(this.#figures.waiting, count(info.load.num_waiting));
    setText(this.#figures.evicted, count(info.totals.num_evicted_blocks));
    this.#chart.show(rates.series);
    while (this.#bars.length < info.groups.length) {
      this.#bars.push(new BlockBar());
      this.#barsElement.append(this.#bars.at(-1).element);
    }
    const isOne = info.groups.length === 1;
    this.#bars.forEach((bar, group) => bar.show(info.groups[group].counts, isOne ? "" : `Group ${groupName(group, info)}: `));
  }
}
