// Fields of a gallery's settings: common ones first, the others under “Advanced”.

import { call } from "./api.js";
import { h } from "./dom.js";
import { choice, field, ticked } from "./forms.js";
import { folded, unique } from "./ui.js";
import { misses, PRESETS, riskInWords, SEARCHES } from "./words.js";

/** What a new gallery has at first, as the service does. */
const NEW = { risk: { fpir: 0.01 }, keep_crops: false, review_factor: 10, one_face_per_person: true };

const NO_PICTURES =
  "You see no faces beside names, cannot compare them, and need all photos again to move to a better recognizer.";
const STRANGERS =
  "Gives unknown people a lasting id, until so many days after they were last seen. Their faces are stored without their consent: get legal advice first. Empty: never.";

/** Fields for the settings `from`. The result has `elements`, and `read()` for the changed settings. */
export function galleryForm(from = NEW) {
  const number = (value, props) => h("input", { type: "number", value: value ?? "", step: "any", ...props });
  const checked = (on) => h("input", { type: "checkbox", checked: on });

  const preset = PRESETS.find(([, , , rate]) => rate === from.risk.fpir)?.[0];
  const current = preset ? [] : [["as-it-is", `Current: ${riskInWords(from.risk)}`]];
  const options = [...SEARCHES, ...current, ["own", "Another number…"]];
  const risk = choice(options, { value: preset ?? "as-it-is" });
  const rate = number("", { min: 2, max: 1e12, step: 1, placeholder: "5000" });
  const own = field("One stranger in", rate, "Searches for strangers per wrong match.");
  const showOwn = () => {
    own.hidden = risk.value !== "own";
    rate.required = !own.hidden;
  };
  risk.addEventListener("change", showOwn);
  showOwn();
  const group = unique("crops");
  const radio = (kept) => h("input", { type: "radio", name: group, checked: from.keep_crops === kept });
  const [crops, none] = [radio(true), radio(false)];
  const days = number(from.retention_days, { min: 1, max: 36_500, step: 1, placeholder: "never" });
  const remember = number(from.remember_strangers_days, { min: 1, max: 3650, step: 1, placeholder: "never" });
  const live = checked(from.liveness === "required");
  const liveFrom = number(from.liveness_threshold, { min: 0, max: 1, placeholder: "model default" });
  const review = number(from.review_factor, { min: 1, max: 1000, required: true });
  const once = checked(from.one_face_per_person);

  const chosenRisk = () =>
    risk.value === "as-it-is"
      ? from.risk
      : { fpir: risk.value === "own" ? 1 / rate.valueAsNumber : PRESETS.find(([name]) => name === risk.value)[3] };
  const cost = h("p.hint", { role: "status" });
  const showCost = async () => {
    const { fpir } = chosenRisk();
    const model = fpir > 0 && fpir < 1 ? await call("GET", `/v1/models?fpir=${fpir}`).catch(() => null) : null;
    if (chosenRisk().fpir === fpir) cost.textContent = model ? misses(model) : ""; // else an answer to an earlier choice
  };
  if (from === NEW) {
    for (const input of [risk, rate]) input.addEventListener("change", showCost);
    showCost();
  }

  const or = (input) => (input.value === "" ? null : input.valueAsNumber);
  const all = () => ({
    risk: chosenRisk(),
    keep_crops: crops.checked,
    retention_days: or(days),
    remember_strangers_days: or(remember),
    liveness: live.checked ? "required" : "off",
    liveness_threshold: or(liveFrom),
    review_factor: review.valueAsNumber,
    one_face_per_person: once.checked,
  });
  const tick = (input, label, hint) => h("div.field", [ticked(input, label), h("p.hint", hint)]);
  const advanced = folded("Advanced", [
    tick(live, "Only live people", "Refuses pictures of people. Needs a pack with a liveness model."),
    field("Minimum liveness", liveFrom, "0 to 1. Empty: the default of the model."),
    field("Review factor", review, "“Not sure” up to this multiple of the risk. 1: never."),
    tick(once, "One face per person", "Names a person in one face of a photo only. Clear it for collages."),
  ]);
  // The browser shows validation errors only on visible fields. The event does not bubble.
  advanced.addEventListener("invalid", () => (advanced.open = true), { capture: true });
  return {
    elements: [
      field("How strict", risk, "Strangers per wrong match. Stricter settings miss enrolled people more often."),
      own,
      cost,
      h("fieldset.stack.tight", [
        h("legend", "Pictures of the faces"),
        tick(
          crops,
          "Keep a small picture of each enrolled face",
          `Stored encrypted.${from === NEW ? "" : " People enrolled before have none: enroll a photo of each of them again to add one."}`,
        ),
        tick(none, "Keep no pictures", NO_PICTURES),
      ]),
      field("Delete photos after days", days, "People without photos are deleted too. Empty: never."),
      field("Remember strangers for days", remember, STRANGERS),
      advanced,
    ],
    read() {
      const now = all();
      return Object.fromEntries(
        Object.entries(now).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(from[name] ?? null)),
      );
    },
  };
}
