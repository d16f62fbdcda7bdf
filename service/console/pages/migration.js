// Recognizer of a gallery, and migration to another one without downtime.

import { call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { counted, whole } from "../numbers.js";
import { galleryHeading, watch } from "../reports.js";
import { button, confirmed, empty, loading, problemBox, toast } from "../ui.js";

const STATES = {
  none: "One recognizer serves this gallery. No migration is active.",
  running: "A new recognizer is in preparation. Until it is ready, the answers come from the current one.",
  stopped: "The migration is stopped. The embeddings of the new recognizer are kept.",
  switched: "The new recognizer is active. The old one is kept, so that you can roll back.",
};

export const title = ({ gallery }) => `Recognizer of ${gallery}`;

export function render({ gallery }, signal) {
  const path = `${galleryPath(gallery)}/migrate`;
  const body = h(
    "div",
    { class: "stack wide" },
    loading(() => new Promise(() => {}), "Loading the recognizer…"),
  );
  let served = null;
  let parts = null;
  const look = watch(async () => {
    try {
      served ??= (await call("GET", "/v1/models", { signal })).models;
      const found = await call("GET", path, { signal });
      if (parts === null) fill(body, (parts = new Parts(served, act)).places);
      parts.update(found);
      return found.jobs.length > 0;
    } catch (error) {
      if (error.name !== "AbortError" && parts === null)
        fill(
          body,
          problemBox(error, () => look()),
        );
      throw error;
    }
  }, signal);
  const act = async (step, json, said) => {
    await call("POST", `${path}${step}`, { json });
    toast(said);
    look();
  };
  return h(
    "div",
    { class: "page" },
    galleryHeading(
      gallery,
      "settings",
      "The recognizer of this gallery, and migration to another one during operation.",
    ),
    look.note,
    body,
  );
}

/** Parts of the page. Each is redrawn only if its content changes, so that buttons keep the focus. */
class Parts {
  constructor(served, act) {
    this.served = served;
    this.act = act;
    this.state = h("div", { class: "notice" });
    this.generations = h("div", { class: "cards models" });
    this.left = h("div", {});
    this.steps = h("div", {});
    this.places = [this.state, this.generations, this.left, this.steps];
    this.told = new Map();
  }

  update(found) {
    const { state, current, other } = found;
    this.found = found;
    this.part(this.state, state, () => [icon("risk"), h("p", {}, STATES[state])]);
    this.part(this.generations, [state, current, other], () => [
      generation("Active", current),
      other && generation(state === "running" ? "In preparation" : "Inactive", other),
    ]);
    this.part(this.left, found.without_crop, () => leftOut(found));
    this.part(this.steps, [state, current.recognizer, other?.recognizer], () => steps(this, this.served, this.act));
  }

  part(place, of, make) {
    const text = JSON.stringify(of);
    if (this.told.get(place) === text) return;
    this.told.set(place, text);
    fill(place, make());
  }
}

function generation(role, one) {
  const { template_count: templates, embedded_count: embedded, threshold } = one;
  return h(
    "section",
    { class: "card" },
    h("h2", {}, role),
    h(
      "p",
      { class: "row" },
      h("span", { class: "tag" }, one.model ?? one.recognizer.slice(0, 8)),
      !one.served && h("span", { class: "outcome failed" }, icon("warning"), "missing on this server"),
    ),
    h("progress", { max: Math.max(1, templates), value: embedded, "aria-label": "Embedded photos" }),
    h("p", {}, `${whole(embedded)} of ${counted(templates, "photo")} embedded.`),
    threshold
      ? h("p", { class: "hint" }, `Threshold ${threshold.threshold.toFixed(4)} at the gallery's risk`)
      : h("p", { class: "hint" }, "No threshold: there is too little calibration data."),
  );
}

/** The photos that a new recognizer cannot embed. */
function leftOut({ without_crop_count: count, without_crop: some }) {
  if (count === 0) return [];
  return h(
    "details",
    {},
    h("summary", {}, `${counted(count, "photo")} without a stored picture: enroll these people again`),
    h(
      "ul",
      { class: "bullets" },
      some.map(({ subject, template }) => h("li", {}, `${subject} (${template})`)),
    ),
  );
}

/** The buttons. `parts.found` is the latest state when a button is clicked. */
function steps(parts, served, act) {
  const { state, current, other } = parts.found;
  const back = (text) =>
    button(text, async () => {
      const yes = await confirmed({
        title: `${text}?`,
        text: "Nothing is deleted. You can continue later.",
        yes: text,
        danger: false,
      });
      if (yes) await act("/roll-back", undefined, "Done.");
    });
  const finish = button(
    "Finish the migration",
    async () => {
      const yes = await confirmed({
        title: "Finish the migration?",
        text: `The embeddings of ${other?.model ?? "the other recognizer"} are deleted. This cannot be undone.`,
        yes: "Finish",
      });
      if (yes) await act("/finish", {}, "The other embeddings are being deleted.");
    },
    { kind: "danger" },
  );
  if (state === "running") return h("div", { class: "actions" }, back("Stop the migration"));
  if (state === "switched") return h("div", { class: "actions" }, finish, back("Roll back"));
  const others = served.filter((model) => model.recognizer !== current.recognizer);
  const begin = others.map((model) =>
    button(
      `Migrate to ${model.display_name}`,
      async () => {
        const left = parts.found.without_crop_count;
        const yes =
          left === 0 ||
          (await confirmed({
            title: `Leave out ${counted(left, "photo")}?`,
            text: "They have no stored picture. The new recognizer does not find them until they are enrolled again.",
            yes: "Migrate",
            danger: false,
          }));
        if (yes) await act("", { to: model.recognizer, force: left > 0 }, "Migration started. Searches continue.");
      },
      { kind: "primary" },
    ),
  );
  if (state === "stopped") return h("div", { class: "actions" }, begin, finish);
  return others.length > 0
    ? h("div", { class: "actions" }, begin)
    : empty(
        "move",
        "No other recognizer is served",
        "To migrate, start the server with another pack (KITH_EXTRA_PACKS).",
      );
}
