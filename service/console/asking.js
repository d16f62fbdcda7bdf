// “Who is it?”: a new or an enrolled person of a gallery.

import { part } from "./api.js";
import { personField } from "./choices.js";
import { ask } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { choice, field, textInput, ticked } from "./forms.js";
import { toast, unique } from "./ui.js";
import * as words from "./words.js";

/**
 * Fields for a new or an enrolled person. `known`: the enrolled person at first, if not null. `name`: the input of the name,
 * `between`: elements after the id. The result has the `elements`, the inputs, and `who()`, which resolves to
 * {id, name, isNew}, or to a text that says what is missing. It rejects ids that no address can have.
 */
export function whoFields(signal, { label, isNew, texts, name = textInput({ maxLength: 500 }), between, onSwap }) {
  const id = textInput({ maxLength: 128 });
  const person = personField(label, signal);
  const group = unique("who");
  const radio = (checked) => h("input", { type: "radio", name: group, checked, onChange: swap });
  const [fresh, there] = [radio(isNew), radio(!isNew)];
  const fields = h("div.stack", [
    field("Name", name),
    field("Id", id, "What other programs call them; it cannot be changed later."),
    between,
  ]);
  let ownId = false;
  id.addEventListener("input", () => (ownId = id.value !== ""));
  name.addEventListener("input", () => ownId || (id.value = words.idFrom(name.value)));

  function swap() {
    fields.hidden = !fresh.checked;
    person.hidden = fresh.checked;
    onSwap?.();
  }

  swap();
  return {
    elements: [
      h("fieldset", [
        h("legend.unseen", "New or enrolled"),
        h("div.row", [ticked(fresh, texts[0]), ticked(there, texts[1])]),
      ]),
      fields,
      person,
    ],
    id,
    person,
    fresh,
    async who() {
      const found = fresh.checked ? { id: id.value.trim(), name: name.value.trim() || null } : await person.find();
      if (!found) return person.unfound;
      if (!found.id) return "Enter a name or an id.";
      return part(found.id) && { ...found, isNew: fresh.checked };
    },
    /** Show the fields for an enrolled person, or for a new one. */
    choose(known) {
      (known ? there : fresh).checked = true;
      if (known) person.set(known);
      else [id.value, ownId] = ["", false];
      swap();
    },
  };
}

/** Ask for a new or an enrolled person of a gallery, `known` at first. `act` gets {id, name, isNew}. */
export async function askWho(gallery, signal, hint, act, { yes = "Save", known = null } = {}) {
  const texts = ["A new person", "Someone in this gallery"];
  const fields = whoFields(signal, { label: "Who is it?", isNew: known === null, texts });
  await fields.person.load(gallery);
  if (signal.aborted) return;
  if (known) fields.choose(known);
  ask("Name this person", yes, [fields.elements, h("p.hint", hint)], async () => {
    const found = await fields.who();
    return typeof found === "string" ? found : await act(found);
  });
}

/** Ask which of `others` is the same as one `kind`, and merge them. `told(one)`: its text in the list. `shown(one)`: elements
 * about it. `act` gets the id of the chosen one. */
export function askMerge(kind, others, told, shown, act) {
  if (others.length === 0) return toast(`There is no other ${kind}.`);
  const about = h("div");
  const show = () => fill(about, shown(others.find((one) => one.id === select.value)));
  const select = choice(
    others.map((one) => [one.id, told(one)]),
    { onChange: show },
  );
  show();
  ask(`Merge two ${kind}s`, "Merge", [field("The same person as", select), about], () => act(select.value));
}
