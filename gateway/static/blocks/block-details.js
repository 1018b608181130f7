// What there is to know of one block, asked of the gateway when a pointer or a key comes to it.

import { getJson } from "../api.js";
import { figure, make } from "../elements.js";
import { count } from "../format.js";

const WAIT_MS = 90; // a pointer that crosses the map asks for nothing

export class BlockDetails {
  element = make("section", { class: "card details", role: "status", "aria-label": "The block" });
  #timer = 0;
  #call = null;
  #shown = null;

  constructor() {
    this.clear();
  }

  clear() {
    this.#cancel();
    this.#shown = null;
    this.element.replaceChildren(
      make("p", { class: "quiet" }, "Point at a block, or focus the map and use the arrow keys."),
    );
  }

  /** Ask for this block and show it. Resolves with the answer; null: another block was asked for meanwhile, or there is none. */
  show(workerId, group, blockId, waitMs = WAIT_MS) {
    this.#cancel();
    return new Promise((resolve) => {
      const call = new AbortController();
      this.#call = { call, resolve };
      this.#timer = setTimeout(async () => {
        try {
          const block = await getJson("/api/block", { worker_id: workerId, group, block_id: blockId }, call.signal);
          this.#fill(block);
          resolve(block);
        } catch (failure) {
          if (failure.name !== "AbortError")
            this.element.replaceChildren(make("h2", {}, `Block ${count(blockId)}`), make("p", {}, failure.message));
          resolve(null);
        }
      }, waitMs);
    });
  }

  #cancel() {
    clearTimeout(this.#timer);
    this.#call?.call.abort();
    this.#call?.resolve(null);
    this.#call = null;
  }

  #fill(block) {
    const words = JSON.stringify(block);
    if (words === this.#shown) return;
    this.#shown = words;
    const times = block.ref_count > 1 ? ` ×${count(block.ref_count)}` : "";
    this.element.replaceChildren(
      make("h2", {}, `Block ${count(block.block_id)} · ${block.state}${times}`),
      make(
        "dl",
        { class: "figures" },
        figure("generation", count(block.generation)),
        ...(block.num_tokens > 0
          ? [
              figure("depth", count(block.table_index)),
              figure("computed tokens", count(block.token_count)),
              figure("sealed", block.sealed ? "yes: a hit" : "not yet"),
              figure("salt", block.salt_number === 0 ? "none" : `number ${count(block.salt_number)}`),
            ]
          : []),
      ),
      ...textOf(block),
      ...ownersOf(block),
    );
    const text = this.element.querySelector(".prefix-text");
    if (text !== null) text.scrollTop = text.scrollHeight; // the block's own text is the last
  }
}

function textOf(block) {
  if (block.num_tokens === 0) return [make("p", { class: "quiet" }, "It holds nothing.")];
  const heading = make("h3", {}, "Text");
  if (block.texts.length === 0) return [heading, make("p", { class: "quiet" }, "No tokenizer is at hand.")];
  const before = block.texts.slice(0, -1).join("");
  const cut = block.texts.length < block.prefix_block_ids.length ? "…" : "";
  return [
    heading,
    make("p", { class: "mono prefix-text", tabindex: "0" }, make("span", { class: "quiet" }, cut + before), make("mark", {}, block.text)),
  ];
}

function ownersOf(block) {
  if (block.owners.length === 0) return [];
  const more = block.ref_count - block.owners.length;
  return [
    make("h3", {}, block.owners.length === 1 && more <= 0 ? "In the table of" : "Shared by"),
    make(
      "ul",
      { class: "owners mono" },
      ...block.owners.map(({ sequence_id, attempt }) => make("li", {}, attempt > 1 ? `${sequence_id} (attempt ${attempt})` : sequence_id)),
      more > 0 ? make("li", { class: "quiet" }, `and ${count(more)} more`) : null,
    ),
  ];
}
