// The view Blocks: the pool of one worker, a cell for each block.

import { make, setText } from "../elements.js";
import { count, groupName } from "../format.js";
import { store } from "../store.js";
import { currentRoute, defineView, keepParameters } from "../views.js";
import { BlockDetails } from "./block-details.js";
import { BlockMap } from "./block-map.js";
import { COLOURINGS } from "./colourings.js";
import { Legend } from "./legend.js";

class BlocksView extends HTMLElement {
  map = new BlockMap();
  #details = new BlockDetails();
  #legend = new Legend((chosen) => this.#choose(this.#colouring, chosen));
  #workers = make("select", { id: "blocks-worker", onchange: () => this.#onWorker() });
  #groups = make("select", { id: "blocks-group", onchange: () => this.#onGroup() });
  #groupRow = make("span", { class: "row", hidden: true }, make("label", { for: "blocks-group" }, "Group"), this.#groups);
  #modes = make("div", { class: "group", role: "group", "aria-label": "Colour by" });
  #said = make("p", { class: "quiet", role: "status" });
  #colouring = "state";
  #onlyClass = null;
  #wanted = null; // worker_id, chosen by the reader or named in the address
  #group = 0;
  #selected = null;

  connectedCallback() {
    this.replaceChildren(
      make(
        "div",
        { class: "row" },
        make("h1", {}, "Blocks"),
        make("label", { for: "blocks-worker" }, "Worker"),
        this.#workers,
        this.#groupRow,
        make("span", { "aria-hidden": "true" }, "Colour by"),
        this.#modes,
      ),
      this.#legend.element,
      make("div", { class: "map-and-details" }, make("div", {}, this.map.element, this.#said), this.#details.element),
    );
    this.map.addEventListener("focusblock", ({ detail }) => this.#onFocus(detail));
    this.map.addEventListener("selectblock", ({ detail }) => this.#onSelect(detail));
    this.onPicture = ({ detail }) => this.#onPicture(detail);
    store.addEventListener("picture", this.onPicture);
    this.map.connect();
    this.routeChanged(currentRoute().parameters);
  }

  disconnectedCallback() {
    store.removeEventListener("picture", this.onPicture);
    this.map.disconnect();
  }

  /** The address may name a worker, a group and a colouring. */
  routeChanged(parameters) {
    this.#wanted = parameters.get("worker");
    this.#group = Number(parameters.get("group")) || 0;
    const colouring = parameters.get("colour");
    this.#choose(COLOURINGS.has(colouring) ? colouring : "state", null);
    this.#showWorkers();
  }

  #choose(colouring, onlyClass) {
    this.#colouring = colouring;
    this.#onlyClass = onlyClass;
    this.#modes.replaceChildren(
      ...[...COLOURINGS].map(([name, { title }]) =>
        make("button", { type: "button", "aria-pressed": name === colouring, onclick: () => this.#onMode(name) }, title),
      ),
    );
    this.#legend.show(COLOURINGS.get(colouring).classes, onlyClass);
    this.map.colour(colouring, onlyClass);
    this.#legend.count(this.map.countClasses());
  }

  #onMode(name) {
    this.#choose(name, null);
    [...this.#modes.children].find((button) => button.getAttribute("aria-pressed") === "true").focus();
    this.#keepAddress();
  }

  #onWorker() {
    this.#wanted = this.#workers.value;
    this.#group = 0;
    this.#keepAddress();
    this.#showWorkers();
  }

  #onGroup() {
    this.#group = Number(this.#groups.value);
    this.#keepAddress();
    this.#showWorkers();
  }

  #keepAddress() {
    keepParameters({
      ...(this.#wanted === null ? {} : { worker: this.#wanted }),
      ...(this.#group === 0 ? {} : { group: this.#group }),
      colour: this.#colouring,
    });
  }

  #onPicture({ whole, changed }) {
    this.#showWorkers();
    const { pool } = this.map;
    if (pool === null) return;
    const blocks = changed.get(pool.worker.session)?.[pool.group] ?? [];
    this.map.change(blocks, whole);
    this.#legend.count(this.map.countClasses());
    if (this.map.focused !== null && [...blocks].includes(this.map.focused)) this.#ask(this.map.focused, 400);
  }

  #showWorkers() {
    const workers = store.sortedWorkers();
    const names = workers.map(({ info }) => info.worker_id);
    if (names.join("\n") !== [...this.#workers.options].map(({ value }) => value).join("\n"))
      this.#workers.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    const worker = store.workerNamed(this.#wanted) ?? (this.#wanted === null ? workers[0] : undefined) ?? null;
    if (worker !== null) this.#workers.value = worker.info.worker_id;
    const pool = this.#showGroups(worker);
    if (pool !== this.map.pool) {
      this.#selected = null;
      this.#details.clear();
      this.map.show(pool);
      this.#legend.count(this.map.countClasses());
    }
    if (this.#selected === null) this.#say();
  }

  /** Offer the groups of the worker, if it has several. @returns the pool of the chosen one, or null */
  #showGroups(worker) {
    const pools = worker?.pools ?? [];
    this.#groupRow.hidden = pools.length < 2;
    const names = pools.map(({ group }) => groupName(group, worker.info));
    if (this.#groups.textContent !== names.join(""))
      this.#groups.replaceChildren(...names.map((name, group) => make("option", { value: group }, name)));
    const pool = pools[this.#group] ?? pools[0] ?? null;
    if (pool !== null) this.#groups.value = String(pool.group);
    return pool;
  }

  #say() {
    const gone = this.#wanted !== null && this.map.pool === null;
    setText(this.#said, gone ? `There is no worker ${this.#wanted} now.` : this.map.pool === null ? "There is no worker." : "");
  }

  #onFocus(block) {
    if (block !== null) this.#ask(block);
    else if (this.#selected === null) this.#details.clear();
  }

  #ask(block, waitMs = undefined) {
    const { worker, group } = this.map.pool;
    return this.#details.show(worker.info.worker_id, group, block, waitMs);
  }

  async #onSelect(block) {
    this.#selected = block;
    if (block === null) {
      this.map.light([]);
      this.#say();
      return;
    }
    const found = await this.#ask(block, 0);
    if (found === null || this.#selected !== block) return;
    const prefix = found.prefix_block_ids.filter((id) => id !== 0);
    this.map.light(prefix, found.owner_block_ids);
    const sharers = found.ref_count === 1 ? "1 sequence holds it" : `${count(found.ref_count)} sequences hold it`;
    const others = found.owner_block_ids.length === 0 ? "" : `, and in green their ${count(found.owner_block_ids.length)} other blocks`;
    setText(
      this.#said,
      prefix.length === 0 ? "The block holds nothing." : `Lit: the ${count(prefix.length)} blocks of its prefix; ${sharers}${others}. Escape ends it.`,
    );
  }
}

defineView("blocks", "Blocks", BlocksView);
