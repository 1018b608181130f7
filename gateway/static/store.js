// What the page knows of the cluster: one event stream of the gateway, kept as state. Views read it and listen for changes.
//
// Events of `store`: "picture" (detail: {whole, changed: Map of session → blocks by group}), "manager", "requests".

import { Rates } from "./rates.js";
import { WorkerState } from "./worker-state.js";

const RETRY_MS = 1000;

class Store extends EventTarget {
  /** "connecting"; "up"; "away": the manager does not answer; "lost": the gateway does not. */
  connection = "connecting";
  message = "";
  epoch = "";
  /** Number of the manager's last picture, modulo 2³², as in `lastUsed`. */
  number = 0;
  cluster = null;
  /** @type {Map<string, WorkerState>} by session */
  workers = new Map();
  /** @type {Map<string, Rates>} by session */
  rates = new Map();
  /** @type {Map<number, Object>} answers of this gateway by number, oldest first: as sent, and `began_at` of performance.now() */
  requests = new Map();
  #source = null;

  /** Open the stream, and keep it open. */
  start() {
    this.#source = new EventSource("/api/watch");
    this.#source.addEventListener("picture", (event) => this.#onPicture(JSON.parse(event.data)));
    this.#source.addEventListener("manager", (event) => this.#connect(JSON.parse(event.data)));
    this.#source.addEventListener("requests", (event) => this.#onRequests(JSON.parse(event.data)));
    this.#source.addEventListener("error", () => this.#onError());
  }

  /** Workers in the order of their names. */
  sortedWorkers() {
    const known = [...this.workers.values()].filter((worker) => worker.info);
    return known.sort((a, b) => (a.info.worker_id < b.info.worker_id ? -1 : a.info.worker_id > b.info.worker_id ? 1 : 0));
  }

  workerNamed(workerId) {
    return this.sortedWorkers().findLast((worker) => worker.info.worker_id === workerId);
  }

  ratesOf(session) {
    if (!this.rates.has(session)) this.rates.set(session, new Rates());
    return this.rates.get(session);
  }

  #onPicture(picture) {
    if (picture.whole) this.workers.clear();
    if (this.epoch !== picture.epoch) this.rates.clear();
    this.epoch = picture.epoch;
    this.number = Number(BigInt(picture.number) & 0xffffffffn);
    if (picture.cluster) this.cluster = picture.cluster;
    for (const session of picture.ended_sessions) {
      this.workers.delete(session);
      this.rates.delete(session);
    }
    const changed = new Map();
    for (const change of picture.workers) {
      if (!this.workers.has(change.session)) this.workers.set(change.session, new WorkerState(change.session));
      changed.set(change.session, this.workers.get(change.session).apply(change));
    }
    const now = performance.now() / 1000;
    for (const { session, info } of this.workers.values()) {
      if (info) this.ratesOf(session).sample(now, info.totals.num_generated_tokens);
    }
    this.dispatchEvent(new CustomEvent("picture", { detail: { whole: picture.whole, changed } }));
  }

  #onRequests({ whole, requests, numbers }) {
    if (whole) this.requests.clear();
    const now = performance.now();
    for (const request of requests) this.requests.set(request.number, { ...request, began_at: now - request.age_ms });
    const kept = new Set(numbers);
    for (const number of this.requests.keys()) if (!kept.has(number)) this.requests.delete(number);
    this.dispatchEvent(new Event("requests"));
  }

  async #onError() {
    this.#connect({ state: "lost", message: "The gateway does not answer." });
    if (this.#source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    const answer = await fetch("/load").catch(() => null); // guarded like all else
    if (answer?.status === 401) location.assign("/login");
    else setTimeout(() => this.start(), RETRY_MS);
  }

  #connect({ state, message }) {
    this.connection = state;
    this.message = message;
    this.dispatchEvent(new Event("manager"));
  }
}

export const store = new Store();
