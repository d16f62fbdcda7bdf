// Fields of a person: name, tags and metadata.

import { h } from "./dom.js";
import { field, textInput } from "./forms.js";
import { folded } from "./ui.js";
import { readMetadata, tags, typedMetadata, typedTags } from "./words.js";

/** Fields with the values `from`. The result has `elements`, `name` (the input), and `changed()` for the edited fields. */
export function personForm(from = { name: "", tags: [], metadata: {} }) {
  const name = textInput({ value: from.name ?? "", maxLength: 500 });
  const labels = textInput({ value: typedTags(from.tags) });
  const more = h("textarea", {
    value: typedMetadata(from.metadata),
    rows: 3,
    placeholder: "room: 12",
    spellcheck: false,
  });
  const texts = () => ({ name: name.value, tags: labels.value, metadata: more.value });
  const first = texts();
  const read = () => ({
    name: name.value.trim() || null,
    tags: tags(labels.value),
    metadata: readMetadata(more.value),
  });
  return {
    name,
    elements: [
      field("Name", name),
      field("Tags", labels, "Separate tags with commas: engineering, night shift. Quote tags that contain a comma."),
      folded("More fields", field("Fields", more, "One a line, such as “room: 12”. Searches can filter by them."), {
        open: more.value !== "",
      }),
    ],
    changed: () => Object.fromEntries(Object.entries(read()).filter(([one]) => texts()[one] !== first[one])),
    clear: () => (name.value = labels.value = more.value = ""),
  };
}
