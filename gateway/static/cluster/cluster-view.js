// The view Cluster: sums over all workers, and a card for each.

import { figure, keepList, make, setText } from "../elements.js";
import { count, rate, share } from "../format.js";
import { store } from "../store.js";
import { defineView } from "../views.js";
import { WorkerCard } from "./worker-card.js";

class ClusterView extends HTMLElement {
  #cards = new Map(); // session → WorkerCard
  #figures = Object.fromEntries(["workers", "running", "waiting", "rate", "hits", "prefixes", "audits"].map((name) => [name, make("dd")]));
  #list = make("div", { class: "workers" });
  #empty = make("p", { class: "card" });

  connectedCallback() {
    this.replaceChildren(
      make("h1", {}, "Cluster"),
      make(
        "dl",
        { class: "figures card sums" },
        figure("workers", this.#figures.workers),
        figure("running", this.#figures.running),
        figure("waiting", this.#figures.waiting),
        figure("tokens/s", this.#figures.rate),
        figure("hit rate", this.#figures.hits),
        figure("cached prefixes", this.#figures.prefixes),
        figure("audits", this.#figures.audits),
      ),
      this.#empty,
      this.#list,
    );
    this.show = () => this.#show();
    store.addEventListener("picture", this.show);
    store.addEventListener("manager", this.show);
    this.#show();
  }

  disconnectedCallback() {
    store.removeEventListener("picture", this.show);
    store.removeEventListener("manager", this.show);
  }

  #show() {
    const workers = store.sortedWorkers();
    this.#showSums(workers);
    setText(this.#empty, store.connection === "up" ? "No worker is registered. Start one: kvpool up, or kvpool worker." : "Waiting for the first picture.");
    this.#empty.hidden = workers.length > 0;
    const bySession = new Map(workers.map((worker) => [worker.session, worker]));
    keepList(this.#list, this.#cards, bySession, (worker) => new WorkerCard(worker));
    for (const [session, worker] of bySession) this.#cards.get(session).show(worker, store.ratesOf(session));
  }

  #showSums(workers) {
    const sum = (value) => workers.reduce((total, { info }) => total + Number(value(info)), 0);
    setText(this.#figures.workers, count(workers.length));
    setText(this.#figures.running, count(sum((info) => info.load.num_running)));
    setText(this.#figures.waiting, count(sum((info) => info.load.num_waiting)));
    setText(this.#figures.rate, rate(workers.reduce((total, worker) => total + store.ratesOf(worker.session).recent(), 0)));
    setText(this.#figures.hits, share(sum((info) => info.totals.num_cached_tokens), sum((info) => info.totals.num_prompt_tokens)));
    setText(this.#figures.prefixes, store.cluster ? count(store.cluster.num_prefix_nodes) : "–");
    setText(this.#figures.audits, auditsOf(store.cluster));
  }
}

function auditsOf(cluster) {
  if (!cluster) return "–";
  if (cluster.num_violations > 0) return `▲ ${count(cluster.num_violations)} violations`;
  return Number(cluster.num_audits) > 0 ? `${count(cluster.num_audits)}, all clean` : "none yet";
}

defineView("cluster", "Cluster", ClusterView);
