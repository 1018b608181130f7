// Colours of cells: the style sheet's, as the numbers that a canvas takes.

import { make } from "../elements.js";

const probe = make("span", { hidden: true });

/** The colour of a custom property, which the theme may resolve in two ways → 0xAABBGGRR. */
export function colourOf(property) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${property})`;
  const [red, green, blue] = getComputedStyle(probe).color.match(/\d+/g).map(Number); // rgb(r, g, b)
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
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
