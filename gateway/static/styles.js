// A view brings its own style sheet: its first element asks for it.

const asked = new Set();

/** @param {string} path of a style sheet of the page */
export function useStyles(path) {
  if (asked.has(path)) return;
  asked.add(path);
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = path;
  document.head.append(link);
}
