// Recognizer of a gallery, and migration to another one without downtime.

import { call, galleryPath } from "../api.js";
import { each, fill, h, icon } from "../dom.js";
import { counted, whole } from "../numbers.js";
import { galleryHeading, redraws, watch } from "../reports.js";
import { button, confirmed, empty, outcome, toast, waiting } from "../ui.js";

const STATES = {
  none: "One recognizer serves this gallery. No migration is active.",
  running: "A new recognizer is in preparation. Until it is ready, the answers come from the current one.",
  stopped: "The migration is stopped. The embeddings of the new recognizer are kept.",
  switched: "The new recognizer is active. The old one is kept, so that you can roll back.",
};

export const title = ({ gallery }) => `Recognizer of ${gallery}`;

export function render({ gallery }, signal) {
  const path = `${galleryPath(gallery)}/migrate`;
  const body = h("div.stack.wide", waiting("Loading the recognizer…"));
  const places = [h("div.notice"), h("div.cards.models"), h("div"), h("div")];
  const [state, generations, left, steps] = places.map(redraws);
  const page = { path, served: null, found: null };
  const look = watch(
    async () => {
      page.served ??= (await call("GET", "/v1/models", { signal })).models;
      const found = (page.found = await call("GET", path, { signal }));
      const { current, other } = found;
      state(found.state, () => [icon("risk"), h("p", STATES[found.state])]);
      generations([found.state, current, other], () => [
        generation("Active", current),
        other && generation(found.state === "running" ? "In preparation" : "Inactive", other),
      ]);
      left(found.without_crop, () => leftOut(found));
      steps([found.state, current.recognizer, other?.recognizer], () => actions(page));
      if (places[0].parentElement !== body) fill(body, places);
      return found.jobs.length > 0;
    },
    signal,
    body,
  );
  page.act = async (step, json, said) => {
    await call("POST", `${path}${step}`, { json });
    toast(said);
    look();
  };
  const lead = "The recognizer of this gallery, and migration to another one during operation.";
  return h("div.page", [galleryHeading(gallery, "settings", lead), look.note, body]);
}

function generation(role, one) {
  const { template_count: templates, embedded_count: embedded, threshold } = one;
  return h("section.card", [
    h("h2", role),
    h("p.row", [
      h("span.tag", one.model ?? one.recognizer.slice(0, 8)),
      !one.served && outcome("failed", "warning", "missing on this server"),
    ]),
    h("progress", { max: Math.max(1, templates), value: embedded, "aria-label": "Embedded photos" }),
    h("p", `${whole(embedded)} of ${counted(templates, "photo")} embedded.`),
    threshold
      ? h("p.hint", `Threshold ${threshold.threshold.toFixed(4)} at the gallery's risk`)
      : h("p.hint", "No threshold: there is too little calibration data."),
  ]);
}

/** The photos that a new recognizer cannot embed. */
function leftOut({ without_crop_count: count, without_crop: some }) {
  if (count === 0) return [];
  return h("details", [
    h("summary", `${counted(count, "photo")} without a stored picture: enroll these people again`),
    each("ul.bullets", some, ({ subject, template }) => h("li", `${subject} (${template})`)),
  ]);
}

/** The buttons. `page.found` is the latest state when a button is clicked. */
function actions(page) {
  const { state, current, other } = page.found;
  const back = (text) =>
    button(text, async () => {
      const yes = await confirmed(`${text}?`, "Nothing is deleted. You can continue later.", text, { danger: false });
      if (yes) await page.act("/roll-back", undefined, "Done.");
    });
  const finishes = async () => {
    const text = `The embeddings of ${other?.model ?? "the other recognizer"} are deleted. This cannot be undone.`;
    if (await confirmed("Finish the migration?", text, "Finish"))
      await page.act("/finish", {}, "The other embeddings are being deleted.");
  };
  const finish = button("Finish the migration", finishes, { kind: "danger" });
  if (state === "running") return h("div.actions", back("Stop the migration"));
  if (state === "switched") return h("div.actions", [finish, back("Roll back")]);
  const begin = page.served
    .filter((model) => model.recognizer !== current.recognizer)
    .map((model) => button(`Migrate to ${model.display_name}`, () => migrate(page, model), { kind: "primary" }));
  if (state === "stopped") return h("div.actions", [begin, finish]);
  const none = "To migrate, start the server with another pack (KITH_EXTRA_PACKS).";
  return begin.length > 0 ? h("div.actions", begin) : empty("move", "No other recognizer is served", none);
}

async function migrate(page, model) {
  const left = page.found.without_crop_count;
  const text = "They have no stored picture. The new recognizer does not find them until they are enrolled again.";
  const options = { danger: false };
  if (left > 0 && !(await confirmed(`Leave out ${counted(left, "photo")}?`, text, "Migrate", options))) return;
  await page.act("", { to: model.recognizer, force: left > 0 }, "Migration started. Searches continue.");
}
