// What is known of a person besides their face: name, tags, and whatever else is to be kept with them.

import { fill, h, icon } from "./dom.js";
import { button, field } from "./ui.js";
import { readTyped, tags, typed } from "./words.js";

/** Fields of a person, `from` what is known. The result has `elements`, `name` (the input) and `read()`. */
export function personForm(from = { name: "", tags: [], metadata: {} }, { nameLabel = "Name" } = {}) {
  const name = h("input", { type: "text", value: from.name ?? "", autocomplete: "off", maxLength: 500 });
  const labels = h("input", { type: "text", value: from.tags.join(", "), autocomplete: "off" });
  const rows = h("div", { class: "stack tight" });
  const add = (key = "", value = "") => {
    const row = h(
      "div",
      { class: "pair" },
      h("input", { type: "text", value: key, "aria-label": "What", placeholder: "room", autocomplete: "off" }),
      h("input", { type: "text", value, "aria-label": "Value", placeholder: "12", autocomplete: "off" }),
      h("button", { type: "button", class: "button quiet", "aria-label": "Remove this line", onClick: () => row.remove() }, icon("close")),
    );
    rows.append(row);
    return row;
  };
  for (const [key, value] of Object.entries(from.metadata)) add(key, typed(value));
  const more = h(
    "details",
    { class: "details", open: Object.keys(from.metadata).length > 0 },
    h("summary", {}, "More about them"),
    h("p", { class: "hint" }, "Anything that you want kept with the person. A search can ask for it."),
    rows,
    button("Add a line", () => add().firstChild.focus(), { icon: "plus", kind: "quiet" }),
  );
  return {
    name,
    elements: [field(nameLabel, name), field("Tags", labels, "With commas between, such as: engineering, night shift"), more],
    read: () => ({
      name: name.value.trim() || null,
      tags: tags(labels.value),
      metadata: Object.fromEntries(
        [...rows.children]
          .map((row) => [row.children[0].value.trim(), readTyped(row.children[1].value.trim())])
          .filter(([key]) => key),
      ),
    }),
    clear: () => {
      name.value = labels.value = "";
      fill(rows);
    },
  };
}
