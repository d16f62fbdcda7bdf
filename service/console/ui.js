// Shared elements of all pages: headings, buttons, fields, dialogs, tables and messages.

import { EVENTS } from "./api.js";
import { each, fill, h, icon } from "./dom.js";
import { mayPass, problem as inWords } from "./words.js";

let serial = 0;
export const unique = (name) => `${name}-${++serial}`;

/** The head of a page: title, purpose and actions. */
export function heading(title, lead, ...actions) {
  return h("header.heading", [
    h("div", [h("h1", title), lead && h("p.lead", lead)]),
    actions.length > 0 && h("div.actions", ...actions),
  ]);
}

/** A button. `kind`: primary, plain, quiet or danger. It is busy while `onClick` runs, and shows its errors. */
export function button(label, onClick, { kind = "plain", icon: name, small, ...props } = {}) {
  const text = [name && icon(name), h("span", label)];
  const element = h("button", { type: "button", class: `button ${kind} ${small ? "small" : ""}`, ...props }, text);
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
export const linkButton = (label, href, { kind = "plain", icon: name, small, ...props } = {}) =>
  h("a", { class: `button ${kind} ${small ? "small" : ""}`, href, ...props }, [name && icon(name), h("span", label)]);

/** Fields for text, one of several options (pairs of value and label), and yes or no. */
export const textInput = (props) => h("input", { type: "text", autocomplete: "off", spellcheck: false, ...props });
export function choice(pairs, { value, ...props } = {}) {
  const options = pairs.map(([value, label]) => h("option", { value }, label));
  const select = h("select", props, options);
  if (value !== undefined) select.value = value;
  return select;
}

/** Boxes for several of `values`, with `hints` by value. The element has `chosen()`: the values, or null for none. */
export function several(legend, hint, values, { hints = {}, on = [], disabled = false } = {}) {
  const boxes = values.map((value) =>
    h("input", { type: "checkbox", value, checked: on.includes(value), disabled, "aria-label": value }),
  );
  const line = (box) =>
    h("label.check", [box, h("span", [` ${box.value}`, h("span.hint", ` ${hints[box.value] ?? ""}`)])]);
  const chosen = () => boxes.filter((box) => box.checked).map((box) => box.value);
  const element = h("fieldset.many", [h("legend", legend), hint && h("p.hint", hint), boxes.map(line)]);
  return Object.assign(element, { chosen: () => (chosen().length > 0 ? chosen() : null) });
}
export const ticked = (input, label) => h("label.check", [input, ` ${label}`]);

/** A state in words with an icon. `kind`: an outcome, which gives the color. */
export const outcome = (kind, picture, text) => h("span", { class: `outcome ${kind}` }, [icon(picture), text]);

/** Pairs of name and value. */
export const facts = (pairs) => each("dl.facts", pairs, ([name, value]) => h("div", [h("dt", name), h("dd", value)]));

/** Elements that unfold below `summary`. */
export const folded = (summary, children, props) =>
  h("details.details", props ?? {}, [h("summary", summary), children]);

/** A labeled control; screen readers read `hint` with it. */
export function field(label, control, hint) {
  control.id ||= unique("field");
  const about = hint && h("p.hint", { id: unique("hint") }, hint);
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div.field", [h("label", { for: control.id }, label), control, about]);
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
  return h("section.empty", [icon(name), h("h2", title), h("p", text), h("div.actions", ...actions)]);
}

/** A progress message. */
export function waiting(text = "One moment…") {
  return h("p.waiting", { role: "status" }, [h("span.spinner", { "aria-hidden": "true" }), text]);
}

/** An error with remedy and code. */
export function problemBox(problem, retry) {
  const said = inWords(problem);
  return h("section.notice.error", { role: "alert" }, [
    icon("warning"),
    h("div", [
      h("h2", said.title ?? "Unexpected error"),
      h("p", said.text),
      said.remedy && h("p", said.remedy),
      h("p.code", h("code", problem.code ?? problem.name)),
      retry && button("Try again", retry),
    ]),
  ]);
}

/** A framed text with an icon. */
export const notice = (picture, content, kind = "") =>
  h("div", { class: `notice ${kind}` }, [
    icon(picture),
    h("div", typeof content === "string" ? h("p", content) : content),
  ]);

/** A short message beside the page, where it covers no button, announced by screen readers. */
export function toast(text, kind = "ok") {
  const place = toasts();
  const line = h("div", { class: `toast ${kind}` }, [icon(kind === "ok" ? "check" : "warning"), h("span", text)]);
  const dismiss = h(
    "button.button.quiet.small",
    { type: "button", "aria-label": "Dismiss", onClick: () => line.remove() },
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
  const place = dialog.querySelector(".toasts") ?? h("div.toasts", { role: "status", "aria-live": "polite" });
  dialog.append(place);
  return place;
}

/** Show an error as a toast. */
export function tell(error) {
  if (error.name === "AbortError") return;
  const { text, remedy } = inWords(error);
  toast([text, remedy].filter(Boolean).join(" "), "error");
}

/** A card with `elements`, whose button saves what `changed()` returns: the edited fields. An error stays in the card. */
export function saveForm(elements, changed, save) {
  const wrong = h("div");
  const go = h("button.button.primary", { type: "submit" }, "Save");
  const submit = async (event) => {
    event.preventDefault();
    const json = changed();
    if (Object.keys(json).length === 0) return toast("Nothing was changed.");
    go.disabled = true; // a second click would do it twice
    try {
      await save(json);
    } catch (error) {
      if (error.name !== "AbortError") fill(wrong, problemBox(error));
    } finally {
      go.disabled = false;
    }
  };
  return h("form.card.stack", { onSubmit: submit }, [elements, wrong, h("div.actions", go)]);
}

/** Why input was refused, beside the form. */
export const refused = (...text) => h("p.refused", { role: "alert" }, [icon("warning"), h("span", text)]);

/** A table with a caption for screen readers. `rows`: lists of cells, each text or an element. */
export function table(caption, columns, rows) {
  return h(
    "div.scroll",
    { tabindex: "0", role: "region", "aria-label": caption },
    h("table", [
      h("caption.unseen", caption),
      h(
        "thead",
        each("tr", columns, (column) => h("th", { scope: "col" }, column)),
      ),
      each("tbody", rows, (cells) => each("tr", cells, (cell) => h("td", cell))),
    ]),
  );
}

/** A number with its label. */
export function stat(name, value, hint) {
  return h("div.stat", [h("dt", name), h("dd", value), hint && h("dd.hint", hint)]);
}

/** Show a message while `load` runs, then its result or error with a retry button. A load that failed with 401 or 403 is
 * repeated when the key changes. */
export function loading(load, text) {
  const place = h("div.loading", { tabindex: "-1" });
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
