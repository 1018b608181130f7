// Asks before a worker is drained.

import { postJson } from "../api.js";
import { make, setText } from "../elements.js";

/** @param {string} workerId; @param {HTMLElement} host: where the dialog is put into the document */
export function askToDrain(workerId, host) {
  const said = make("p", { role: "alert" });
  const confirm = make("button", { class: "danger", type: "button" }, "Drain");
  const cancel = make("button", { type: "button", autofocus: true }, "Cancel");
  const dialog = make(
    "dialog",
    { "aria-labelledby": "drain-title" },
    make("h2", { id: "drain-title" }, `Drain ${workerId}?`),
    make("p", {}, "It takes no new requests, ends the running ones and leaves. Its cache is lost. There is no way back."),
    said,
    make("div", { class: "row" }, confirm, cancel),
  );
  confirm.addEventListener("click", async () => {
    confirm.disabled = true;
    try {
      await postJson("/api/drain", { worker_id: workerId });
      dialog.close();
    } catch (failure) {
      setText(said, failure.message);
      confirm.disabled = false;
    }
  });
  cancel.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  host.append(dialog);
  dialog.showModal();
}
