// One conversation.

import { make, setText } from "../elements.js";
import { explain, sentencesOf } from "../why/explanation.js";
import { ask, tokenTexts } from "./chat-call.js";
import { PromptTokens } from "./prompt-tokens.js";

export class ChatPane {
  #turns = make("div", { class: "turns" });
  #question;
  #send = make("button", { class: "primary" }, "Send");
  #stop = make("button", { type: "button", hidden: true, onclick: () => this.#call?.abort() }, "Stop");
  #clear = make("button", { type: "button", onclick: () => this.#forget() }, "Clear");
  #said = make("p", { class: "quiet", role: "status" });
  #messages = [];
  #call = null;
  #context;

  /** @param {string} name of the pane; @param {function(): {model: string, system: string, maxTokens: number}} context */
  constructor(name, context) {
    this.#context = context;
    const id = `question-${name}`;
    this.#question = make("textarea", { id, rows: 2, required: true, onkeydown: (event) => this.#onKey(event) });
    this.element = make(
      "section",
      { class: "card pane", "aria-label": `Chat ${name}` },
      make("h2", {}, `Chat ${name}`),
      this.#turns,
      make(
        "form",
        { onsubmit: (event) => this.#onSubmit(event) },
        make("label", { for: id }, "Your message"),
        this.#question,
        make("div", { class: "row" }, this.#send, this.#stop, this.#clear),
      ),
      this.#said,
    );
  }

  disconnect() {
    this.#call?.abort();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#question.form.requestSubmit();
  }

  #onSubmit(event) {
    event.preventDefault();
    if (this.#call === null && this.#question.value.trim() !== "") this.#answer(this.#question.value.trim());
  }

  #forget() {
    this.#call?.abort();
    this.#messages = [];
    this.#turns.replaceChildren();
    setText(this.#said, "");
  }

  async #answer(question) {
    const { model, system, maxTokens } = this.#context();
    const asked = [...this.#messages, { role: "user", content: question }];
    const messages = system === "" ? asked : [{ role: "system", content: system }, ...asked];
    const tokens = new PromptTokens();
    const answer = make("p", { class: "answer" });
    const why = make("details", { class: "why", hidden: true }, make("summary", {}, "Why not more?"));
    this.#turns.append(make("p", { class: "question" }, question), tokens.element, why, answer);
    this.#question.value = "";
    let text = "";
    this.#call = new AbortController();
    this.#busy(true);
    setText(this.#said, "Answering…");
    try {
      const { signal } = this.#call;
      tokenTexts(model, messages, signal).then((texts) => tokens.showTexts(texts), () => {});
      await this.#explain({ model, messages }, why, signal);
      for await (const part of ask({ model, messages, maxTokens }, signal)) {
        if (part.text) {
          text += part.text;
          answer.append(part.text);
        }
        if (part.usage) tokens.showUsage(part.usage);
        if (part.finish === "length") answer.append("…");
      }
      this.#messages = [...asked, { role: "assistant", content: text }];
      setText(this.#said, "");
    } catch (failure) {
      setText(this.#said, failure.name === "AbortError" ? "Stopped." : `No answer: ${failure.message}`);
    } finally {
      this.#call = null;
      this.#busy(false);
    }
  }

  /** Before the request is sent: afterwards its own blocks would be hits. A chat goes on without an explanation. */
  async #explain(asked, why, signal) {
    try {
      why.append(sentencesOf(await explain(asked, signal)));
      why.hidden = false;
    } catch (failure) {
      if (failure.name === "AbortError") throw failure;
    }
  }

  #busy(busy) {
    this.#send.disabled = busy;
    this.#stop.hidden = !busy;
  }
}
