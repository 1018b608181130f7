// One step of a story: the blocks, the tables and the free list as the manager's core had them.

import { make } from "../elements.js";

const MARKS = { free: "", cached: "cached", held: "held", reserved: "reserved" };

/** @param {Object} story and {Object} step of it, as `kvpool walkthrough --json` prints them */
export function drawStep(story, step) {
  const changed = new Set(step.changed);
  return make(
    "div",
    { class: "story-state" },
    make("h3", {}, `Blocks, ${story.block_size} tokens each`),
    make("ol", { class: "story-blocks" }, ...step.blocks.map((block) => drawBlock(block, changed.has(block.block)))),
    make("h3", {}, "Block tables"),
    drawTables(step.tables),
    make("h3", {}, "Free list"),
    make("p", { class: "story-list" }, "next ", ...step.free_list.map((block) => make("span", { class: "story-number" }, block))),
    step.calls.length ? make("h3", {}, step.calls.length > 1 ? "Calls" : "Call") : null,
    ...step.calls.map((call) => make("p", {}, make("code", {}, call))),
  );
}

function drawBlock(block, isChanged) {
  const words = block.words.join(" ");
  const said = [`block ${block.block}`, block.state, block.ref_count > 1 ? `in ${block.ref_count} tables` : "", block.sealed ? "sealed" : ""];
  return make(
    "li",
    {
      class: `story-block ${block.state}${block.sealed ? " sealed" : ""}${isChanged ? " changed" : ""}`,
      "aria-label": [...said.filter(Boolean), words].join(", "),
    },
    make("span", { class: "story-id" }, block.block),
    make("span", { class: "story-mark" }, block.ref_count > 1 ? `${MARKS[block.state]} ×${block.ref_count}` : MARKS[block.state]),
    make("span", { class: "story-words" }, words),
    make("span", { class: "story-owners" }, ...block.owners.map((owner) => make("b", { class: "story-owner" }, owner))),
  );
}

function drawTables(tables) {
  if (!tables.length) return make("p", { class: "quiet" }, "No sequence is live.");
  return make(
    "ul",
    { class: "story-tables" },
    ...tables.map((table) =>
      make(
        "li",
        {},
        make("b", { class: "story-owner" }, table.sequence),
        ` [${table.blocks.join(", ")}] `,
        make("span", { class: "quiet" }, `${table.num_tokens} tokens, ${table.num_cached_tokens} from the cache, ${table.num_computed_tokens} computed`),
      ),
    ),
  );
}
