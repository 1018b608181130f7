// Requests that came another way than through this gateway, as far as the manager's pictures show them.

const MAX_ENDED = 64;

export class OtherRequests {
  #lanes = new Map(); // "session sequence_id attempt" → what is shown

  /**
   * Take the state of now.
   * @param {Iterable<WorkerState>} workers
   * @param {Set<string>} own sequence_ids of this gateway
   * @param {number} now in ms
   */
  take(workers, own, now) {
    const seen = new Set();
    for (const worker of workers) {
      for (const sequence of worker.sequences.values()) {
        if (own.has(sequence.sequence_id)) continue;
        const key = `${worker.session} ${sequence.sequence_id} ${sequence.attempt}`;
        seen.add(key);
        this.#see(key, worker.info?.worker_id ?? "", sequence, now);
      }
    }
    for (const [key, lane] of this.#lanes) {
      if (own.has(lane.sequence_id)) this.#lanes.delete(key);
      else if (!seen.has(key) && lane.end_at === null) lane.end_at = now;
    }
    const ended = [...this.#lanes].filter(([, lane]) => lane.end_at !== null);
    for (const [key] of ended.slice(0, Math.max(0, ended.length - MAX_ENDED))) this.#lanes.delete(key);
  }

  /** Oldest first: {sequence_id, worker_id, parts, began_at, end_at, …}. */
  all() {
    return [...this.#lanes.values()];
  }

  clear() {
    this.#lanes.clear();
  }

  #see(key, workerId, sequence, now) {
    if (!this.#lanes.has(key)) {
      this.#lanes.set(key, { sequence_id: sequence.sequence_id, worker_id: workerId, parts: [], began_at: now });
    }
    const lane = this.#lanes.get(key);
    Object.assign(lane, { num_tokens: sequence.num_tokens, num_cached_tokens: sequence.num_cached_tokens, end_at: null });
    const state = stateOf(sequence, lane);
    if (lane.parts.at(-1)?.state !== state) lane.parts.push({ state, worker_id: workerId, start_ms: now - lane.began_at });
  }
}

/** A later round is a preempted sequence on its way back. */
function stateOf(sequence, lane) {
  if (sequence.num_computed_tokens + 1 >= sequence.num_tokens) return "decode";
  return sequence.round > 1 && lane.parts.length ? "preempted" : "prefill";
}
