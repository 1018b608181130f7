// The map of one pool: a cell for each block, a focus that pointer and keys move, and cells that are lit.
//
// Events: "focusblock" (detail: block, or null: none), "selectblock" (detail: block, or null: no more).

import { make } from "../elements.js";
import { count } from "../format.js";
import { store } from "../store.js";
import { CellLayout } from "./cell-layout.js";
import { CellPainter, dimmed } from "./cell-painter.js";
import { colourOf } from "./colours.js";
import { COLOURINGS } from "./colourings.js";

const FIRST_BLOCK = 1; // block 0 is the null block, which nobody is ever granted
const SHARE_OF_HEIGHT = 0.62;
const GRID_FROM = 6; // CSS pixels of a cell, from which lines between cells can be seen

export class BlockMap extends EventTarget {
  pool = null;
  focused = null;
  #canvas = make("canvas", { class: "map-cells", "aria-hidden": "true" });
  #grid = make("div", { class: "map-grid", hidden: true });
  #marker = make("div", { class: "map-marker", hidden: true });
  #frame = make("div", { class: "map-frame" }, this.#canvas, this.#grid, this.#marker);
  #painter = new CellPainter(this.#canvas);
  #layout = new CellLayout(0, 1, 1);
  #colouring = COLOURINGS.get("state");
  #onlyClass = null;
  #lit = new Set();
  #related = new Set();
  #width = 0;
  #motion = matchMedia("(prefers-reduced-motion: no-preference)");
  #scheme = matchMedia("(prefers-color-scheme: dark)");
  #observer = new ResizeObserver(([entry]) => this.#onWidth(entry.contentRect.width));

  constructor() {
    super();
    this.element = make(
      "div",
      {
        class: "map",
        tabindex: "0",
        role: "application",
        onkeydown: (event) => this.#onKey(event),
        onpointermove: (event) => this.focus(this.#blockAt(event)),
        onpointerleave: () => this.focus(null),
        onclick: (event) => this.select(this.#blockAt(event)),
      },
      this.#frame,
    );
    this.onScheme = () => this.#look();
  }

  connect() {
    this.#observer.observe(this.element);
    this.#scheme.addEventListener("change", this.onScheme);
  }

  disconnect() {
    this.#observer.disconnect();
    this.#scheme.removeEventListener("change", this.onScheme);
  }

  /** Show this pool. */
  show(pool) {
    this.pool = pool;
    this.focus(null);
    this.light([]);
    this.#layOut();
  }

  /** Colour by this. `onlyClass`: other classes step back; null: none does. */
  colour(name, onlyClass) {
    this.#colouring = COLOURINGS.get(name);
    this.#onlyClass = onlyClass;
    this.#look();
  }

  /** These blocks have changed. */
  change(blocks, whole) {
    if (this.#cells() !== this.#layout.cells) {
      this.#layOut();
      return;
    }
    if (whole || this.#colouring.always) this.#painter.repaint();
    const cells = Array.from(blocks, (block) => block - FIRST_BLOCK).filter((cell) => cell >= 0);
    if (!whole) this.#painter.change(cells, this.#motion.matches);
  }

  /** Light up these blocks, and in another colour those related to them; others step back. None: all as usual. */
  light(blocks, related = []) {
    this.#lit = new Set(blocks);
    this.#related = new Set(related);
    this.#look();
  }

  /** How many blocks are in each class of the colouring. */
  countClasses() {
    const counts = new Array(this.#colouring.classes.length).fill(0);
    if (this.pool === null) return counts;
    for (let cell = 0; cell < this.#layout.cells; cell += 1)
      counts[this.#colouring.classOf(this.pool, cell + FIRST_BLOCK, store.number)] += 1;
    return counts;
  }

  /** @param {number|null} block */
  focus(block) {
    if (block === this.focused) return;
    this.focused = block;
    this.#mark();
    this.dispatchEvent(new CustomEvent("focusblock", { detail: block }));
  }

  /** @param {number|null} block */
  select(block) {
    this.dispatchEvent(new CustomEvent("selectblock", { detail: block }));
  }

  #cells() {
    return this.pool === null ? 0 : Math.max(0, this.pool.states.length - FIRST_BLOCK);
  }

  #onWidth(width) {
    if (Math.floor(width) === this.#width) return;
    this.#width = Math.floor(width);
    this.#layOut();
  }

  #layOut() {
    if (this.#width === 0) return;
    const cells = this.#cells();
    this.#layout = new CellLayout(cells, this.#width, innerHeight * SHARE_OF_HEIGHT);
    const { columns, rows, size } = this.#layout;
    this.#frame.style.width = `${columns * size}px`;
    this.#frame.style.height = `${rows * size}px`;
    this.#grid.hidden = size < GRID_FROM;
    this.#grid.style.backgroundSize = `${size}px ${size}px`;
    const id = this.pool?.worker.info?.worker_id ?? "";
    this.element.setAttribute(
      "aria-label",
      `${count(cells)} blocks of ${id}. Arrow keys, Page up, Page down, Home and End move; Enter lights up the prefix of a block; Escape ends it.`,
    );
    this.#painter.resize(this.#layout);
    this.#look();
    this.#mark();
  }

  #look() {
    const { classes, classOf } = this.#colouring;
    const ground = colourOf("--ground");
    const full = classes.map(({ css }) => colourOf(css));
    const back = full.map((colour) => dimmed(colour, ground));
    const litColour = colourOf("--lit");
    const relatedColour = colourOf("--related");
    const [lit, related, only] = [this.#lit, this.#related, this.#onlyClass];
    this.#painter.look((cell) => {
      const block = cell + FIRST_BLOCK;
      if (lit.has(block)) return litColour;
      if (related.has(block)) return relatedColour;
      const found = classOf(this.pool, block, store.number);
      return lit.size > 0 || (only !== null && only !== found) ? back[found] : full[found];
    });
  }

  #mark() {
    this.#marker.hidden = this.focused === null;
    if (this.focused === null) return;
    const { columns, size } = this.#layout;
    const cell = this.focused - FIRST_BLOCK;
    this.#marker.style.width = this.#marker.style.height = `${size}px`;
    this.#marker.style.transform = `translate(${(cell % columns) * size}px, ${Math.floor(cell / columns) * size}px)`;
  }

  #blockAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const cell = this.#layout.cellAt(event.clientX - box.left, event.clientY - box.top);
    return cell < 0 ? null : cell + FIRST_BLOCK;
  }

  #onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || this.#layout.cells === 0) return;
    if (event.key === "Escape") this.select(null);
    else if (event.key === "Enter" || event.key === " ") this.select(this.focused);
    else {
      const from = this.focused === null ? null : this.focused - FIRST_BLOCK;
      const cell = this.#layout.cellAfter(from ?? 0, event.key);
      if (cell === null) return;
      this.focus((from === null && event.key.startsWith("Arrow") ? 0 : cell) + FIRST_BLOCK);
      this.#marker.scrollIntoView({ block: "nearest" });
    }
    event.preventDefault();
  }
}
