// The strangers that a gallery remembers: name, merge and forget them.

import { all, call, galleryPath, part } from "./api.js";
import { askWho } from "./asking.js";
import { fill, h } from "./dom.js";
import { counted, when, whole } from "./numbers.js";
import { Pictures } from "./stored.js";
import { ask, button, choice, confirmed, field, loading, table, toast } from "./ui.js";
import * as words from "./words.js";

const PAGE = 50;

/** The section of a gallery's page; null if the gallery remembers no strangers. `onNamed` is called after each promotion. */
export function strangers({ name: gallery, remember_strangers_days: days, keep_crops: keeps }, signal, onNamed) {
  if (!days) return null;
  const path = `${galleryPath(gallery)}/strangers`;
  const own = (one) => `${path}/${part(one.id)}`;
  const place = h("div.stack");
  const pictures = new Pictures(gallery, signal);
  const portraits = new Map(); // kept while the list changes
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
    const clear = button("Forget all", forgetAll, { kind: "danger", icon: "trash" });
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
      h("span.person-cell", [keeps && face(one), h("code", { title: one.id }, words.strangerId(one))]),
      whole(one.seen_count),
      when(one.first_seen),
      when(one.last_seen),
      h("div.row.tight", [
        act("Name this person", "Name", one, promote, { icon: "enroll" }),
        act("Merge", "Merge", one, merge, { icon: "move" }),
        act("Forget", "Forget", one, forget, { kind: "danger", icon: "trash" }),
      ]),
    ];
  }

  const act = (label, does, one, run, props) =>
    button(label, () => run(one), { ...props, "aria-label": `${does} stranger ${words.strangerId(one)}`, small: true });

  function face({ id }) {
    if (!portraits.has(id)) portraits.set(id, pictures.of({ stranger: id }, ""));
    return portraits.get(id);
  }

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
    if (others.length === 0) return toast("There is no other stranger.");
    const told = (other) => `${words.strangerId(other)}, ${words.visits(other)}, last seen ${when(other.last_seen)}`;
    const select = choice(others.map((other) => [other.id, told(other)]));
    const elements = [
      field("The same person as", select),
      h("p.hint", "The chosen id remains. This cannot be undone."),
    ];
    ask("Merge two strangers", "Merge", elements, async () => {
      const { stranger } = await call("POST", `${own(one)}/merge`, { json: { into: select.value } });
      const kept = listed.find((other) => other.id === stranger.id);
      if (kept) Object.assign(kept, stranger);
      leave(one);
      toast("Merged.");
    });
  }

  async function forget(one) {
    const sure = await confirmed(
      "Forget this stranger?",
      "The id and the stored faces are deleted. If the person comes back, a new stranger is remembered.",
      "Forget",
    );
    if (!sure) return;
    const gone = await call("DELETE", own(one));
    leave(one);
    toast(`Forgotten. Receipt ${gone.receipt.id.slice(0, 8)}….`);
  }

  async function forgetAll() {
    const sure = await confirmed(
      "Forget all strangers?",
      `All strangers of “${gallery}” are deleted. This cannot be undone.`,
      "Forget all",
    );
    if (!sure) return;
    const gone = await call("DELETE", path);
    listed.length = 0;
    next = null;
    show();
    toast(`Forgotten. Receipt ${gone.receipt.id.slice(0, 8)}….`);
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
