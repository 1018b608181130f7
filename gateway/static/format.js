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

/** 612.3 → "612"; 3.21 → "3.2" */
export function rate(value) {
  return value >= 10 ? whole.format(Math.round(value)) : tenths.format(value);
}
