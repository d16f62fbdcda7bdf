// The strangers that a gallery remembers: name, merge and forget them.

import { all, call, galleryPath, part } from "./api.js";
import { askMerge, askWho } from "./asking.js";
import { careful } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { counted, when, whole } from "./numbers.js";
import { briefly } from "./receipt.js";
import { Pictures } from "./stored.js";
import { button, loading, table, toast } from "./ui.js";
import * as words from "./words.js";

const PAGE = 50;
const GONE = "The id and the stored faces are deleted. If the person comes back, a new stranger is remembered.";
const ALL_GONE = "All strangers of this gallery are deleted. This cannot be undone.";

/** The section of a gallery's page; null if the gallery remembers no strangers. `onNamed` is called after each promotion. */
export function strangers({ name: gallery, remember_strangers_days: days, keep_crops: keeps }, signal, onNamed) {
  if (!days) return null;
  const path = `${galleryPath(gallery)}/strangers`;
  const own = (one) => `${path}/${part(one.id)}`;
  const place = h("div.stack");
  const pictures = new Pictures(gallery, signal);
  const listed = [];
  let next = null;

  async function load() {
    const page = await call("GET", path, { query: { limit: PAGE, cursor: next }, signal });
    listed.push(...page.data);
    next = page.next;
    show();
  }

  function show() {
    const more = button("Show more strangers", load);
    const clear = careful("Forget all", () => ["Forget all strangers?", ALL_GONE, "Forget all"], forgetAll, {
      icon: "trash",
    });
    fill(
      place,
      listed.length === 0
        ? h("p.card", "No strangers yet. Unknown faces of identified photos appear here.")
        : table("Strangers", ["Stranger", "Visits", "First seen", "Last seen", "Actions"], listed.map(row)),
      listed.length > 0 &&
        h("div.row", [
          h(
            "p.hint",
            { role: "status" },
            `${counted(listed.length, "stranger", "strangers")}${next ? " so far" : ""}.`,
          ),
          next && more,
          clear,
        ]),
    );
  }

  function row(one) {
    return [
      h("span.person-cell", [
        keeps && pictures.once({ stranger: one.id }),
        h("code", { title: one.id }, words.strangerId(one)),
      ]),
      whole(one.seen_count),
      when(one.first_seen),
      when(one.last_seen),
      h("div.row.tight", [
        act("Name this person", "Name", one, promote, { icon: "enroll" }),
        act("Merge", "Merge", one, merge, { icon: "move" }),
        careful(
          "Forget",
          () => ["Forget this stranger?", GONE, "Forget"],
          () => forget(one),
          { icon: "trash", "aria-label": `Forget stranger ${words.strangerId(one)}`, small: true },
        ),
      ]),
    ];
  }

  const act = (label, does, one, run, props) =>
    button(label, () => run(one), { ...props, "aria-label": `${does} stranger ${words.strangerId(one)}`, small: true });

  function leave(one) {
    listed.splice(listed.indexOf(one), 1);
    show();
  }

  async function promote(one) {
    const hint =
      "The stored faces of the stranger become photos of this person. Check that it is the right one: there is no comparison.";
    await askWho(gallery, signal, hint, async (found) => {
      await call("POST", `${own(one)}/promote`, {
        json: { subject: found.id, ...(found.isNew && found.name && { name: found.name }) },
      });
      leave(one);
      toast(`${words.called(found)} is enrolled.`);
      onNamed();
    });
  }

  async function merge(one) {
    const others = (await all(path, { query: { limit: 1000 }, signal })).filter((other) => other.id !== one.id);
    if (signal.aborted) return;
    const told = (other) => `${words.strangerId(other)}, ${words.visits(other)}, last seen ${when(other.last_seen)}`;
    const hint = () => h("p.hint", "The chosen id remains. This cannot be undone.");
    askMerge("stranger", others, told, hint, async (into) => {
      const { stranger } = await call("POST", `${own(one)}/merge`, { json: { into } });
      const kept = listed.find((other) => other.id === stranger.id);
      if (kept) Object.assign(kept, stranger);
      leave(one);
      toast("Merged.");
    });
  }

  async function forget(one) {
    const gone = await call("DELETE", own(one));
    leave(one);
    toast(`Forgotten. ${briefly(gone)}`);
  }

  async function forgetAll() {
    const gone = await call("DELETE", path);
    listed.length = 0;
    next = null;
    show();
    toast(`Forgotten. ${briefly(gone)}`);
  }

  return h("section.stack", [
    h("h2", "Strangers"),
    h(
      "p.lead",
      `Unknown people of identified photos, kept for ${counted(days, "day", "days")} after they were last seen.`,
    ),
    loading(async () => {
      await load();
      return place;
    }),
  ]);
}
