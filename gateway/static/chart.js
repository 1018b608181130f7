// A small line chart, as SVG. Its title says in words what it shows: a picture alone says nothing to a screen reader.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 240;
const HEIGHT = 36;

export class Chart {
  constructor(label) {
    this.label = label;
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("class", "chart");
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", label);
    this.area = this.#part("path", "chart-area");
    this.line = this.#part("polyline", "chart-line");
  }

  #part(name, className) {
    const part = document.createElementNS(SVG, name);
    part.setAttribute("class", className);
    this.element.append(part);
    return part;
  }

  /** @param {number[]} values oldest first; @param {number} length how many the whole width has */
  show(values, length = 120) {
    const most = Math.max(1, ...values);
    const step = WIDTH / (length - 1);
    const first = WIDTH - step * (values.length - 1);
    const points = values.map((value, index) => {
      const y = HEIGHT - 1.5 - (HEIGHT - 3) * (value / most);
      return `${(first + index * step).toFixed(1)},${y.toFixed(1)}`;
    });
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute(
      "d",
      points.length ? `M${first.toFixed(1)},${HEIGHT} L${points.join(" L")} L${WIDTH},${HEIGHT} Z` : "",
    );
  }
}
