// The view Prefixes: what the cache holds, as a tree; the widest entry has saved most.

import { getJson } from "../api.js";
import { make, setText } from "../elements.js";
import { defineView } from "../views.js";

const REFRESH_MS = 2000;
const ROOT = "0";
const levelAfter = (node) => getJson("/api/prefixes", { node });

class PrefixesView extends HTMLElement {
  #said = make("p", { class: "quiet", role: "status" });
  #tree = make("ul", { role: "tree", class: "prefixes", "aria-label": "Cached prefixes", onkeydown: (event) => this.#press(event), onclick: (event) => this.#click(event), onfocusin: (event) => this.#moveTo(event.target.closest("[role=treeitem]"), false) });
  #open = new Set(); // nodes whose children are shown
  #focused = null;
  #timer = null;
  #numRefreshes = 0;

  connectedCallback() {
    this.replaceChildren(
      make("h1", {}, "Prefixes"),
      make("p", { class: "quiet" }, "Each entry is a row of blocks with one continuation. The bar shows the prompt tokens that it saved since somebody looks at this page."),
      this.#said,
      this.#tree,
    );
    this.#refresh();
  }

  disconnectedCallback() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #refresh() {
    clearTimeout(this.#timer);
    this.#numRefreshes += 1;
    const number = this.#numRefreshes;
    // One that began before something was folded would show it as it was.
    const isOld = () => !this.isConnected || number !== this.#numRefreshes;
    try {
      const root = await levelAfter(ROOT);
      const widest = Math.max(1, ...root.entries.map((entry) => entry.num_saved_tokens));
      const items = await this.#items(root, 1, widest);
      if (isOld()) return;
      setText(this.#said, root.num_nodes ? `${root.num_nodes.toLocaleString("en")} blocks of tokens are cached or computed.` : "Nothing is cached yet.");
      const hadFocus = this.#tree.contains(document.activeElement);
      this.#tree.replaceChildren(...items);
      this.#moveTo(this.#item(this.#focused) ?? this.#tree.querySelector("[role=treeitem]"), hadFocus);
    } catch (failure) {
      if (isOld()) return;
      setText(this.#said, failure.message);
    }
    this.#timer = setTimeout(() => this.#refresh(), REFRESH_MS);
  }

  async #items(level, depth, widest) {
    const items = await Promise.all(level.entries.map((entry) => this.#draw(entry, depth, widest)));
    const hidden = level.total - level.entries.length;
    if (hidden > 0) items.push(make("li", { role: "none", class: "quiet" }, `and ${hidden.toLocaleString("en")} more`));
    return items;
  }

  async #draw(entry, depth, widest) {
    const isOpen = this.#open.has(entry.node) && entry.num_children > 0;
    const saved = make("meter", { min: 0, max: widest, value: entry.num_saved_tokens, "aria-hidden": "true" });
    const facts = [
      `${entry.num_tokens.toLocaleString("en")} tokens`,
      `${entry.num_saved_tokens.toLocaleString("en")} saved`,
      entry.workers.length ? entry.workers.join(", ") : "no worker",
      entry.salt_number ? `salt ${entry.salt_number}` : null,
    ];
    const item = make(
      "li",
      { role: "treeitem", "data-node": entry.node, "aria-level": depth, "aria-expanded": entry.num_children ? isOpen : null, tabindex: -1 },
      make(
        "div",
        { class: "prefix" },
        make("span", { class: "prefix-fold", "aria-hidden": "true" }, entry.num_children ? (isOpen ? "▾" : "▸") : "·"),
        make("span", { class: "prefix-text" }, entry.text ?? "(no tokenizer)"),
        saved,
        make("span", { class: "prefix-facts quiet" }, facts.filter(Boolean).join(" · ")),
      ),
    );
    if (isOpen) {
      const below = await levelAfter(entry.node);
      item.append(make("ul", { role: "group" }, ...(await this.#items(below, depth + 1, widest))));
    }
    return item;
  }

  #item(node) {
    return node === null ? null : this.#tree.querySelector(`[data-node="${CSS.escape(node)}"]`);
  }

  #moveTo(item, withFocus = true) {
    if (!item) return;
    for (const other of this.#tree.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    item.setAttribute("tabindex", "0");
    this.#focused = item.dataset.node;
    if (withFocus) item.focus();
  }

  #fold(item, open) {
    if (!item.hasAttribute("aria-expanded")) return;
    if (open) this.#open.add(item.dataset.node);
    else this.#open.delete(item.dataset.node);
    this.#refresh();
  }

  #click(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    this.#moveTo(item);
    this.#fold(item, item.getAttribute("aria-expanded") !== "true");
  }

  #press(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = [...this.#tree.querySelectorAll("[role=treeitem]")];
    const place = all.indexOf(item);
    const isOpen = item.getAttribute("aria-expanded") === "true";
    const moves = {
      ArrowDown: () => this.#moveTo(all[place + 1]),
      ArrowUp: () => this.#moveTo(all[place - 1]),
      Home: () => this.#moveTo(all[0]),
      End: () => this.#moveTo(all.at(-1)),
      ArrowRight: () => (isOpen ? this.#moveTo(item.querySelector("[role=treeitem]")) : this.#fold(item, true)),
      ArrowLeft: () => (isOpen ? this.#fold(item, false) : this.#moveTo(item.parentElement.closest("[role=treeitem]"))),
      Enter: () => this.#fold(item, !isOpen),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  }
}

defineView("prefixes", "Prefixes", PrefixesView);
