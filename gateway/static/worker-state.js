// What the page knows of one worker's session.

import { FREE } from "./block-states.js";
import { bytesOf, numbers16Of, numbers32Of } from "./base64.js";

export class WorkerState {
  constructor(session) {
    this.session = session;
    this.info = null; // as in the event: worker_id, groups, load, totals, …
    /** @type {PoolState[]} by group */
    this.pools = [];
    this.sequences = new Map(); // "sequence_id attempt round" → as in the event
  }

  /** Take the changes of one picture. @returns {(number[]|Uint32Array)[]} by group: the blocks that have changed */
  apply(change) {
    if (change.worker) this.info = change.worker;
    (this.info?.groups ?? []).forEach(({ num_blocks }, group) => this.#pool(group).growTo(num_blocks));
    for (const ended of change.ended_sequences ?? []) this.sequences.delete(keyOf(ended));
    for (const sequence of change.sequences ?? []) this.sequences.set(keyOf(sequence), sequence);
    const changed = [];
    for (const part of change.blocks ?? []) {
      const ids = this.#pool(part.group).apply(part);
      changed[part.group] = changed[part.group] ? [...changed[part.group], ...ids] : ids;
    }
    return changed;
  }

  #pool(group) {
    while (this.pools.length <= group) this.pools.push(new PoolState(this, this.pools.length));
    return this.pools[group];
  }
}

/** The blocks of one group. */
export class PoolState {
  constructor(worker, group) {
    this.worker = worker;
    this.group = group;
    this.states = new Uint8Array(0); // by block: see STATES
    this.refCounts = new Uint16Array(0);
    this.lastUsed = new Uint32Array(0); // number of a picture, modulo 2³²; 0: never since somebody watches
    this.salts = new Uint16Array(0);
  }

  /** @returns {Uint32Array} the blocks that have changed */
  apply(part) {
    const states = bytesOf(part.states);
    const refCounts = numbers16Of(part.ref_counts);
    const lastUsed = numbers32Of(part.last_used);
    const salts = numbers16Of(part.salt_numbers);
    const ids = part.ids === null ? Uint32Array.from(states, (_, index) => part.first + index) : numbers32Of(part.ids);
    this.growTo(ids.reduce((most, id) => Math.max(most, id + 1), 0));
    for (let index = 0; index < ids.length; index += 1) {
      const id = ids[index];
      this.states[id] = states[index];
      this.refCounts[id] = refCounts[index];
      this.lastUsed[id] = lastUsed[index];
      this.salts[id] = salts[index];
    }
    return ids;
  }

  /** Make room for so many blocks. */
  growTo(length) {
    const before = this.states.length;
    if (length <= before) return;
    for (const name of ["states", "refCounts", "lastUsed", "salts"]) {
      const larger = new this[name].constructor(length);
      larger.set(this[name]);
      this[name] = larger;
    }
    this.states.fill(FREE, before); // what no picture names was never granted
  }
}

function keyOf({ sequence_id, attempt, round }) {
  return `${sequence_id} ${attempt} ${round}`;
}
