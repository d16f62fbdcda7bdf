// Which recognizer a gallery's searches use, and how it moves to another one without a pause.

import { call, galleryPath } from "../api.js";
import { fill, h, icon } from "../dom.js";
import { counted, ofHundred, whole } from "../numbers.js";
import { galleryHeading, watch } from "../reports.js";
import { button, confirmed, empty, loading, problemBox, table, toast } from "../ui.js";

const STATES = {
  none: "One recognizer answers, and no other is being made ready.",
  shadow:
    "Another recognizer is being made ready behind the one that answers. Searches by photo are asked of both, and only the old one's answer counts.",
  cut_over: "The new recognizer answers. The one before is kept, so that you can go back.",
  set_aside: "You went back to the recognizer before. What was made for the other is kept.",
};

export const title = ({ gallery }) => `Recognizer of ${gallery}`;

export function render({ gallery }, signal) {
  const path = `${galleryPath(gallery)}/migrate`;
  const body = h(
    "div",
    { class: "stack wide" },
    loading(() => new Promise(() => {}), "Asking which recognizer answers…"),
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
      "recognizer",
      "Which network tells these people apart, and how they move to a better one while searches go on.",
    ),
    look.note,
    body,
  );
}

/** The page in parts, of which each is made anew only where what it tells is another: the buttons keep the focus while
 * the numbers above them rise. */
class Parts {
  constructor(served, act) {
    this.served = served;
    this.act = act;
    this.state = h("div", { class: "notice" });
    this.generations = h("div", { class: "cards models" });
    this.comparison = h("div", { hidden: true });
    this.steps = h("div", {});
    this.places = [this.state, this.generations, this.comparison, this.steps];
    this.told = new Map();
  }

  update(found) {
    const { state, current, other } = found;
    this.found = found;
    this.part(this.state, state, () => [icon("risk"), h("p", {}, STATES[state])]);
    this.part(this.generations, [state, current, other], () => [
      generation("Answers now", current),
      other && generation(state === "shadow" ? "Being made ready" : "Kept beside it", other),
    ]);
    this.comparison.hidden = !found.shadow;
    this.part(this.comparison, found.shadow, () => found.shadow && shadow(found.shadow));
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
  const { templates, embedded, threshold } = one;
  return h(
    "section",
    { class: "card" },
    h("h2", {}, role),
    h(
      "p",
      { class: "row" },
      h("span", { class: "tag" }, one.model ?? one.recognizer.slice(0, 8)),
      !one.served && h("span", { class: "outcome failed" }, icon("warning"), "this server does not have it"),
    ),
    h("progress", { max: Math.max(1, templates), value: embedded, "aria-label": "Photos that it knows" }),
    h("p", {}, `It knows ${whole(embedded)} of ${counted(templates, "photo")}.`),
    one.waiting_with_crop > 0 &&
      h("p", { class: "hint" }, `${whole(one.waiting_with_crop)} wait for the job, which reads the kept faces.`),
    one.waiting_without_crop > 0 &&
      h(
        "p",
        { class: "hint" },
        `Of ${whole(one.waiting_without_crop)} no face was kept: they have to be enrolled anew.`,
      ),
    threshold
      ? h("p", { class: "hint" }, `Threshold ${threshold.threshold.toFixed(4)} at the gallery's risk`)
      : h("p", { class: "hint" }, "No threshold: too little is known of how alike strangers are to it."),
  );
}

function shadow({ compared, agreed, same_nearest: nearest, absent, disagreements }) {
  if (compared === 0)
    return h(
      "section",
      { class: "card" },
      h("h2", {}, "How the two compare"),
      h("p", {}, "No search has been asked of both yet. It fills as people search by photo."),
    );
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "How the two compare"),
    h(
      "p",
      {},
      `Of ${counted(compared, "search", "searches")}, they agreed in ${ofHundred(agreed / compared)}; the same person was nearest in ${ofHundred(nearest / compared)}.`,
      absent > 0 && ` ${whole(absent)} disagreed because the new one does not know that person yet.`,
    ),
    disagreements.length > 0 &&
      table(
        "Latest searches that they answered differently",
        ["Now", "Person", "The new one", "Person"],
        disagreements.map((one) => [
          said(one.outcome, one.similarity),
          one.subject ?? "",
          said(one.shadow_outcome, one.shadow_similarity),
          one.shadow_subject ?? "",
        ]),
      ),
  );
}

const said = (outcome, similarity) =>
  `${outcome.replaceAll("_", " ")}${similarity === null ? "" : ` (${similarity.toFixed(3)})`}`;

/** `parts`: whose `found` is what is known when a button is pressed. */
function steps(parts, served, act) {
  const { state, current, other } = parts.found;
  const back = (text) =>
    button(text, async () => {
      const yes = await confirmed({
        title: `${text}?`,
        text: "Nothing is deleted, and you may come back to it.",
        yes: text,
        danger: false,
      });
      if (yes) await act("/roll-back", undefined, "Done.");
    });
  const finish = button(
    "Keep only the one that answers",
    async () => {
      const yes = await confirmed({
        title: "Keep only the one that answers?",
        text: `What ${other?.model ?? "the other"} made of these people is deleted. There is no way back.`,
        yes: "Keep only this one",
      });
      if (yes) await act("/finish", {}, "The other's vectors are being cleared away.");
    },
    { kind: "danger" },
  );
  const over = button(
    "Let the new one answer",
    async () => {
      const yes = await confirmed({
        title: "Let the new recognizer answer?",
        text: `From the next search on. It knows ${whole(parts.found.other.embedded)} of ${counted(parts.found.other.templates, "photo")}; you can go back.`,
        yes: "Let it answer",
        danger: false,
      });
      if (yes) await act("/cut-over", {}, "The new recognizer answers.");
    },
    { kind: "primary", icon: "check" },
  );
  if (state === "shadow") return h("div", { class: "actions" }, over, back("Leave it"));
  if (state === "cut_over") return h("div", { class: "actions" }, finish, back("Go back"));
  const others = served.filter((model) => model.recognizer !== current.recognizer);
  const begin = others.map((model) =>
    button(
      `Make ${model.display_name} ready`,
      () => act("", { to: model.recognizer }, "It is being made ready; searches go on as before."),
      { kind: "primary" },
    ),
  );
  if (state === "set_aside") return h("div", { class: "actions" }, begin, finish);
  return others.length > 0
    ? h("div", { class: "actions" }, begin)
    : empty(
        "move",
        "No other recognizer is served",
        "Start the server with another pack beside this one (KITH_EXTRA_PACKS), and this gallery can move to it while searches go on.",
      );
}
