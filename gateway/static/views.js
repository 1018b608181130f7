// The views of the page, and which of them is shown: the address after # names it, as in #/blocks?worker=worker-0.

import { make } from "./elements.js";

const views = new Map(); // name → {title, styles}

/**
 * Add a view: the element kvpool-NAME, with the style sheet css/NAME.css. It is made when the view is shown and removed from the
 * document when another one is. All views are added before the page starts.
 * @param {string} name in the address: a–z and hyphens
 * @param {string} title on its tab
 * @param {function} element class of the custom element
 */
export function defineView(name, title, element) {
  customElements.define(`kvpool-${name}`, element);
  views.set(name, { title, styles: make("link", { rel: "stylesheet", href: `/static/css/${name}.css` }) });
}

/** What the address names: {name, parameters}. The first view if it names none that there is. */
export function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const name = views.has(path) ? path : views.keys().next().value;
  return { name, parameters: new URLSearchParams(query) };
}

/** The address of a view, for a link. */
export function viewAddress(name, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return `#/${name}${query ? `?${query}` : ""}`;
}

/** Change a parameter of the shown view's address without a step in the history, so that a reload shows the same. */
export function keepParameters(parameters) {
  history.replaceState(null, "", viewAddress(currentRoute().name, parameters));
}

/** Show the view that the address names in `main`, now and whenever it changes, with a tab for each in `tabs`. */
export function startViews(main, tabs) {
  let shown = null;
  const show = () => {
    const { name, parameters } = currentRoute();
    tabs.replaceChildren(
      ...[...views].map(([other, { title }]) =>
        make("a", { href: viewAddress(other), "aria-current": other === name ? "page" : null }, title),
      ),
    );
    const { title, styles } = views.get(name);
    document.title = `${title} · kvpool`;
    if (shown?.name === name) {
      shown.node.routeChanged?.(parameters);
      return;
    }
    if (!styles.isConnected) document.head.append(styles);
    const node = make(`kvpool-${name}`, { class: "view" });
    const moved = shown !== null;
    shown = { name, node };
    main.replaceChildren(node);
    if (moved) main.focus({ preventScroll: true });
  };
  addEventListener("hashchange", show);
  show();
}
