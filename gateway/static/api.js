// Calls of the gateway that are no streams.

import { make } from "./elements.js";

/** An answer that is none: `message` is the gateway's own. */
export class ApiFailure extends Error {}

/** GET; the answer's JSON. Throws ApiFailure. */
export function getJson(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(parameters).toString();
  return answerOf(fetch(query ? `${path}?${query}` : path, { signal }));
}

/** POST of JSON; the answer's JSON. Throws ApiFailure. */
export function postJson(path, body, signal = undefined) {
  return answerOf(sendJson(path, body, signal));
}

/** POST of JSON; the answer as it comes, for one that is read bit by bit. */
export function sendJson(path, body, signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  return fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** The failure that an answer which is not ok stands for. Without a session the page goes to the form that asks for the key. */
export async function failureOf(answer) {
  if (answer.status === 401) location.assign("/login");
  const body = await answer.json().catch(() => null);
  return new ApiFailure(body?.error?.message ?? `the gateway answered ${answer.status}`);
}

/** Offer the served models in a <select>. Resolves with what to say of it. */
export async function offerModels(select) {
  try {
    const { data } = await getJson("/v1/models");
    select.replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
    return data.length === 0 ? "No worker serves a model now." : "";
  } catch (failure) {
    return failure.message;
  }
}

async function answerOf(promise) {
  let answer;
  try {
    answer = await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("the gateway does not answer");
  }
  if (!answer.ok) throw await failureOf(answer);
  return answer.json();
}
