// Where the cells of a map are.

const SMALLEST = 2; // CSS pixels
const LARGEST = 22;

export class CellLayout {
  /** @param {number} cells; @param {number} width, height: CSS pixels that there are; cells that need more get more height */
  constructor(cells, width, height) {
    const fitting = Math.floor(Math.sqrt((width * height) / Math.max(1, cells)));
    this.cells = cells;
    this.size = Math.min(LARGEST, Math.max(SMALLEST, fitting));
    this.columns = Math.max(1, Math.min(cells, Math.floor(width / this.size)));
    this.rows = Math.max(1, Math.ceil(cells / this.columns));
  }

  /** The cell at a point in CSS pixels; −1: none. */
  cellAt(x, y) {
    const column = Math.floor(x / this.size);
    const cell = Math.floor(y / this.size) * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < this.cells ? cell : -1;
  }

  /** The cell that a key leads to; null: the key leads nowhere. */
  cellAfter(cell, key) {
    const moves = {
      ArrowLeft: cell - 1,
      ArrowRight: cell + 1,
      ArrowUp: cell - this.columns,
      ArrowDown: cell + this.columns,
      PageUp: cell - 10 * this.columns,
      PageDown: cell + 10 * this.columns,
      Home: 0,
      End: this.cells - 1,
    };
    if (!(key in moves)) return null;
    const vertical = key === "ArrowUp" || key === "ArrowDown";
    if (vertical && (moves[key] < 0 || moves[key] >= this.cells)) return cell;
    return Math.min(this.cells - 1, Math.max(0, moves[key]));
  }
}
