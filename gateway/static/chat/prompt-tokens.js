// The tokens of a prompt; those that came from the cache are marked.

import { make, setText } from "../elements.js";
import { count } from "../format.js";

const SHOWN = 1500; // tokens at most, half of them from the beginning

export class PromptTokens {
  #caption = make("summary", {}, "The prompt's tokens");
  #tokens = make("p", { class: "tokens mono", tabindex: "0" });
  #texts = [];
  #numCached = null;

  constructor() {
    this.element = make("details", { class: "prompt-tokens", open: true }, this.#caption, this.#tokens);
  }

  /** @param {string[]} texts of the tokens */
  showTexts(texts) {
    this.#texts = texts;
    this.#show();
  }

  /** @param {Object} usage as the answer reports it */
  showUsage(usage) {
    this.#numCached = usage.prompt_tokens_details.cached_tokens;
    const words =
      this.#numCached === 0
        ? `All ${count(usage.prompt_tokens)} tokens were computed`
        : `${count(this.#numCached)} of ${count(usage.prompt_tokens)} tokens were not computed: they came from the cache`;
    setText(this.#caption, words);
    this.#show();
  }

  #show() {
    const { length } = this.#texts;
    const left = length <= SHOWN ? length : SHOWN / 2;
    const parts = [this.#run(0, left)];
    if (left < length) {
      parts.push(make("span", { class: "quiet" }, ` … ${count(length - SHOWN)} more … `));
      parts.push(this.#run(length - SHOWN / 2, length));
    }
    this.#tokens.replaceChildren(...parts);
  }

  #run(begin, end) {
    const run = document.createDocumentFragment();
    for (let index = begin; index < end; index += 1) {
      const cached = this.#numCached !== null && index < this.#numCached;
      run.append(make("span", { class: cached ? "token cached" : "token" }, this.#texts[index]));
    }
    return run;
  }
}
