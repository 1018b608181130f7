// The views of the page, and which of them is shown: the address after # names it, as in #/blocks?worker=worker-0.

const views = new Map(); // name → {title, element}
const changes = new EventTarget();

/**
 * Add a view. Its element is made when the view is shown and removed from the document when another one is.
 * @param {string} name in the address: a–z and hyphens
 * @param {string} title on its tab
 * @param {string} element name of a custom element; defined by now or later
 */
export function registerView(name, title, element) {
  if (views.has(name)) throw new Error(`the view ${name} is registered twice`);
  views.set(name, { title, element });
  changes.dispatchEvent(new Event("registered"));
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
  const showTabs = () => {
    const { name } = currentRoute();
    tabs.replaceChildren(
      ...[...views].map(([other, { title }]) => {
        const link = document.createElement("a");
        link.href = viewAddress(other);
        link.textContent = title;
        if (other === name) link.setAttribute("aria-current", "page");
        return link;
      }),
    );
  };
  const show = () => {
    const { name, parameters } = currentRoute();
    showTabs();
    if (name === undefined) return;
    const { title, element } = views.get(name);
    document.title = `${title} · kvpool`;
    if (shown?.name === name) {
      shown.node.routeChanged?.(parameters);
      return;
    }
    const node = document.createElement(element);
    node.classList.add("view");
    const moved = shown !== null;
    shown = { name, node };
    main.replaceChildren(node);
    if (moved) main.focus({ preventScroll: true });
  };
  addEventListener("hashchange", show);
  changes.addEventListener("registered", () => (shown === null ? show() : showTabs()));
  show();
}
