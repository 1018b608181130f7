// The view Why?: a prompt is pasted, and the manager says what of it is cached and why no more. Nothing is computed.

import { offerModels } from "../api.js";
import { make, setText } from "../elements.js";
import { defineView } from "../views.js";
import { explain, sentencesOf, workersTable } from "./explanation.js";

class WhyView extends HTMLElement {
  #model = make("select", { id: "why-model" });
  #asChat = make("input", { id: "why-chat", type: "checkbox" });
  #salt = make("input", { id: "why-salt", autocomplete: "off", maxlength: 256 });
  #prompt = make("textarea", { id: "why-prompt", rows: 6, required: true });
  #said = make("p", { class: "quiet", role: "status" });
  #found = make("div", { "aria-live": "polite" });

  connectedCallback() {
    this.replaceChildren(
      make("h1", {}, "Why did it miss?"),
      make("p", { class: "quiet" }, "Paste a prompt: the page says how much of it is served from the cache now, and why no more. Nothing is computed and nothing changes."),
      make(
        "form",
        { class: "card", onsubmit: (event) => this.#onSubmit(event) },
        make("label", { for: "why-prompt" }, "Prompt"),
        this.#prompt,
        make(
          "div",
          { class: "row" },
          make("label", { for: "why-model" }, "Model"),
          this.#model,
          make("span", {}, this.#asChat, " ", make("label", { for: "why-chat" }, "as the user's message of a chat")),
          make("label", { for: "why-salt" }, "Salt, if any"),
          this.#salt,
          make("button", { class: "primary" }, "Explain"),
        ),
      ),
      this.#said,
      this.#found,
    );
    offerModels(this.#model).then((said) => setText(this.#said, said));
  }

  async #onSubmit(event) {
    event.preventDefault();
    const text = this.#prompt.value;
    const asked = { model: this.#model.value || null, cache_salt: this.#salt.value || null };
    if (this.#asChat.checked) asked.messages = [{ role: "user", content: text }];
    else asked.prompt = text;
    setText(this.#said, "Asking…");
    try {
      const explanation = await explain(asked);
      setText(this.#said, "");
      this.#found.replaceChildren(sentencesOf(explanation), workersTable(explanation));
    } catch (failure) {
      this.#found.replaceChildren();
      setText(this.#said, failure.message);
    }
  }
}

defineView("why", "Why?", WhyView);
