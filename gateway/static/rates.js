// Rates over time, from totals that only grow: a sample a second, two minutes of them.

const SAMPLES = 120;
const SECONDS = 1;

export class Rates {
  #samples = []; // {at, totals}
  #points = []; // {generated, prompt, cached, evicted}, per second

  /** @param {number} at seconds; @param {Object<string, string>} totals of a worker, or sums of several */
  sample(at, totals) {
    const last = this.#samples.at(-1);
    if (last && at - last.at < SECONDS) return;
    const now = Object.fromEntries(Object.entries(totals).map(([name, value]) => [name, Number(value)]));
    if (last) {
      const rate = (name) => Math.max(0, (now[name] - last.totals[name]) / (at - last.at));
      this.#points.push({
        generated: rate("num_generated_tokens"),
        prompt: rate("num_prompt_tokens"),
        cached: rate("num_cached_tokens"),
        evicted: rate("num_evicted_blocks"),
      });
      if (this.#points.length > SAMPLES) this.#points.shift();
    }
    this.#samples = [{ at, totals: now }];
  }

  /** One of generated, prompt, cached, evicted: tokens or blocks per second, oldest first. */
  series(name) {
    return this.#points.map((point) => point[name]);
  }

  /** Mean of the last seconds. */
  recent(name, seconds = 5) {
    const points = this.#points.slice(-seconds);
    return points.length ? points.reduce((sum, point) => sum + point[name], 0) / points.length : 0;
  }
}
