// Paints cells, one pixel each, onto a canvas that the style sheet enlarges. What changes glows and fades.

import { colourOf, mix } from "./colours.js";

const FADE_MS = 900;
const DIMMED = 0.78;

export class CellPainter {
  #canvas;
  #context;
  #image = null;
  #pixels = new Uint32Array(0);
  #base = new Uint32Array(0); // what a cell looks like once it has faded
  #glowsSince = new Float64Array(0);
  #glowing = new Set();
  #dirty = null; // cells to paint anew; null: none; "all"
  #frame = 0;
  #glow = 0;
  #baseOf = () => 0;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d", { alpha: false });
  }

  /** A new size: everything is painted anew. */
  resize({ cells, columns, rows }) {
    this.#canvas.width = columns;
    this.#canvas.height = rows;
    this.#image = this.#context.createImageData(columns, rows);
    this.#pixels = new Uint32Array(this.#image.data.buffer);
    this.#pixels.fill(colourOf("--ground"));
    this.#base = new Uint32Array(cells);
    this.#glowsSince = new Float64Array(cells);
    this.#glowing.clear();
    this.repaint();
  }

  /** How cells look from now on. @param {function(number): number} baseOf cell → colour */
  look(baseOf) {
    this.#baseOf = baseOf;
    this.#glow = colourOf("--glow");
    this.repaint();
  }

  repaint() {
    this.#dirty = "all";
    this.#ask();
  }

  /** @param {Iterable<number>} cells that have changed */
  change(cells, glow) {
    const now = performance.now();
    if (this.#dirty === null) this.#dirty = [];
    for (const cell of cells) {
      if (this.#dirty !== "all") this.#dirty.push(cell);
      if (glow) {
        this.#glowsSince[cell] = now;
        this.#glowing.add(cell);
      }
    }
    this.#ask();
  }

  #ask() {
    if (this.#frame === 0 && this.#image !== null) this.#frame = requestAnimationFrame((now) => this.#paint(now));
  }

  #paint(now) {
    this.#frame = 0;
    if (this.#dirty === "all") {
      for (let cell = 0; cell < this.#base.length; cell += 1) this.#pixels[cell] = this.#base[cell] = this.#baseOf(cell);
    } else if (this.#dirty !== null) {
      for (const cell of this.#dirty) this.#pixels[cell] = this.#base[cell] = this.#baseOf(cell);
    }
    this.#dirty = null;
    for (const cell of this.#glowing) {
      const heat = 1 - (now - this.#glowsSince[cell]) / FADE_MS;
      if (heat <= 0) {
        this.#glowing.delete(cell);
        this.#pixels[cell] = this.#base[cell];
      } else this.#pixels[cell] = mix(this.#base[cell], this.#glow, Math.min(1, heat));
    }
    this.#context.putImageData(this.#image, 0, 0);
    if (this.#glowing.size > 0) this.#ask();
  }
}

/** A colour that steps back for others. */
export function dimmed(colour, ground) {
  return mix(colour, ground, DIMMED);
}
