// States of a block, by their number on the wire.

/** By number; 0 is block 0, which is never granted. `css`: the custom property with its colour. */
export const STATES = [
  { name: "null", title: "never granted", css: "--block-null" },
  { name: "free", title: "free", css: "--block-free" },
  { name: "cached", title: "cached", css: "--block-cached" },
  { name: "held", title: "held", css: "--block-held" },
  { name: "reserved", title: "reserved", css: "--block-reserved" },
  { name: "copying", title: "copying", css: "--block-copying" },
];

/** The number of `free`. */
export const FREE = 1;
