// The strangers that a gallery remembers: name, merge and forget them.

import { all, call, galleryPath, part } from "./api.js";
import { askMerge, askWho } from "./asking.js";
import { careful } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { counted, when, whole } from "./numbers.js";
import { briefly } from "./receipt.js";
import { pages } from "./reports.js";
import { Pictures } from "./stored.js";
import { button, table, toast } from "./ui.js";
import * as words from "./words.js";

const PAGE = 50;
const GONE = "The id and the stored faces are deleted. If the person comes back, a new stranger is remembered.";
const ALL_GONE = "All strangers of this gallery are deleted. This cannot be undone.";

/** The section of a gallery's page; null if the gallery remembers no strangers. `onNamed` is called after each promotion. */
export function strangers({ name: gallery, remember_strangers_days: days, keep_crops: keeps }, signal, onNamed) {
  if (!days) return null;
  const path = `${galleryPath(gallery)}/strangers`;
  const own = (one) => `${path}/${part(one.id)}`;
  const section = h("section.stack", { tabindex: "-1", "aria-label": "Remembered strangers" });
  const pictures = new Pictures(gallery, signal);
  const ask = async (cursor) => {
    const page = await call("GET", path, { query: { limit: PAGE, cursor }, signal });
    clear.hidden = !cursor && page.data.length === 0;
    return page;
  };
  const rows = (data) =>
    table("Strangers", ["Stranger", "Actions", "Visits", "Last seen", "First seen"], data.map(row));
  const nothing = h("p.card", "No strangers yet. Unknown faces of identified photos appear here.");
  const about = `Unknown people of identified photos, kept for ${counted(days, "day")} after they were last seen.`;
  const question = () => ["Forget all strangers?", ALL_GONE, "Forget all"];
  const clear = careful("Forget all", question, () => forget(path), { icon: "trash" });

  /** Load the strangers, again after each change. */
  function show() {
    const list = pages(ask, rows, nothing);
    fill(section, h("div.row.between", [h("h2", "Strangers"), clear]), h("p.lead", about), list);
  }

  function row(one) {
    return [
      h("span.person-cell", [
        keeps && pictures.once({ stranger: one.id }),
        h("code", { title: one.id }, words.strangerId(one)),
      ]),
      h("div.row.tight", [
        button("Name", () => promote(one), named("Name", one, "enroll")),
        button("Merge", () => merge(one), named("Merge", one, "move")),
        careful("Forget", sure, () => forget(own(one)), named("Forget", one, "trash")),
      ]),
      whole(one.seen_count),
      when(one.last_seen),
      when(one.first_seen),
    ];
  }

  const sure = () => ["Forget this stranger?", GONE, "Forget"];
  const named = (does, one, icon) => ({ icon, "aria-label": `${does} stranger ${words.strangerId(one)}`, small: true });

  /** Show that a stranger is `done` with: the focused button is removed. */
  function changed(done) {
    toast(done);
    show();
    section.focus();
  }

  async function promote(one) {
    const hint =
      "The stored faces of the stranger become photos of this person. Check that it is the right one: there is no comparison.";
    await askWho(gallery, signal, hint, async (found) => {
      await call("POST", `${own(one)}/promote`, {
        json: { subject: found.id, ...(found.isNew && found.name && { name: found.name }) },
      });
      return () => {
        changed(`${words.called(found)} is enrolled.`);
        onNamed();
      };
    });
  }

  async function merge(one) {
    const others = (await all(path, { query: { limit: 1000 }, signal })).filter((other) => other.id !== one.id);
    if (signal.aborted) return;
    const told = (other) => `${words.strangerId(other)}, ${words.visits(other)}, last seen ${when(other.last_seen)}`;
    const hint = () => h("p.hint", "The chosen id remains. This cannot be undone.");
    askMerge("stranger", others, told, hint, async (into) => {
      await call("POST", `${own(one)}/merge`, { json: { into } });
      return () => changed("Merged.");
    });
  }

  const forget = async (which) => changed(`Forgotten. ${briefly(await call("DELETE", which))}`);
  show();
  return section;
}
