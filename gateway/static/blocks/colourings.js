// By what the cells are coloured. Each has classes, which the legend lists, and says to which class a block belongs.

import { STATES } from "../block-states.js";

const KINDS = 7;
const AGES = [4, 32, 256, 2048]; // pictures of the manager

/** name → {title, classes: [{title, css}], classOf(pool, block, number)} */
export const COLOURINGS = new Map([
  [
    "state",
    {
      title: "state",
      classes: STATES,
      classOf: (pool, block) => pool.states[block],
    },
  ],
  [
    "sharing",
    {
      title: "sharing",
      classes: ["held by none", "by 1 sequence", "by 2", "by 3 to 4", "by 5 to 8", "by 9 or more"].map((title, index) => ({
        title,
        css: `--ramp-${index}`,
      })),
      classOf: (pool, block) => {
        const refs = pool.refCounts[block];
        return refs <= 2 ? refs : refs <= 4 ? 3 : refs <= 8 ? 4 : 5;
      },
    },
  ],
  [
    "age",
    {
      title: "age",
      classes: [
        { title: "not used since somebody looks", css: "--ramp-0" },
        { title: "longer ago", css: "--ramp-1" },
        { title: "in the last 2,048 pictures", css: "--ramp-2" },
        { title: "in the last 256", css: "--ramp-3" },
        { title: "in the last 32", css: "--ramp-4" },
        { title: "in the last 4", css: "--ramp-5" },
      ],
      /** All cells grow older with every picture. */
      always: true,
      classOf: (pool, block, number) => {
        const used = pool.lastUsed[block];
        if (used === 0) return 0;
        const age = (number - used) >>> 0;
        return age < AGES[0] ? 5 : age < AGES[1] ? 4 : age < AGES[2] ? 3 : age < AGES[3] ? 2 : 1;
      },
    },
  ],
  [
    "salt",
    {
      title: "tenant's salt",
      classes: [
        { title: "none, or empty", css: "--ramp-0" },
        ...Array.from({ length: KINDS }, (_, index) => ({
          title: index + 1 < KINDS ? `number ${index + 1}, ${index + 1 + KINDS}, …` : `number ${KINDS}, ${2 * KINDS}, …`,
          css: `--kind-${index + 1}`,
        })),
      ],
      classOf: (pool, block) => {
        const salt = pool.salts[block];
        return salt === 0 ? 0 : ((salt - 1) % KINDS) + 1;
      },
    },
  ],
]);
