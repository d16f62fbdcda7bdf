// A gallery's settings as fields: what most people decide first, what few ever change folded away.

import { h } from "./dom.js";
import { field } from "./ui.js";
import { PRESETS, riskBriefly } from "./words.js";

const DEFAULT = {
  risk: { fpir: 0.001 },
  keep_crops: false,
  retention_days: null,
  liveness: "off",
  liveness_threshold: null,
  fusion: "quality_weighted",
  review_factor: 10,
  min_margin: 0.02,
  index: "auto",
  recall: 0.999,
  quality_gate: { min_eye_distance_px: 12, min_sharpness: 2, min_brightness: 25, max_brightness: 235, min_contrast: 10, max_abs_yaw: 0.75 },
};
const FUSION = [
  ["quality_weighted", "All, better photos counting more"],
  ["centroid", "All, each counting the same"],
  ["mean_top_k", "The three most alike"],
  ["max", "The most alike alone"],
];
const INDEX = [
  ["auto", "Chosen by the gallery’s size"],
  ["exact", "Every photo is compared"],
  ["compact", "Compact codes first (large galleries)"],
  ["graph", "A graph of neighbors (large galleries)"],
];
const GATE = [
  ["min_eye_distance_px", "Smallest distance between the eyes, in pixels"],
  ["min_sharpness", "Least sharpness"],
  ["min_brightness", "Darkest face, of 255"],
  ["max_brightness", "Brightest face, of 255"],
  ["min_contrast", "Least contrast"],
  ["max_abs_yaw", "Farthest turned aside (0 to the front, 1 in profile)"],
];

/** Fields for the settings `from`. The result has `elements` and `read()`, which gives what was changed of them. */
export function galleryForm(from = DEFAULT) {
  const options = (pairs, value) => {
    const select = h("select", {}, pairs.map(([name, words]) => h("option", { value: name }, words)));
    select.value = value;
    return select;
  };
  const number = (value, props) => h("input", { type: "number", value: value ?? "", step: "any", ...props });
  const checked = (on) => h("input", { type: "checkbox", checked: on });

  const preset = PRESETS.find(([, , , rate]) => rate === from.risk.fpir)?.[0];
  const risk = options(
    [...PRESETS.map(([value, name, words]) => [value, `${name}: ${words}`]), ...(preset ? [] : [["as-it-is", `As it is: ${riskBriefly(from.risk)}`]]), ["own", "Another number…"]],
    preset ?? "as-it-is",
  );
  const rate = number("", { min: 2, max: 1e12, step: 1, placeholder: "5000" });
  const own = field("One stranger in", rate, "How many searches for strangers it takes until one is taken for somebody.");
  const showOwn = () => {
    own.hidden = risk.value !== "own";
    rate.required = !own.hidden;
  };
  risk.addEventListener("change", showOwn);
  showOwn();
  const crops = checked(from.keep_crops);
  const days = number(from.retention_days, { min: 1, max: 36_500, step: 1, placeholder: "never" });
  const live = checked(from.liveness === "required");
  const liveFrom = number(from.liveness_threshold, { min: 0, max: 1, placeholder: "the model’s own" });
  const fusion = options(FUSION, from.fusion);
  const review = number(from.review_factor, { min: 1, max: 1000, required: true });
  const margin = number(from.min_margin, { min: 0, max: 1, required: true });
  const index = options(INDEX, from.index);
  const recall = number(from.recall, { min: 0.5, max: 1, required: true });
  const gate = GATE.map(([name, label]) => [name, label, number(from.quality_gate[name], { min: 0, required: true })]);

  const all = () => ({
    risk: risk.value === "as-it-is" ? from.risk : { fpir: risk.value === "own" ? 1 / rate.valueAsNumber : PRESETS.find(([name]) => name === risk.value)[3] },
    keep_crops: crops.checked,
    retention_days: days.value === "" ? null : days.valueAsNumber,
    liveness: live.checked ? "required" : "off",
    liveness_threshold: liveFrom.value === "" ? null : liveFrom.valueAsNumber,
    fusion: fusion.value,
    review_factor: review.valueAsNumber,
    min_margin: margin.valueAsNumber,
    index: index.value,
    recall: recall.valueAsNumber,
    quality_gate: Object.fromEntries(gate.map(([name, , input]) => [name, input.valueAsNumber])),
  });
  const tick = (input, label, hint) => h("div", { class: "field" }, h("label", { class: "check" }, input, label), h("p", { class: "hint" }, hint));
  const advanced = h(
    "details",
    { class: "details" },
    h("summary", {}, "Advanced"),
    tick(live, "Only people before the camera", "Refuses pictures of people. Needs a model that can tell."),
    field("Least liveness", liveFrom, "0 to 1. Empty: what the model’s makers say."),
    field("Of somebody’s photos, count", fusion),
    field("“Not sure” up to so many times the risk", review, "1: never “not sure” for want of similarity."),
    field("Two people nearer than this are not told apart", margin),
    h("fieldset", { class: "stack" }, h("legend", {}, "Faces that are good enough"), gate.map(([, label, input]) => field(label, input))),
    field("How it searches", index),
    field("How often such a search must find the right one", recall, "Of 1; less often, and every photo is compared."),
  );
  // The browser can show what is wrong with a field only where that is to be seen; the event does not bubble.
  advanced.addEventListener("invalid", () => (advanced.open = true), { capture: true });
  return {
    elements: [
      field("How strict", risk, "Of so many strangers who are searched for, one may be taken for somebody of this gallery. Stricter means that people of the gallery are missed more often."),
      own,
      tick(crops, "Keep a small picture of each enrolled face", "So that you can move to a better model later without asking everybody for a new photo. It is stored encrypted. Without it no picture is kept at all."),
      field("Forget photos after so many days", days, "Whoever has none left is deleted. Empty: never."),
      advanced,
    ],
    read() {
      const now = all();
      return Object.fromEntries(Object.entries(now).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(from[name] ?? null)));
    },
  };
}
