// The view Cluster: sums over all workers, and a card for each.

import { make, setText } from "../elements.js";
import { count, rate, share } from "../format.js";
import { store } from "../store.js";
import { useStyles } from "../styles.js";
import { registerView } from "../views.js";
import { WorkerCard } from "./worker-card.js";

class ClusterView extends HTMLElement {
  #cards = new Map(); // session → WorkerCard
  #figures = {};
  #list = make("div", { class: "workers" });
  #empty = make("p", { class: "card" });

  connectedCallback() {
    useStyles("/static/css/cluster.css");
    const figure = (name, title) => {
      this.#figures[name] = make("dd");
      return make("div", {}, make("dt", {}, title), this.#figures[name]);
    };
    this.replaceChildren(
      make("h1", {}, "Cluster"),
      make(
        "dl",
        { class: "figures card sums" },
        figure("workers", "workers"),
        figure("running", "running"),
        figure("waiting", "waiting"),
        figure("rate", "tokens/s"),
        figure("hits", "hit rate"),
        figure("prefixes", "cached prefixes"),
        figure("audits", "audits"),
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
    for (const [session, card] of this.#cards) {
      if (store.workers.has(session)) continue;
      card.element.remove();
      this.#cards.delete(session);
    }
    workers.forEach((worker, index) => {
      if (!this.#cards.has(worker.session)) this.#cards.set(worker.session, new WorkerCard(worker));
      const card = this.#cards.get(worker.session);
      if (this.#list.children[index] !== card.element) this.#list.insertBefore(card.element, this.#list.children[index] ?? null);
      card.show(worker, store.ratesOf(worker.session));
    });
  }

  #showSums(workers) {
    const sum = (value) => workers.reduce((total, { info }) => total + Number(value(info)), 0);
    setText(this.#figures.workers, count(workers.length));
    setText(this.#figures.running, count(sum((info) => info.load.num_running)));
    setText(this.#figures.waiting, count(sum((info) => info.load.num_waiting)));
    setText(this.#figures.rate, rate(workers.reduce((total, worker) => total + store.ratesOf(worker.session).recent("generated"), 0)));
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

customElements.define("kvpool-cluster", ClusterView);
registerView("cluster", "Cluster", "kvpool-cluster");
