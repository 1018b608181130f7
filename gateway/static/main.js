// Starts the page. A view is one import here: its module registers it (see views.js); the tabs are in this order.

import "./cluster/cluster-view.js";
import "./blocks/blocks-view.js";
import "./prefixes/prefixes-view.js";
import "./requests/requests-view.js";
import "./chat/chat-view.js";
import "./why/why-view.js";
import "./learn/learn-view.js";

import { startStatus } from "./shell/status.js";
import { store } from "./store.js";
import { startViews } from "./views.js";

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part after # is the view's address
  document.getElementById("view").focus();
});
startViews(document.getElementById("view"), document.getElementById("tabs"));
startStatus(document.getElementById("live"), document.getElementById("banner"));
store.start();
