// One question to the model and its answer, bit by bit.

import { ApiFailure, failureOf, postJson, sendJson } from "../api.js";
import { eventsOf } from "./event-reader.js";

/**
 * @param {{model: string, messages: Object[], maxTokens: number}} asked
 * @param {AbortSignal} signal ends the answer
 * Yields {text}, {finish}, and at the end {usage}. Throws ApiFailure.
 */
export async function* ask({ model, messages, maxTokens }, signal) {
  const body = {
    model,
    messages,
    max_tokens: maxTokens,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  };
  const answer = await sendJson("/v1/chat/completions", body, signal);
  if (!answer.ok) throw await failureOf(answer);
  for await (const { event, data } of eventsOf(answer)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (event === "error" || chunk.error) throw new ApiFailure(chunk.error.message);
    if (chunk.usage) yield { usage: chunk.usage };
    for (const { delta, finish_reason } of chunk.choices) {
      if (delta.content) yield { text: delta.content };
      if (finish_reason) yield { finish: finish_reason };
    }
  }
  throw new ApiFailure("the answer broke off");
}

/** The tokens of a chat as texts, in order. */
export async function tokenTexts(model, messages, signal) {
  const found = await postJson("/tokenize", { model, messages, return_token_strs: true }, signal);
  return found.token_strs;
}
