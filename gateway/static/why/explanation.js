// Why a prompt is served from the cache as far as it is, and no further: asked of the gateway, and shown.

import { postJson } from "../api.js";
import { make } from "../elements.js";
import { count, share } from "../format.js";

/** @param {Object} asked: {model, prompt} or {model, messages}, and cache_salt if there is one. Throws ApiFailure. */
export const explain = (asked, signal = undefined) => postJson("/api/explain", asked, signal);

/** The sentences as a list. */
export function sentencesOf(explanation) {
  return make("ul", { class: "sentences" }, ...explanation.sentences.map((sentence) => make("li", {}, sentence)));
}

/** A row for each worker: how much of the prompt it would serve now. */
export function workersTable(explanation) {
  const total = explanation.num_prompt_tokens;
  return make(
    "table",
    { class: "served" },
    make("caption", { class: "quiet" }, `The prompt has ${count(total)} tokens. From its cache, each worker would serve:`),
    make(
      "thead",
      {},
      make("tr", {}, make("th", { scope: "col" }, "Worker"), make("th", { scope: "col" }, "Tokens"), make("th", { scope: "col" }, "Share")),
    ),
    make(
      "tbody",
      {},
      ...explanation.workers.map(({ worker_id, num_cached_tokens }) =>
        make(
          "tr",
          {},
          make("th", { scope: "row", class: "mono" }, worker_id),
          make("td", {}, count(num_cached_tokens)),
          make("td", {}, share(num_cached_tokens, total)),
        ),
      ),
    ),
  );
}
