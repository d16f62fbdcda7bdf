// Fields and forms.

import { fill, h, icon } from "./dom.js";
import { problemBox, toast, unique } from "./ui.js";

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

/** A card with `elements`, whose button saves what `changed()` returns: the edited fields. An error stays in the card. */
export function saveForm(elements, changed, save) {
  const go = h("button.button.primary", { type: "submit" }, "Save");
  const { wrong, onSubmit } = submits(go, async () => {
    const json = changed();
    if (Object.keys(json).length === 0) toast("Nothing was changed.");
    else await save(json);
  });
  return h("form.card.stack", { onSubmit }, [elements, wrong, h("div.actions", go)]);
}

/** The listener of a form whose button `go` runs `act`, and the place for a text that `act` returns, or for its error. */
export function submits(go, act) {
  const wrong = h("div");
  const onSubmit = async (event) => {
    event.preventDefault();
    go.disabled = true; // a second click would do it twice
    try {
      const result = await act();
      if (typeof result === "string") fill(wrong, refused(result));
    } catch (error) {
      if (error.name !== "AbortError") fill(wrong, problemBox(error));
    } finally {
      go.disabled = false;
    }
  };
  return { wrong, onSubmit };
}

/** Why input was refused, beside the form. */
export const refused = (...text) => h("p.refused", { role: "alert" }, [icon("warning"), h("span", text)]);
