// What every page is made of. One look, one way to say that something failed, one way to ask again before deleting.

import { EVENTS } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { mayPass, problem as inWords } from "./words.js";

let serial = 0;
export const unique = (name) => `${name}-${++serial}`;

/** A page's beginning: its name, a sentence on what it is for, and what can be done. */
export function heading(title, lead, ...actions) {
  return h(
    "header",
    { class: "heading" },
    h("div", {}, h("h1", {}, title), lead && h("p", { class: "lead" }, lead)),
    actions.length > 0 && h("div", { class: "actions" }, ...actions),
  );
}

/** A button. `kind`: primary, plain, quiet or danger. While `onClick` runs it is busy; what it throws is told. */
export function button(label, onClick, { kind = "plain", icon: name, ...props } = {}) {
  const element = h("button", { type: "button", class: `button ${kind}`, ...props }, name && icon(name), h("span", {}, label));
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

/** A labeled control; `hint` is read with it. */
export function field(label, control, hint) {
  control.id ||= unique("field");
  const about = hint && h("p", { class: "hint", id: unique("hint") }, hint);
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, about);
}

/** Nothing here yet: what would be here, and how to begin. */
export function empty(name, title, text, ...actions) {
  return h("section", { class: "empty" }, icon(name), h("h2", {}, title), h("p", {}, text), h("div", { class: "actions" }, ...actions));
}

/** Something is being fetched. */
export function waiting(text = "One moment…") {
  return h("p", { class: "waiting", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), text);
}

/** What went wrong and what to do, with the code that the documents list. */
export function problemBox(problem, retry) {
  const said = inWords(problem);
  return h(
    "section",
    { class: "notice error", role: "alert" },
    icon("warning"),
    h(
      "div",
      {},
      h("h2", {}, said.title ?? "Something went wrong here"),
      h("p", {}, said.text),
      said.remedy && h("p", {}, said.remedy),
      h("p", { class: "code" }, h("code", {}, problem.code ?? problem.name)),
      retry && button("Try again", retry),
    ),
  );
}

/** A short word in the corner; read aloud by screen readers. */
export function toast(text, kind = "ok") {
  const place = toasts();
  const line = h("div", { class: `toast ${kind}` }, icon(kind === "ok" ? "check" : "warning"), h("span", {}, text));
  const dismiss = h("button", { type: "button", class: "button quiet small", "aria-label": "Dismiss", onClick: () => line.remove() }, icon("close"));
  line.append(dismiss);
  place.append(line);
  while (place.children.length > 3) place.firstChild.remove();
  leaves(line, kind === "ok" ? 6000 : 20_000);
}

/** Have `line` go after so long, but not while somebody is at it. */
function leaves(line, ms) {
  let timer;
  const wait = () => {
    clearTimeout(timer);
    if (!line.matches(":hover, :focus-within")) timer = setTimeout(() => line.remove(), ms);
  };
  for (const name of ["pointerenter", "pointerleave", "focusin"]) line.addEventListener(name, wait);
  line.addEventListener("focusout", () => queueMicrotask(wait)); // until then the focus is where it was
  wait();
}

/** Where toasts go: what lies outside an open dialog is neither read aloud nor clickable. */
function toasts() {
  const dialog = [...document.querySelectorAll("dialog[open]")].at(-1);
  if (!dialog) return document.querySelector("body > .toasts");
  const place = dialog.querySelector(".toasts") ?? h("div", { class: "toasts", role: "status", "aria-live": "polite" });
  dialog.append(place);
  return place;
}

/** Tell an error that no page can show in its own place. */
export function tell(error) {
  if (error.name === "AbortError") return;
  const { text, remedy } = inWords(error);
  toast([text, remedy].filter(Boolean).join(" "), "error");
}

/**
 * Ask before something that cannot be undone. Resolves to true or false. `typed`: what must be typed to go on.
 */
export function confirmed({ title, text, yes, danger = true, typed }) {
  return new Promise((resolve) => {
    const input = typed && h("input", { type: "text", autocomplete: "off", spellcheck: false });
    const go = h("button", { type: "submit", class: `button ${danger ? "danger" : "primary"}`, disabled: Boolean(typed) }, yes);
    if (input) input.addEventListener("input", () => (go.disabled = input.value !== typed));
    const box = dialog(
      title,
      h(
        "form",
        { method: "dialog", onSubmit: () => (box.returnValue = "yes") },
        h("p", {}, text),
        input && field(`Type “${typed}” to go on`, input),
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

/** A modal dialog, open; it leaves the page when it is closed. Escape, the backdrop and another page close it; one of the
 * class "stays" outlives the page, and one of the class "key", which asks for a key, the key too. */
export function dialog(title, ...content) {
  const id = unique("dialog");
  const box = h("dialog", { class: "dialog", "aria-labelledby": id }, h("h2", { id }, title), ...content);
  let outside = false; // a text that is selected from within the box to beyond it ends there, too, and closes nothing
  box.addEventListener("pointerdown", (event) => (outside = event.target === box && !within(box, event)));
  box.addEventListener("click", (event) => outside && event.target === box && !within(box, event) && box.close("no"));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Close what belongs to the page that goes, or what was seen by the `key` that goes: whatever it asked is answered by no. */
export function closeDialogs({ key = false } = {}) {
  for (const box of document.querySelectorAll(`dialog[open]:not(${key ? ".key" : ".stays"})`)) box.close("no");
}

function within(box, event) {
  const { left, right, top, bottom } = box.getBoundingClientRect();
  return event.clientX >= left && event.clientX <= right && event.clientY >= top && event.clientY <= bottom;
}

/** A table with a caption for screen readers. `rows`: lists of cells, each a text or an element. */
export function table(caption, columns, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col" }, column)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))),
    ),
  );
}

/** A figure with its name. */
export function stat(name, value, hint) {
  return h("div", { class: "stat" }, h("dt", {}, name), h("dd", {}, value), hint && h("dd", { class: "hint" }, hint));
}

/** Show what `load` makes, a word while it waits, and what went wrong, with a way to try again; what was refused for want
 * of a key, or of a better one, is asked for anew as soon as there is another. */
export function loading(load, text) {
  const place = h("div", { class: "loading", tabindex: "-1" });
  const renew = () => place.isConnected && attempt();
  const attempt = async () => {
    EVENTS.removeEventListener("key", renew); // what is asked for by hand meanwhile is not taken away again by a key
    const again = place.contains(document.activeElement); // whose button goes: the place keeps the focus
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
