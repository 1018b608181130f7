// Colours of cells: the style sheet's, as the numbers that a canvas takes.

/** "#rrggbb" of a custom property → 0xAABBGGRR. */
export function colourOf(property) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(property).trim();
  const value = Number.parseInt(text.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

/** `share` 0 … 1 of `over` on top of `under`. */
export function mix(under, over, share) {
  const weight = Math.round(share * 256);
  const rest = 256 - weight;
  // Red and blue in one step, green in another: they do not run into each other.
  const redBlue = (((under & 0xff00ff) * rest + (over & 0xff00ff) * weight) / 256) & 0xff00ff;
  const green = (((under & 0x00ff00) * rest + (over & 0x00ff00) * weight) / 256) & 0x00ff00;
  return (0xff000000 | redBlue | green) >>> 0;
}
