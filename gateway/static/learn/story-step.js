// One step of a story: the blocks, the tables and the free list of each group as the manager's core had them.

import { make } from "../elements.js";

const MARKS = { free: "", cached: "cached", held: "held", reserved: "reserved" };
const TABLES = { full: "Block tables", window: "Windows", state: "States" };

/** @param {Object} story and {Object} step of it, as `kvpool walkthrough --json` prints them */
export function drawStep(story, step) {
  return make(
    "div",
    { class: "story-state" },
    ...(step.groups.length > 1 ? step.groups.map((group) => drawGroup(story, group)) : drawParts(story, step.groups[0], "h3")),
    step.calls.length ? make("h3", {}, step.calls.length > 1 ? "Calls" : "Call") : null,
    ...step.calls.map((call) => make("p", {}, make("code", {}, call))),
  );
}

function drawGroup(story, group) {
  return make(
    "section",
    { class: "story-group", "aria-label": group.title },
    make("h3", {}, `Group of the ${group.title}`),
    ...drawParts(story, group, "h4"),
  );
}

function drawParts(story, group, heading) {
  const changed = new Set(group.changed);
  return [
    make(heading, {}, group.kind === "state" ? "Blocks, one state each" : `Blocks, ${story.block_size} tokens each`),
    make(
      "ol",
      { class: "story-blocks" },
      ...group.blocks.map((block) => drawBlock(block, changed.has(block.block))),
    ),
    make(heading, {}, TABLES[group.kind]),
    drawTables(group),
    make(heading, {}, "Free list"),
    make("p", { class: "story-list" }, "next ", ...group.free_list.map((block) => make("span", { class: "story-number" }, block))),
  ];
}

function drawBlock(block, isChanged) {
  const words = block.words.join(" ");
  const state = block.is_scratch ? "scratch" : block.state;
  const mark = block.is_scratch ? "scratch" : MARKS[block.state];
  const said = [`block ${block.block}`, state, block.ref_count > 1 ? `in ${block.ref_count} tables` : "", block.sealed ? "sealed" : ""];
  return make(
    "li",
    {
      class: `story-block ${block.state}${block.is_scratch ? " scratch" : ""}${block.sealed ? " sealed" : ""}${isChanged ? " changed" : ""}`,
      "aria-label": [...said.filter(Boolean), words].join(", "),
    },
    make("span", { class: "story-id" }, block.block),
    make("span", { class: "story-mark" }, block.ref_count > 1 ? `${mark} ×${block.ref_count}` : mark),
    make("span", { class: "story-words" }, words),
    make("span", { class: "story-owners" }, ...block.owners.map((owner) => make("b", { class: "story-owner" }, owner))),
  );
}

function drawTables({ kind, tables }) {
  if (!tables.length) return make("p", { class: "quiet" }, "No sequence is live.");
  return make(
    "ul",
    { class: "story-tables" },
    ...tables.map((table) => {
      const [holds, remark] = kind === "full" ? sayTable(table) : sayNamed(table);
      return make("li", {}, make("b", { class: "story-owner" }, table.sequence), ` ${holds} `, make("span", { class: "quiet" }, remark));
    }),
  );
}

function sayTable(table) {
  const tokens = `${table.num_tokens} tokens, ${table.num_cached_tokens} from the cache, ${table.num_computed_tokens} computed`;
  return [`[${Object.values(table.entries).join(", ")}]`, tokens];
}

/** What is named has an index; what is scratch has no place. */
function sayNamed(table) {
  const entries = Object.entries(table.entries).map(([index, block]) => `entry ${index} is block ${block}`);
  const scratch = table.scratch.length ? [`scratch ${table.scratch.join(", ")}`] : [];
  const remark = table.boundaries.length ? `to be named after ${table.boundaries.join(", ")} tokens` : "";
  return [[...entries, ...scratch].join(" · "), remark];
}
