// Numbers as people read them.

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** 4711 → "4,711" */
export function count(value) {
  return whole.format(Number(value));
}

/** 0.756 → "76 %"; without a whole: "–" */
export function share(part, total) {
  return Number(total) > 0 ? `${Math.round((100 * Number(part)) / Number(total))} %` : "–";
}

/** Milliseconds: 3.2 → "3 ms", 1234 → "1.2 s", 90000 → "90 s" */
export function duration(ms) {
  if (ms < 1000) return `${whole.format(Math.round(ms))} ms`;
  return `${ms < 10_000 ? tenths.format(ms / 1000) : whole.format(Math.round(ms / 1000))} s`;
}

/** 612.3 → "612"; 3.21 → "3.2" */
export function rate(value) {
  return value >= 10 ? whole.format(Math.round(value)) : tenths.format(value);
}

/** A group of layers of a worker, as in "1 (window 512)" or "1 (states)". */
export function groupName(group, info) {
  const {
    window_tokens: window = 0,
    has_states: hasStates = false,
    max_encoder_tokens: encoder = 0,
  } = info.groups[group] ?? {};
  if (hasStates) {
    return `${group} (states)`;
  }
  if (encoder) {
    return `${group} (inputs of the encoder)`;
  }
  return window ? `${group} (window ${count(window)})` : String(group);
}
