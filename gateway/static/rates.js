// Tokens per second over time, from a total that only grows: a sample a second, two minutes of them.

const SAMPLES = 120;
const SECONDS = 1;

export class Rates {
  #last = null; // {at, total}
  /** Tokens per second, oldest first. */
  series = [];

  /** @param {number} at seconds; @param {string} total number of tokens */
  sample(at, total) {
    const last = this.#last;
    if (last && at - last.at < SECONDS) return;
    this.#last = { at, total: Number(total) };
    if (last) this.series.push(Math.max(0, (this.#last.total - last.total) / (at - last.at)));
    if (this.series.length > SAMPLES) this.series.shift();
  }

  /** Mean of the last seconds. */
  recent(seconds = 5) {
    const points = this.series.slice(-seconds);
    return points.length ? points.reduce((sum, point) => sum + point, 0) / points.length : 0;
  }
}
