// Shared elements of all pages: headings, buttons, tables and messages.

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

/** A button that copies `text`; undefined on pages without https, where browsers copy nothing. */
export const copyButton = (label, text) =>
  navigator.clipboard &&
  button(label, () => navigator.clipboard.writeText(text).then(() => toast("Copied.")), { icon: "paste" });

/** A link that looks like a button. */
export const linkButton = (label, href, { kind = "plain", icon: name, small, ...props } = {}) =>
  h("a", { class: `button ${kind} ${small ? "small" : ""}`, href, ...props }, [name && icon(name), h("span", label)]);

/** A state in words with an icon. `kind`: an outcome, which gives the color. */
export const outcome = (kind, picture, text) => h("span", { class: `outcome ${kind}` }, [icon(picture), text]);

/** Pairs of name and value. */
export const facts = (pairs) => each("dl.facts", pairs, ([name, value]) => h("div", [h("dt", name), h("dd", value)]));

/** Elements that unfold below `summary`. */
export const folded = (summary, children, props) =>
  h("details.details", props ?? {}, [h("summary", summary), children]);

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
  const props = { type: "button", "aria-label": "Dismiss", onClick: () => line.remove() };
  line.append(h("button.button.quiet.small", props, icon("close")));
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

/** A table with a caption for screen readers. `rows`: lists of cells, each text or an element. */
export function table(caption, columns, rows) {
  const head = each("tr", columns, (column) => h("th", { scope: "col" }, column));
  const body = each("tbody", rows, (cells) => each("tr", cells, (cell) => h("td", cell)));
  const content = h("table", [h("caption.unseen", caption), h("thead", head), body]);
  return h("div.scroll", { tabindex: "0", role: "region", "aria-label": caption }, content);
}

/** A number with its label. */
export function stat(name, value, hint) {
  return h("div.stat", [h("dt", name), h("dd", value), hint && h("dd.hint", hint)]);
}

/** Show a message while `load` runs, then its result or error with a retry button. */
export function loading(load, text) {
  const place = h("div.loading", { tabindex: "-1" });
  const attempt = async () => {
    const again = place.contains(document.activeElement); // the focused button is removed: keep the focus here
    fill(place, waiting(text));
    if (again) place.focus();
    try {
      fill(place, await load());
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(place, problemBox(error, mayPass(error) && attempt));
    }
  };
  attempt();
  return place;
}
