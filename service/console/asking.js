// Dialogs that ask for something, and show why it failed.

import { personField } from "./choices.js";
import { fill, h, icon } from "./dom.js";
import { dialog, field, unique } from "./ui.js";
import * as words from "./words.js";

/** A dialog with `elements` and a button that runs `act`. What `act` returns, or its error, stays in the dialog. */
export function ask(title, yes, elements, act) {
  const go = h("button", { type: "submit", class: "button primary" }, yes);
  const wrong = h("p", { class: "refused", role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const refusal = await act();
      if (refusal) fill(wrong, icon("warning"), refusal);
      else box.close();
    } catch (error) {
      if (error.name !== "AbortError") fill(wrong, icon("warning"), error.message);
    } finally {
      go.disabled = false;
    }
  };
  const cancel = h("button", { type: "button", class: "button plain", onClick: () => box.close() }, "Cancel");
  const box = dialog(
    title,
    h("form", { class: "stack", onSubmit: submit }, elements, wrong, h("div", { class: "actions end" }, cancel, go)),
  );
}

/** Ask for a new or an enrolled person of a gallery, `known` at first. `act` gets {id, name, isNew}. */
export async function askWho(gallery, signal, hint, act, { yes = "Save", known = null } = {}) {
  const name = h("input", { type: "text", autocomplete: "off", maxLength: 500 });
  const id = h("input", { type: "text", autocomplete: "off", spellcheck: false, maxLength: 128 });
  const person = personField("Who is it?", signal);
  await person.load(gallery);
  if (signal.aborted) return;
  const group = unique("who");
  const fresh = h("input", { type: "radio", name: group, checked: known === null });
  const there = h("input", { type: "radio", name: group, checked: known !== null });
  if (known) person.set(known);
  const fields = h(
    "div",
    { class: "stack" },
    field("Name", name),
    field("Id", id, "What other programs call them; it cannot be changed later."),
  );
  const swap = () => {
    fields.hidden = !fresh.checked;
    person.hidden = fresh.checked;
  };
  for (const choice of [fresh, there]) choice.addEventListener("change", swap);
  let typed = false;
  id.addEventListener("input", () => (typed = id.value !== ""));
  name.addEventListener("input", () => typed || (id.value = words.idFrom(name.value)));
  swap();
  const choices = h(
    "div",
    { class: "row" },
    h("label", { class: "check" }, fresh, "A new person"),
    h("label", { class: "check" }, there, "Somebody in this gallery"),
  );
  ask("Name this person", yes, [choices, fields, person, h("p", { class: "hint" }, hint)], async () => {
    const found = fresh.checked ? { id: id.value.trim(), name: name.value.trim() || null } : await person.find();
    if (!found) return person.unfound;
    if (!found.id) return "Enter a name or an id.";
    if (fresh.checked && words.idRefusal(found.id)) return words.idRefusal(found.id);
    return await act({ ...found, isNew: fresh.checked });
  });
}
