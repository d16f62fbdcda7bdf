// Shared elements of all pages: headings, buttons, fields, dialogs, tables and messages.

import { EVENTS } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { mayPass, problem as inWords } from "./words.js";

let serial = 0;
export const unique = (name) => `${name}-${++serial}`;

/** The head of a page: title, purpose and actions. */
export function heading(title, lead, ...actions) {
  return h(
    "header",
    { class: "heading" },
    h("div", {}, h("h1", {}, title), lead && h("p", { class: "lead" }, lead)),
    actions.length > 0 && h("div", { class: "actions" }, ...actions),
  );
}

/** A button. `kind`: primary, plain, quiet or danger. It is busy while `onClick` runs, and shows its errors. */
export function button(label, onClick, { kind = "plain", icon: name, ...props } = {}) {
  const element = h(
    "button",
    { type: "button", class: `button ${kind}`, ...props },
    name && icon(name),
    h("span", {}, label),
  );
  element.addEventListener("click", async (event) => {
    if (element.ariaBusy === "true") return;
    element.ariaBusy = "true";
    try {
      await onClick(event);
    } catch (error) {
      tell(error);
    } finally {
      element.ariaBusy = null;
    }
  });
  return element;
}

/** A link that looks like a button. */
export function linkButton(label, href, { kind = "plain", icon: name } = {}) {
  return h("a", { class: `button ${kind}`, href }, name && icon(name), h("span", {}, label));
}

/** A labeled control; screen readers read `hint` with it. */
export function field(label, control, hint) {
  control.id ||= unique("field");
  const about = hint && h("p", { class: "hint", id: unique("hint") }, hint);
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, about);
}

/** A listener that calls `act` when the user pauses typing. */
export function afterTyping(act, signal) {
  let timer = null;
  signal.addEventListener("abort", () => clearTimeout(timer));
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, 200);
  };
}

/** A placeholder for an empty page: explanation and first steps. */
export function empty(name, title, text, ...actions) {
  return h(
    "section",
    { class: "empty" },
    icon(name),
    h("h2", {}, title),
    h("p", {}, text),
    h("div", { class: "actions" }, ...actions),
  );
}

/** A progress message. */
export function waiting(text = "One moment…") {
  return h("p", { class: "waiting", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), text);
}

/** An error with remedy and code. */
export function problemBox(problem, retry) {
  const said = inWords(problem);
  return h(
    "section",
    { class: "notice error", role: "alert" },
    icon("warning"),
    h(
      "div",
      {},
      h("h2", {}, said.title ?? "Unexpected error"),
      h("p", {}, said.text),
      said.remedy && h("p", {}, said.remedy),
      h("p", { class: "code" }, h("code", {}, problem.code ?? problem.name)),
      retry && button("Try again", retry),
    ),
  );
}

/** A short message beside the page, where it covers no button, announced by screen readers. */
export function toast(text, kind = "ok") {
  const place = toasts();
  const line = h("div", { class: `toast ${kind}` }, icon(kind === "ok" ? "check" : "warning"), h("span", {}, text));
  const dismiss = h(
    "button",
    { type: "button", class: "button quiet small", "aria-label": "Dismiss", onClick: () => line.remove() },
    icon("close"),
  );
  line.append(dismiss);
  place.append(line);
  while (place.children.length > 2) place.firstChild.remove();
  document.activeElement?.scrollIntoView({ block: "nearest" }); // a narrow window loses some of its height
  leaves(line, kind === "ok" ? 6000 : 20_000);
}

/** Remove `line` after `ms`, but not while the pointer or focus is in it. */
function leaves(line, ms) {
  let timer;
  const wait = () => {
    clearTimeout(timer);
    if (!line.matches(":hover, :focus-within")) timer = setTimeout(() => line.remove(), ms);
  };
  for (const name of ["pointerenter", "pointerleave", "focusin"]) line.addEventListener(name, wait);
  line.addEventListener("focusout", () => queueMicrotask(wait)); // the focus moves after this event
  wait();
}

/** The container of toasts: inside an open dialog, because everything outside it is inert. */
function toasts() {
  const dialog = [...document.querySelectorAll("dialog[open]")].at(-1);
  if (!dialog) return document.querySelector(".rail .toasts");
  const place = dialog.querySelector(".toasts") ?? h("div", { class: "toasts", role: "status", "aria-live": "polite" });
  dialog.append(place);
  return place;
}

/** Show an error as a toast. */
export function tell(error) {
  if (error.name === "AbortError") return;
  const { text, remedy } = inWords(error);
  toast([text, remedy].filter(Boolean).join(" "), "error");
}

/** Ask for confirmation; resolves to true or false. `typed`: text that the user must type. `shown`: an element below the
 * text. */
export function confirmed({ title, text, yes, danger = true, typed, shown }) {
  return new Promise((resolve) => {
    const input = typed && h("input", { type: "text", autocomplete: "off", spellcheck: false });
    const go = h(
      "button",
      { type: "submit", class: `button ${danger ? "danger" : "primary"}`, disabled: Boolean(typed) },
      yes,
    );
    if (input) input.addEventListener("input", () => (go.disabled = input.value !== typed));
    const box = dialog(
      title,
      h(
        "form",
        { method: "dialog", onSubmit: () => (box.returnValue = "yes") },
        h("p", {}, text),
        shown,
        input && field(`Type “${typed}” to continue`, input),
        h(
          "div",
          { class: "actions end" },
          h("button", { type: "button", class: "button plain", onClick: () => box.close("no") }, "Cancel"),
          go,
        ),
      ),
    );
    box.addEventListener("close", () => resolve(box.returnValue === "yes"));
  });
}

/** Open a modal dialog, and remove it when it closes. Escape, the backdrop and another page close it. The class "stays"
 * keeps it on other pages, and the class "key" after a change of the key. */
export function dialog(title, ...content) {
  const id = unique("dialog");
  const box = h("dialog", { class: "dialog", "aria-labelledby": id }, h("h2", { id }, title), ...content);
  let outside = false; // text selection that ends outside must not close the dialog
  box.addEventListener("pointerdown", (event) => (outside = event.target === box && !within(box, event)));
  box.addEventListener("click", (event) => outside && event.target === box && !within(box, event) && box.close("no"));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Close the dialogs of a page, or all dialogs if the `key` is removed. Open questions are answered with no. */
export function closeDialogs({ key = false } = {}) {
  for (const box of document.querySelectorAll(`dialog[open]:not(${key ? ".key" : ".stays"})`)) box.close("no");
}

function within(box, event) {
  const { left, right, top, bottom } = box.getBoundingClientRect();
  return event.clientX >= left && event.clientX <= right && event.clientY >= top && event.clientY <= bottom;
}

/** A table with a caption for screen readers. `rows`: lists of cells, each text or an element. */
export function table(caption, columns, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((column) => h("th", { scope: "col" }, column)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((cells) =>
          h(
            "tr",
            {},
            cells.map((cell) => h("td", {}, cell)),
          ),
        ),
      ),
    ),
  );
}

/** Show a secret once, in a dialog that stays open when the page reloads for a new key. */
export function secretDialog(title, label, secret, text) {
  const input = h("input", { type: "text", readOnly: true, value: secret, onFocus: () => input.select() });
  const copy = async () => {
    await navigator.clipboard.writeText(secret);
    toast("Copied.");
  };
  const box = dialog(
    title,
    h("p", {}, `Copy it now: it is shown only once. ${text}`),
    h("div", { class: "token" }, field(label, input)),
    h(
      "div",
      { class: "actions end" },
      button("Copy", copy, { icon: "paste" }),
      button("Done", () => box.close(), { kind: "primary" }),
    ),
  );
  // An accidental click or another page must not lose the secret.
  box.classList.add("stays");
  box.addEventListener("click", (event) => event.target === box && event.stopImmediatePropagation(), true);
  input.focus();
}

/** A number with its label. */
export function stat(name, value, hint) {
  return h("div", { class: "stat" }, h("dt", {}, name), h("dd", {}, value), hint && h("dd", { class: "hint" }, hint));
}

/** Show a message while `load` runs, then its result or error with a retry button. A load that failed with 401 or 403 is
 * repeated when the key changes. */
export function loading(load, text) {
  const place = h("div", { class: "loading", tabindex: "-1" });
  const renew = () => place.isConnected && attempt();
  const attempt = async () => {
    EVENTS.removeEventListener("key", renew); // a manual retry replaces the retry after a key change
    const again = place.contains(document.activeElement); // the focused button is removed: keep the focus here
    fill(place, waiting(text));
    if (again) place.focus();
    try {
      fill(place, await load());
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(place, problemBox(error, mayPass(error) && attempt));
      if (error.status === 401 || error.status === 403) EVENTS.addEventListener("key", renew, { once: true });
    }
  };
  attempt();
  return place;
}
