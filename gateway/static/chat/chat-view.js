// The view Chat: two conversations under one system prompt. The second is served from what the first has computed.

import { offerModels } from "../api.js";
import { make, setText } from "../elements.js";
import { defineView } from "../views.js";
import { ChatPane } from "./chat-pane.js";

const SYSTEM =
  "You are a librarian. You answer in one or two short sentences, you never make anything up, and you say so when you do not know. " +
  "The library opens at nine and closes at six; on Sundays it is closed. Books may be kept for four weeks.";

class ChatView extends HTMLElement {
  #model = make("select", { id: "chat-model" });
  #system = make("textarea", { id: "chat-system", rows: 3 });
  #longest = make("input", { id: "chat-longest", type: "number", min: 1, max: 100000, value: 200 });
  #said = make("p", { class: "quiet", role: "status" });
  #panes = [];

  connectedCallback() {
    this.#system.value = SYSTEM;
    const context = () => ({
      model: this.#model.value,
      system: this.#system.value.trim(),
      maxTokens: this.#longest.valueAsNumber || 200,
    });
    this.#panes = ["A", "B"].map((name) => new ChatPane(name, context));
    this.replaceChildren(
      make(
        "div",
        { class: "row" },
        make("h1", {}, "Chat"),
        make("label", { for: "chat-model" }, "Model"),
        this.#model,
        make("label", { for: "chat-longest" }, "Most tokens of an answer"),
        this.#longest,
      ),
      make("p", { class: "quiet" }, "Both chats begin with this system prompt: its full blocks are computed once."),
      make("label", { for: "chat-system" }, "System prompt"),
      this.#system,
      this.#said,
      make("div", { class: "panes" }, ...this.#panes.map((pane) => pane.element)),
    );
    offerModels(this.#model).then((said) => setText(this.#said, said));
  }

  disconnectedCallback() {
    for (const pane of this.#panes) pane.disconnect();
  }
}

defineView("chat", "Chat", ChatView);
