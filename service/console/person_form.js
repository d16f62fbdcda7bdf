// Fields of a person: name, tags and metadata.

import { fill, h, icon } from "./dom.js";
import { button, field, textInput } from "./ui.js";
import { readTyped, tags, typed, typedTags } from "./words.js";

/** Fields with the values `from`. The result has `elements`, `name` (the input), `read()`, and `changed()` for the edited
 * fields only. */
export function personForm(from = { name: "", tags: [], metadata: {} }, { nameLabel = "Name" } = {}) {
  const name = textInput({ value: from.name ?? "", maxLength: 500 });
  const labels = textInput({ value: typedTags(from.tags) });
  const rows = h("div.stack.tight");
  const held = new Map(); // row: original entry and its texts
  const add = (key = "", value = "") => {
    const row = h("div.pair", [
      textInput({ value: key, "aria-label": "What", placeholder: "room" }),
      textInput({ value, "aria-label": "Value", placeholder: "12" }),
      h(
        "button.button.quiet",
        { type: "button", "aria-label": "Remove this line", onClick: () => row.remove() },
        icon("close"),
      ),
    ]);
    rows.append(row);
    return row;
  };
  const texts = (row) => [row.children[0].value, row.children[1].value];
  for (const entry of Object.entries(from.metadata)) {
    const row = add(entry[0], typed(entry[1]));
    held.set(row, { entry, shown: texts(row) });
  }
  const untouched = (row) => held.has(row) && held.get(row).shown.every((text, i) => text === texts(row)[i]);
  const pair = (row) =>
    untouched(row) ? held.get(row).entry : [texts(row)[0].trim(), readTyped(texts(row)[1].trim())];
  const first = [name.value, labels.value];
  const more = h("details.details", { open: Object.keys(from.metadata).length > 0 }, [
    h("summary", "More fields"),
    h("p.hint", "Store more data with the person. Searches can filter by it."),
    rows,
    button("Add a line", () => add().firstChild.focus(), { icon: "plus", kind: "quiet" }),
  ]);
  const read = () => ({
    name: name.value.trim() || null,
    tags: tags(labels.value),
    metadata: Object.fromEntries([...rows.children].filter((row) => untouched(row) || texts(row)[0].trim()).map(pair)),
  });
  return {
    name,
    elements: [
      field(nameLabel, name),
      field("Tags", labels, "Separate tags with commas: engineering, night shift. Quote tags that contain a comma."),
      more,
    ],
    read,
    changed() {
      const now = read();
      if (name.value === first[0]) delete now.name;
      if (labels.value === first[1]) delete now.tags;
      if (rows.children.length === held.size && [...rows.children].every(untouched)) delete now.metadata;
      return now;
    },
    clear: () => {
      name.value = labels.value = "";
      fill(rows);
    },
  };
}
