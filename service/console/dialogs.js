// Dialogs: questions, confirmations and secrets.

import { h } from "./dom.js";
import { field, submits, textInput } from "./forms.js";
import { button, copyButton, unique } from "./ui.js";

/**
 * A dialog with `elements` and a button that runs `act`. A text that `act` returns, or its error, stays in the dialog; a
 * function that it returns runs after the dialog closed. `act` gets a signal, which is aborted when the dialog closes. Returns
 * the dialog with its button `go`.
 */
export function ask(title, yes, elements, act, kind = "primary") {
  const go = h("button", { type: "submit", class: `button ${kind}` }, yes);
  const leaving = new AbortController();
  const { wrong, onSubmit } = submits(go, async () => {
    const result = await act(leaving.signal);
    if (typeof result === "string") return result;
    box.close();
    result?.();
  });
  const cancel = button("Cancel", () => box.close());
  const form = h("form.stack", { onSubmit }, [elements, wrong, h("div.actions.end", [cancel, go])]);
  const box = Object.assign(dialog(title, form), { go });
  box.addEventListener("close", () => leaving.abort());
  return box;
}

/** Ask for confirmation; resolves to true or false. `typed`: text that the user must type. `shown`: an element below the
 * text. */
export function confirmed(title, text, yes, { danger = true, typed, shown } = {}) {
  return new Promise((resolve) => {
    let sure = false;
    const input = typed && textInput();
    const asked = [h("p", text), shown, input && field(`Type “${typed}” to continue`, input)];
    const box = ask(title, yes, asked, () => void (sure = true), danger ? "danger" : "primary");
    box.go.disabled = Boolean(typed);
    input?.addEventListener("input", () => (box.go.disabled = input.value !== typed));
    box.addEventListener("close", () => resolve(sure));
  });
}

/** A red button that asks before it runs `act`. `question()`: the arguments of `confirmed`. */
export const careful = (label, question, act, props) =>
  button(label, async () => (await confirmed(...question())) && (await act()), { kind: "danger", ...props });

/** Open a modal dialog, and remove it when it closes. Escape, the backdrop and another page close it. The class "stays"
 * keeps it on other pages, and the class "key" after a change of the key. */
export function dialog(title, ...content) {
  const id = unique("dialog");
  const props = { "aria-labelledby": id, closedby: "any" };
  const box = h("dialog.dialog", props, [h("h2", { id }, title), ...content]);
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Close the dialogs of a page, or all dialogs if the `key` is removed. Open questions are answered with no. */
export function closeDialogs({ key = false } = {}) {
  for (const box of document.querySelectorAll(`dialog[open]:not(${key ? ".key" : ".stays"})`)) box.close();
}

/** Show a secret once, in a dialog that stays open when the page reloads for a new key. */
export function secretDialog(title, label, secret, text) {
  const input = h("input", { type: "text", readOnly: true, value: secret, onFocus: () => input.select() });
  const box = dialog(
    title,
    h("p", `Copy it now: it is shown only once. ${text}`),
    h("div.token", field(label, input)),
    h("div.actions.end", [copyButton("Copy", secret), button("Done", () => box.close(), { kind: "primary" })]),
  );
  // An accidental click or another page must not lose the secret.
  box.classList.add("stays");
  box.setAttribute("closedby", "closerequest");
  input.focus();
}
