// Whether what the page shows is live: a word in the head, and a banner when it is not.

import { setText } from "../elements.js";
import { store } from "../store.js";

const WORDS = { connecting: "connecting", up: "live", away: "manager away", lost: "gateway away" };

export function startStatus(live, banner) {
  const show = () => {
    setText(live, WORDS[store.connection]);
    live.dataset.state = store.connection;
    const said = sentence();
    setText(banner, said);
    banner.hidden = said === "";
  };
  store.addEventListener("manager", show);
  show();
}

function sentence() {
  if (store.connection === "away")
    return `The manager does not answer; what is shown here is old. The page goes on by itself once it is back. ${store.message}`;
  if (store.connection === "lost") return "The gateway does not answer; what is shown here is old. The page tries again.";
  return "";
}
